"""Runs of an unmodified pipeline with stand-ins for what its transformer returns and what its scheduler makes of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import Arguments
from ...core.digests import tensor_digest
from ...core.patching import Patch
from ...errors import ConfigError

# Where pipelines keep their autoencoder.
DECODERS = ("vae", "vqvae")


@dataclass(frozen=True)
class WatchedCall:
    """A call of the transformer: its arguments by name, and its result or a stand-in, without batch dimension."""

    arguments: Mapping[str, Any]
    result: Tensor


@dataclass(frozen=True)
class WatchedStep:
    """A step of the scheduler.

    Attributes:
        call: number of the transformer's last call before it.
        output, sample: what the step was given, for one sample without its batch dimension.
        timestep: as the scheduler was given it.
    """

    call: int
    output: Tensor
    timestep: float
    sample: Tensor


@dataclass
class Watched:
    """What was seen in one run of a pipeline.

    Attributes:
        decoded: what the autoencoder was given to decode, with its batch dimension; None: the run did not get there.
    """

    calls: list[WatchedCall] = field(default_factory=list)
    steps: list[WatchedStep] = field(default_factory=list)
    decoded: Tensor | None = None


class _StandIn:
    """Stands in for a pipeline's transformer: its attributes are the transformer's, a call is a function's.

    The transformer's own hooks, those of parallel ranks among them, hear nothing of such a call.
    """

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        self._model, self._call = model, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class _Stop(BaseException):
    """Leaves a pipeline's call: what was to be seen was seen. No `Exception`: pipelines catch those."""


# By the call's number and arguments what the transformer returns for one sample; None: what it computes.
ResultOf = Callable[[int, Mapping[str, Any]], Tensor | None]
# By the step's number the sample in place of the scheduler's; None: the scheduler's.
SampleOf = Callable[[int], Tensor | None]


