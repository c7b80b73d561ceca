"""The proxy of a pipeline on ranks: calls, callbacks and progress bars in the owner's process."""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ConfigError, InputError
from ..launch import RankPool
from ..launch.messages import encode_call
from .rank import (
    CALLBACK,
    SentArguments,
    call_method,
    call_pipeline,
    derive_pipeline,
    free,
    on_cpu,
    pipeline_of,
    scheduler_of,
)

if TYPE_CHECKING:
    from .handle import Ranks

# Takes the finished steps and their total; None: unknown.
OnUpdate = Callable[[int, "int | None"], Any]

# Methods of a `RemotePipeline`, and their component in the rank's pipeline.
METHODS = {
    name: name
    for name in (
        *("load_lora_weights", "unload_lora_weights", "fuse_lora", "unfuse_lora", "set_adapters", "delete_adapters"),
        *("enable_lora", "disable_lora", "get_active_adapters", "get_list_adapters"),
    )
} | {f"{verb}_vae_{what}": f"vae.{verb}_{what}" for verb in ("enable", "disable") for what in ("slicing", "tiling")}


class RemotePipeline:
    """The proxy of a pipeline on `Ranks`; `Ranks.load` returns it.

    It is called as the pipeline is. Tensors, images and `torch.Generator` arguments travel, generators come back
    advanced, and so does torch's default generator of the CPU. ``callback_on_step_end`` and the progress bar run in the
    owner's process. The output is rank 0's, with tensors on the CPU. The methods of `METHODS` run on all ranks;
    ``scheduler`` can be assigned. `Ranks.run` reaches everything else.
    """

    def __init__(self, ranks: Ranks, key: str, name: str, parameters: tuple[str, ...]) -> None:
        vars(self).update(_ranks=ranks, _key=key, _name=name, _parameters=parameters, _bar={}, _on_update=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline on all ranks with its arguments; returns the output of rank 0.

        ``callback_on_step_end(pipe, step, timestep, tensors)`` gets rank 0's tensors on the CPU, and what it returns
        goes to all ranks. Its ``pipe`` has the pipeline's plain properties (``num_timesteps``, ``guidance_scale``), and
        what is assigned to it (``pipe._interrupt = True``) is assigned on all ranks. diffusers' own
        ``PipelineCallback`` objects run on the ranks.

        Raises:
            Exception: whatever the pipeline or the callback raises, with a `RankFailed` that holds the rank's traceback
                as its cause. The next call works.
            KeyboardInterrupt: Ctrl-C; the ranks stop at the end of a step. A second one ends them, and they are closed.
            RankFailed: a rank died.
            ConfigError: the pipeline, or its ranks, are closed.
        """
        if len(args) <= len(self._parameters):
            args, kwargs = (), self._by_name(args, kwargs)
        callback = kwargs.get(CALLBACK)
        if callback is not None and not hasattr(callback, "tensor_inputs"):
            kwargs[CALLBACK] = None
        else:
            callback = None
        for name, value in kwargs.items():
            if inspect.isroutine(value):
                raise InputError(f"{name}={value.__name__} would run on the ranks and not here; use {CALLBACK}")
        sent = SentArguments((args, kwargs))
        with self._ranks._alone():
            self._check_open()
            owner = RemoteCall(self._ranks._pool, self._bar, self._name, callback, self._on_update)
            main = self._ranks._pool.imports_main
            call = encode_call(call_pipeline, (self, sent, callback is not None), {}, main=main)
            with owner.interruptible():
                output, states = self._ranks._outcomes(call, owner)[0]
            sent.advance(states)
            return output

    def set_progress_bar_config(self, *, on_update: OnUpdate | None = None, **options: Any) -> None:
        """Set options of the progress bars in this process, as for tqdm.

        ``on_update``: is called with the steps that are done and the bar's total (None: unknown) after every step, by
        pipelines without a callback too. What it raises stops the ranks, as what a callback raises does.
        """
        vars(self).update(_bar=options, _on_update=on_update)

    def as_class(self, name: str) -> RemotePipeline:
        """Another diffusers pipeline on the same components, such as image-to-image.

        ``name``: its class. `InputError`: diffusers has no such pipeline, or it needs components that this one has not.
        """
        key = uuid.uuid4().hex
        made, parameters = self._run(derive_pipeline, key, name)
        self._ranks._loaded.add(key)
        return RemotePipeline(self._ranks, key, made, parameters)

    @property
    def class_name(self) -> str:
        """The name of the pipeline's class."""
        return self._name

    def close(self) -> None:
        """Free the pipeline on all ranks; the ranks stay. May be called twice."""
        if self._key in self._ranks._loaded and not self._ranks._pool.closed:
            self._ranks.run(free, self._key)
        self._ranks._loaded.discard(self._key)

    @property
    def scheduler(self) -> SchedulerConfig:
        """The scheduler's configuration. Assign another scheduler to change it: all ranks get a copy."""
        return SchedulerConfig(*self._run(scheduler_of))

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return lambda *args, **kwargs: self._run(call_method, METHODS[name], SentArguments((args, kwargs)))
        raise AttributeError(
            f"{name!r} of this {self._name} is on its ranks; use ranks.run(fn, pipe): fn gets the pipeline there"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "scheduler":
            raise AttributeError(
                f"{name!r} of this {self._name} cannot be assigned from here; use ranks.run(fn, pipe): fn gets "
                "the pipeline on every rank"
            )
        if not hasattr(value, "set_timesteps"):
            raise InputError(
                f"{type(value).__name__} is no scheduler; use a diffusers one, such as "
                "FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=3.0)"
            )
        self._run(setattr, "scheduler", value)

    def __reduce__(self) -> Any:
        return pipeline_of, (self._key,)

    def __repr__(self) -> str:
        state = f"on {self._ranks!r}" if self._key in self._ranks._loaded else "closed"
        return f"RemotePipeline({self._name}, {state})"

    def _run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """The result on rank 0 of ``fn(pipe, *args)``, which every rank runs."""
        self._check_open()
        return self._ranks.run(fn, self, *args)[0]

    def _check_open(self) -> None:
        if self._key not in self._ranks._loaded:
            raise ConfigError(f"this {self._name} was closed; load it again with ranks.load(...)")

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        named = dict(zip(self._parameters, args, strict=False))
        if twice := named.keys() & kwargs.keys():
            raise TypeError(f"{self._name} got multiple values for argument {min(twice)!r}")
        return named | dict(kwargs)


@dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler of a `RemotePipeline` in the owner's process.

    Attributes:
        name: its class.
        config: what ``from_config`` of a scheduler takes.
    """

    name: str
    config: Mapping[str, Any]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name!r} of this {self.name} is on the ranks; assign pipe.scheduler = "
            f"{self.name}.from_config(pipe.scheduler.config, ...), or use ranks.run(fn, pipe)"
        )


class RemoteCall:
    """The owner's side of a call of a pipeline: progress bars, the callback, Ctrl-C."""

    def __init__(
        self,
        pool: RankPool,
        bar: Mapping[str, Any],
        name: str,
        callback: Callable[..., Any] | None,
        on_update: OnUpdate | None = None,
    ) -> None:
        self._pool, self._options, self._name, self._callback, self._on_update = pool, bar, name, callback, on_update
        # Each bar, its steps that are done, and its total: tqdm's own count stands still in a bar that is not shown.
        self._bars: list[tuple[Any, int, int | None]] = []
        self._interrupted = self._in_callback = False
        # The callback's exception, or an interrupt; the ranks are told to stop.
        self.error: BaseException | None = None

    def hear(self, rank: int, message: tuple[str, Any]) -> None:
        """Handle a message of rank 0; all ranks wait for the reply to an update of a step or a bar."""
        kind, content = message
        if kind == "open":
            from tqdm.auto import tqdm

            self._bars.append((tqdm(total=content, **self._options), 0, content))
        elif kind == "close" and self._bars:
            self._bars.pop()[0].close()
        elif kind == "describe":
            self._bars[-1][0].set_description(content)
        elif kind == "update":
            self._update(content)
        elif kind == "step":
            self._step(*content)
        elif kind == "failed":
            self._pool.reply(None)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Make the first Ctrl-C stop the ranks at the end of a step, and the second end them."""
        ours = threading.current_thread() is threading.main_thread()
        ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler

        def interrupt(number: int, frame: Any) -> None:
            if self._interrupted or self._in_callback:
                raise KeyboardInterrupt
            self._interrupted = True
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                print("interrupting at the end of this step; once more ends the ranks", file=sys.stderr, flush=True)

        try:
            if ours:
                signal.signal(signal.SIGINT, interrupt)
            yield
            if self._interrupted:
                raise KeyboardInterrupt
        finally:
            if ours:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            for bar, *_ in self._bars:
                bar.close()

    def _answer(self, content: Callable[[], Any]) -> None:
        """Send the ranks what a callback makes of a step; None: they are to stop."""
        reply = None
        try:
            self._in_callback = True
            if not self._interrupted:
                reply = content()
        except BaseException as error:
            self.error = error
        self._in_callback = False
        if self._interrupted:
            self.error, reply = KeyboardInterrupt(), None
        self._pool.reply(reply)

    def _update(self, steps: int) -> None:
        bar, done, total = self._bars[-1]
        bar.update(steps)
        self._bars[-1] = bar, done + steps, total

        def content() -> Any:
            if self._on_update is not None:
                self._on_update(done + steps, total)
            return {}, {}

        self._answer(content)

    def _step(self, index: int, timestep: Any, tensors: dict[str, Any], properties: dict[str, Any]) -> None:
        pipe, callback = StepPipeline(self._name, properties), self._callback
        assert callback is not None
        self._answer(lambda: (on_cpu(callback(pipe, index, timestep, tensors)), on_cpu(vars(pipe)["_assigned"])))


class StepPipeline:
    """The pipeline that a callback receives: rank 0's plain properties; assignments go to all ranks."""

    def __init__(self, name: str, properties: dict[str, Any]) -> None:
        vars(self).update(_name=name, _properties=properties, _assigned={})

    def __getattr__(self, name: str) -> Any:
        for known in (self._assigned, self._properties):
            if name in known:
                return known[name]
        raise AttributeError(
            f"{name!r} of this {self._name} is on its ranks; a callback here has {', '.join(self._properties)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self._assigned[name] = value
