"""The rank's side of `Ranks`: loading and calling pipelines, and packing of arguments."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..comm import PeerError
from ..core.arguments import parameter_names
from ..engine import engine_of
from ..errors import ConfigError
from ..generate.arguments import CALLBACK
from ..generate.loading import load
from ..generate.runner import PipelineRunner, quieten
from ..launch.failures import Failure, of_exception
from ..launch.messages import RankChannel, encode
from ..parts.part import whole_of

# Loaded pipelines by key, kept between calls.
_pipelines: dict[str, Any] = {}


class CallInterrupted(PeerError):
    """A rank leaves a call because the owner or rank 0 has left it; not the cause of a failure."""


class SentArguments:
    """A call's arguments: tensors on the CPU; ``generators``, which come back advanced; the default one's state."""

    def __init__(self, content: Any) -> None:
        self._content = tree_map(lambda value: value.detach().cpu() if isinstance(value, Tensor) else value, content)
        leaves = tree_leaves(self._content)
        self.generators = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, torch.Generator)))
        self._default_state = torch.default_generator.get_state()

    def received(self, device: torch.device) -> Any:
        """Unpack the arguments on a rank, with tensors on ``device``; torch's default generator gets its state."""
        torch.default_generator.set_state(self._default_state)
        return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, self._content)

    def states(self) -> list[Tensor]:
        """The present states of the generators, torch's default one first."""
        return [generator.get_state() for generator in (torch.default_generator, *self.generators)]

    def advance(self, states: Iterable[Tensor]) -> None:
        """Put the generators into the states of a rank's."""
        for generator, state in zip((torch.default_generator, *self.generators), states, strict=True):
            generator.set_state(state)


def on_cpu(tree: Any) -> Any:
    """Move tensors to the CPU, and gather their patches. Runs on every rank, because each holds some patches."""
    return tree_map(lambda value: whole_of(value).detach().cpu() if isinstance(value, Tensor) else value, tree)


def outcome(folder: str, call: bytes, report: RankChannel | None = None) -> bytes | Failure:
    """Run a call in the owner's working directory; returns the pickled result, or the failure.

    Returned, not raised: the pool would renew the process group, on which the pipelines' meshes stand. They renew
    their own links.
    """
    try:
        os.chdir(folder)
        fn, args, kwargs = pickle.loads(call)
        if report is not None:
            kwargs["report"] = report
        return encode(on_cpu(fn(*args, **kwargs)))
    except BaseException as error:
        return of_exception(dist.get_rank(), error)


def load_named_pipeline(
    key: str, model: str, config: Any, folder: str, options: dict[str, Any]
) -> tuple[str, tuple[str, ...]]:
    """Load a pipeline; returns the name of its class and the parameters of its call."""
    os.chdir(folder)
    quieten()
    pipe = _pipelines[key] = load(model, config, **options)
    return type(pipe).__name__, parameter_names(type(pipe).__call__)


def derive_pipeline(pipe: Any, key: str, name: str) -> tuple[str, tuple[str, ...]]:
    """Create a pipeline of another class with the same components; returns its name and call parameters."""
    made = _pipelines[key] = PipelineRunner(pipe).as_class(name).pipe
    return name, parameter_names(type(made).__call__)


def pipeline_of(key: str) -> Any:
    """The pipeline of this rank that a `RemotePipeline` stands for."""
    if key not in _pipelines:
        raise ConfigError("this pipeline was closed, or is of other Ranks; use one that these Ranks have loaded")
    return _pipelines[key]


def free(key: str) -> None:
    _pipelines.pop(key, None)
    # The mesh frees its groups; every rank does so here.
    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()


def call_method(pipe: Any, path: str, arguments: SentArguments) -> Any:
    args, kwargs = arguments.received(engine_of(pipe).mesh.device)
    return attrgetter(path)(pipe)(*args, **kwargs)


def scheduler_of(pipe: Any) -> tuple[str, dict[str, Any]]:
    return type(pipe.scheduler).__name__, dict(pipe.scheduler.config)


def call_pipeline(
    pipe: Any, arguments: SentArguments, steps: bool, report: RankChannel
) -> tuple[Any, list[Tensor]] | None:
    """Call the pipeline; returns rank 0's output, and the final states of the generators."""
    rank, device = dist.get_rank(), engine_of(pipe).mesh.device
    say: Callable[[Any], None] = report if rank == 0 else lambda message: None

    def ask(kind: str, content: Any) -> Any:
        say((kind, content))
        reply = report.reply()
        if reply is None:
            raise CallInterrupted("the call was broken off by its owner or by rank 0; see what was raised there")
        return reply

    def step(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> Any:
        # On every rank, because reading a tensor may need the other ranks.
        content = (index, on_cpu(timestep), on_cpu(tensors), _plain_properties(pipe))
        returned, assigned = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, ask("step", content))
        for name, value in assigned.items():
            setattr(pipe, name, value)
        return returned

    args, kwargs = arguments.received(device)
    if steps:
        kwargs[CALLBACK] = step
    pipe.progress_bar = lambda iterable=None, total=None: _ProgressBar(say, ask, iterable, total)
    try:
        output = pipe(*args, **kwargs)
        return (output, arguments.states()) if rank == 0 else None
    except BaseException:
        say(("failed", None))
        raise
    finally:
        del pipe.progress_bar


def _plain_properties(pipe: Any) -> dict[str, Any]:
    """Names and values of a pipeline's properties that are numbers, texts or None."""
    values: dict[str, Any] = {}
    for name in dir(type(pipe)):
        if isinstance(inspect.getattr_static(type(pipe), name), property):
            with contextlib.suppress(Exception):
                values[name] = getattr(pipe, name)
    return {name: value for name, value in values.items() if isinstance(value, (int, float, str, type(None)))}


class _ProgressBar:
    """A progress bar on a rank: the owner shows rank 0's, and every rank waits for the owner's reply."""

    def __init__(
        self, say: Callable[[Any], None], ask: Callable[[str, Any], Any], iterable: Any, total: int | None
    ) -> None:
        self._say, self._ask, self._iterable = say, ask, iterable
        say(("open", len(iterable) if hasattr(iterable, "__len__") else total))

    def update(self, n: int = 1) -> None:
        self._ask("update", n)

    def set_description(self, text: str | None = None, refresh: bool = True) -> None:
        self._say(("describe", text))

    def close(self) -> None:
        self._say(("close", None))

    def __iter__(self) -> Iterator[Any]:
        for item in () if self._iterable is None else self._iterable:
            yield item
            self.update()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