class PipelineWatcher:
    """Runs one pipeline, of one sample, again and again.

    The transformer computes once for every form of arguments; from then on what it returned stands in for its results.
    Prompts are encoded once.

    Args:
        pipe: left as it was after every run.
    """

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.model: Any = pipe.transformer
        self._names = list(inspect.signature(self.model.forward).parameters)
        self._forms: dict[Any, Any] = {}
        self._prompts: dict[str, Any] = {}

    def forget(self) -> None:
        """Forget prompts that were encoded, and what the transformer has computed."""
        self._prompts.clear()
        self._forms.clear()

    def first_call(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of the transformer's first call, before which nothing computes but what encodes."""
        seen = self.run(request, calls=1)
        if not seen.calls:
            raise ConfigError(f"the pipeline calls no {type(self.model).__name__}")
        return seen.calls[0].arguments

    def run(
        self,
        request: Mapping[str, Any],
        results: ResultOf | None = None,
        samples: SampleOf | None = None,
        calls: int | None = None,
    ) -> Watched:
        """Run the pipeline up to its decoder.

        Args:
            request: arguments of the pipeline's call, for one image or video.
            results, samples: stand-ins.
            calls: stop in the transformer's call of this number, counted from 1.
        """
        seen = Watched()
        scheduler = self.pipe.scheduler

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(self._names, args, strict=False)) | kwargs
            # Loops write into tensors that they have passed.
            arguments = replaced(given, {path: one.detach().clone() for path, one in tensors_in(given)})
            number = len(seen.calls)
            if calls is not None and number + 1 >= calls:
                seen.calls.append(WatchedCall(arguments, torch.empty(0)))
                raise _Stop
            form = tuple(_forms_of(arguments))
            if form not in self._forms:
                self._forms[form] = self.model(*args, **kwargs)
            output = self._forms[form]
            stand_in = None if results is None else results(number, arguments)
            if stand_in is not None:
                output = _with_sample(output, stand_in)
            seen.calls.append(WatchedCall(arguments, _first(_sample_of(output)).detach().clone()))
            return output

        def step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            result = stepped.original(*args, **kwargs)
            values = [_first(given[name]).detach().clone() for name in ("model_output", "sample")]
            seen.steps.append(WatchedStep(len(seen.calls) - 1, values[0], float(given["timestep"]), values[1]))
            chosen = None if samples is None else samples(len(seen.steps) - 1)
            if chosen is None:
                return result
            before = result[0] if isinstance(result, tuple) else result.prev_sample
            after = chosen.to(before).expand_as(before) if before.dim() > chosen.dim() else chosen.to(before)
            if isinstance(result, tuple):
                return (after, *result[1:])
            return type(result)(**{**result, "prev_sample": after})

        def decode(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.decoded = latents.detach().clone()
            raise _Stop

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            key = repr(_keys_of({"args": args, "kwargs": kwargs}))
            if key not in self._prompts:
                self._prompts[key] = prompts.original(*args, **kwargs)
            return self._prompts[key]

        signature = inspect.signature(scheduler.step)
        with ExitStack() as undo, torch.no_grad():
            # Around the pipeline's own bookkeeping of its parts.
            undo.callback(vars(self.pipe).__setitem__, "transformer", self.model)
            vars(self.pipe)["transformer"] = _StandIn(self.model, forward)
            stepped = Patch(scheduler, "step", step)
            undo.callback(stepped.undo)
            decoder = next((getattr(self.pipe, name) for name in DECODERS if getattr(self.pipe, name, None)), None)
            if decoder is not None:
                undo.callback(Patch(decoder, "decode", decode).undo)
            if callable(getattr(self.pipe, "encode_prompt", None)):
                prompts = Patch(self.pipe, "encode_prompt", encode_prompt)
                undo.callback(prompts.undo)
            guider = getattr(self.pipe, "guider", None)
            if guider is not None and getattr(guider, "_enabled", False):
                guider.disable()
                undo.callback(guider.enable)
            training = self.model.training
            undo.callback(self.model.train, training)
            self.model.eval()
            state = torch.random.get_rng_state()
            undo.callback(torch.random.set_rng_state, state)
            torch.manual_seed(7)
            with suppress(_Stop):
                self.pipe(**request)
        return seen


def tensors_in(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a call's arguments, with its path."""
    return ((path, value) for path, value in values_in(arguments) if isinstance(value, Tensor))


def values_in(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value of a call's arguments that is no container, with its path as `Arguments` has it."""
    held = Arguments((), (), dict(arguments))
    yield from held.leaves()
    yield from held.others()


def replaced(arguments: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with other values at some paths; containers are copied."""
    held = Arguments((), (), dict(arguments))
    for path, value in changes.items():
        held.set(path, value)
    return held.kwargs


def sample_of(output: Any) -> Tensor:
    """What a transformer has returned: (B, ...); of a list, its tensors as one."""
    value = _sample_of(output)
    if isinstance(value, Tensor):
        return value
    if len({one.shape for one in value}) != 1:
        raise ConfigError("the transformer returns tensors of unlike shapes for the samples of a batch")
    return torch.stack(list(value))


def _sample_of(output: Any) -> Tensor | Sequence[Tensor]:
    if isinstance(output, (Tensor, list)):
        return output
    return output[0]


def _first(value: Tensor | Sequence[Tensor]) -> Tensor:
    """A batch's first sample."""
    return value[0]


def _with_sample(output: Any, sample: Tensor) -> Any:
    """A transformer's output with another sample in every row."""
    before = _sample_of(output)
    if isinstance(before, Tensor):
        value: Any = sample.to(before).expand_as(before).clone()
    else:
        value = type(before)([sample.to(one).clone() for one in before])  # type: ignore[call-arg]
    if isinstance(output, (Tensor, list)):
        return value
    if isinstance(output, tuple):
        return (value, *output[1:])
    return type(output)(**{**output, next(iter(output)): value})


def _forms_of(arguments: Mapping[str, Any]) -> Iterator[Any]:
    for path, value in values_in(arguments):
        yield path, (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)


def _keys_of(arguments: Mapping[str, Any]) -> Any:
    """What tells arguments apart, as text can show it."""
    return [(path, tensor_digest(one) if isinstance(one, Tensor) else one) for path, one in values_in(arguments)]
