"""Runs of an unmodified pipeline with stand-ins for what its transformer returns and what its scheduler makes of it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import Arguments
from ...core.digests import tensor_digest
from ...core.patching import Patch
from ...errors import ConfigError
from ...generate.modular import guided_by
from ..config import SECOND
from .levels import Levels, levels_of

# Names of a pipeline's autoencoder.
DECODERS = ("vae", "vqvae")


@dataclass(frozen=True)
class WatchedCall:
    """A call of a transformer, or of the second one, with its result or a stand-in, without batch dimension."""

    arguments: Mapping[str, Any]
    result: Tensor
    is_second: bool = False


@dataclass(frozen=True)
class WatchedStep:
    """A step of the scheduler.

    Attributes:
        call: number of the transformer's last call before it.
        output, sample: the step's inputs, for one sample without its batch dimension.
        timestep: as the scheduler was given it; with `Levels`, that of training.
    """

    call: int
    output: Tensor
    timestep: float
    sample: Tensor


@dataclass
class ObservedRun:
    """The observations of one run of a pipeline.

    Attributes:
        decoded: what the autoencoder was given to decode, with its batch dimension; None: the run did not get there.
    """

    calls: list[WatchedCall] = field(default_factory=list)
    steps: list[WatchedStep] = field(default_factory=list)
    decoded: Tensor | None = None


class StandIn:
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
    """Leaves a pipeline's call once everything was observed. No `Exception`: pipelines catch those."""


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
        denoiser: the component that is trained; of two transformers the other one is a stand-in only.

    Attributes:
        levels: how samples of its scheduler become those of training; None: they are the same.
        bounds: the lowest and the highest timestep of the trained one of two transformers; None: there is one.
        branches: of guidance that cannot be switched off; the first is the caption's, and the only one that is seen.
        by_parts: copies of the scheduler step a part of the sample each, such as a frame; samples are stacks of parts.
        fixed: arguments of the transformer that are always these, whatever the pipeline passes.
        forms, prompts: results of the transformer by the form of its arguments, and of the encoder of prompts.
    """

    def __init__(self, pipe: Any, denoiser: str = "transformer") -> None:
        self.pipe, self.denoiser = pipe, denoiser
        self.levels: Levels | None = levels_of(pipe.scheduler)
        self.fixed: dict[str, Any] = {}
        self.bounds: tuple[float, float] | None = None
        self.branches, self.by_parts = 1, False
        self.model: Any = getattr(pipe, denoiser)
        self.names = list(inspect.signature(self.model.forward).parameters)
        self.forms: dict[Any, Any] = {}
        self.prompts: dict[str, Any] = {}

    def forget(self) -> None:
        """Forget encoded prompts, and the transformer's results."""
        self.prompts.clear()
        self.forms.clear()

    def first_call(self, request: Mapping[str, Any], gradients: bool = False) -> Mapping[str, Any]:
        """The arguments of the transformer's first call, before which nothing computes but what encodes.

        Args:
            gradients: record those of the encoders, whose dropout then draws from the numbers of the training step.
        """
        seen = self.run(request, calls=1, gradients=gradients)
        if not seen.calls:
            raise ConfigError(f"the pipeline calls no {type(self.model).__name__}")
        return seen.calls[0].arguments

    def run(
        self,
        request: Mapping[str, Any],
        results: ResultOf | None = None,
        samples: SampleOf | None = None,
        calls: int | None = None,
        steps: int | None = None,
        gradients: bool = False,
    ) -> ObservedRun:
        """Run the pipeline up to its decoder.

        Args:
            request: arguments of the pipeline's call, for one image or video.
            results, samples: stand-ins.
            calls: stop in the transformer's call of this number, counted from 1.
            steps: stop in the scheduler's step of this number, counted from 1.
            gradients: as for `first_call`.
        """
        return _Run(self, results, samples, calls, steps, gradients).run(request)

    def moments(self, timestep: float) -> tuple[float, float, float]:
        """After a step: its timestep, and what samples before and after it are to be multiplied with."""
        if self.levels is None:
            return timestep, 1.0, 1.0
        if self.levels.kind == "counted":
            return self.levels.timestep(timestep, 0.0), 1.0, 1.0
        scheduler = self.pipe.scheduler
        now, later = (float(scheduler.sigmas[scheduler.step_index + shift]) for shift in (-1, 0))
        return self.levels.timestep(timestep, now), self.levels.factor(now), self.levels.factor(later)


@dataclass
class _Run:
    """One run of a pipeline, with functions in the place of its parts; see `PipelineWatcher.run`."""

    _watcher: PipelineWatcher
    _results: ResultOf | None
    _samples: SampleOf | None
    _calls: int | None
    _steps: int | None
    _gradients: bool

    def __post_init__(self) -> None:
        self.seen = ObservedRun()
        self._pipe, self._scheduler = self._watcher.pipe, self._watcher.pipe.scheduler
        self._signature = inspect.signature(self._scheduler.step)

    def run(self, request: Mapping[str, Any]) -> ObservedRun:
        pipe, watcher = self._pipe, self._watcher
        with ExitStack() as undo, torch.set_grad_enabled(self._gradients):
            # Around the pipeline's own bookkeeping of its parts.
            for name in ("transformer", SECOND):
                model = getattr(pipe, name, None)
                if model is not None:
                    undo.callback(vars(pipe).__setitem__, name, model)
                    vars(pipe)[name] = StandIn(model, partial(self._forward, name == SECOND))
            self._patch(undo)
            guider = getattr(pipe, "guider", None)
            if guider is not None and getattr(guider, "_enabled", False):
                guider.disable()
                undo.callback(guider.enable)
            undo.callback(watcher.model.train, watcher.model.training)
            watcher.model.eval()
            call: Callable[..., Any] = type(pipe).__call__
            if self._gradients:
                # Below the decorator that switches them off.
                call = inspect.unwrap(call)
            else:
                undo.callback(torch.random.set_rng_state, torch.random.get_rng_state())
                torch.manual_seed(7)
            given = dict(request)
            with guided_by(pipe, given), suppress(_Stop):
                call(pipe, **given)
        return self.seen

    def _patch(self, undo: ExitStack) -> None:
        """Put functions in the place of the scheduler's step, the decoder and the encoder of prompts."""
        scheduler = self._scheduler
        step = Patch(scheduler, "step", lambda *args, **kwargs: self._step(step.original, *args, **kwargs))
        undo.callback(step.undo)
        if self._watcher.by_parts:
            vars(scheduler)["__deepcopy__"] = self._copied
            undo.callback(vars(scheduler).pop, "__deepcopy__")
        decoder = next((getattr(self._pipe, name) for name in DECODERS if getattr(self._pipe, name, None)), None)

        def decode(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
            # An autoencoder of images decodes a video frame by frame.
            frames = latents.dim() == 4 and len(latents) > 1
            self.seen.decoded = (latents.transpose(0, 1)[None] if frames else latents).detach().clone()
            raise _Stop

        if decoder is not None:
            undo.callback(Patch(decoder, "decode", decode).undo)
        undo.callback(remember_prompts(self._pipe, self._watcher.prompts))

    def _forward(self, is_second: bool, *args: Any, **kwargs: Any) -> Any:
        watcher, seen = self._watcher, self.seen
        given = dict(zip(watcher.names, args, strict=False)) | kwargs | watcher.fixed
        # Loops write into tensors that they have passed.
        tensors = {path: (tensor if self._gradients else tensor.detach()).clone() for path, tensor in tensors_in(given)}
        arguments = first_branch(replaced(given, tensors), watcher.branches)
        number = len(seen.calls)
        if self._calls is not None and number + 1 >= self._calls:
            seen.calls.append(WatchedCall(arguments, torch.empty(0)))
            raise _Stop
        form = tuple(
            (path, (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value))
            for path, value in values_in(arguments)
        )
        if form not in watcher.forms:
            watcher.forms[form] = watcher.model(**given)
        output = watcher.forms[form]
        stand_in = None if self._results is None else self._results(number, arguments)
        if stand_in is not None:
            output = _with_sample(output, stand_in, watcher.branches)
        result = _sample_of(output)[0].detach().clone()
        seen.calls.append(WatchedCall(arguments, result, is_second))
        return output

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        timestep, output, sample = self._inputs(*args, **kwargs)
        steps, call = self.seen.steps, len(self.seen.calls) - 1
        number = len(steps)
        result = original(*args, **kwargs)
        moment, now, later = self._watcher.moments(timestep)
        if steps and steps[-1].call == call:
            # Some ask the scheduler for the latents that a result stands for, before they step.
            number -= 1
        else:
            steps.append(WatchedStep(call, output, moment, now * sample))
            if len(steps) == self._steps:
                raise _Stop
        chosen = None if self._samples is None else self._samples(number)
        return result if chosen is None else stepped(result, chosen / later)

    def _inputs(self, *args: Any, **kwargs: Any) -> tuple[float, Tensor, Tensor]:
        """Timestep, result of the transformer and sample of a step; solvers write into their arguments."""
        given = self._signature.bind(*args, **kwargs).arguments
        output, sample = (given[name][0].detach().clone() for name in ("model_output", "sample"))
        return float(given["timestep"]), output, sample

    def _copied(self, memo: dict[int, Any]) -> Any:
        """A copy of the scheduler, of which each steps a part of the sample."""
        held = {key: value for key, value in vars(self._scheduler).items() if key not in ("step", "__deepcopy__")}
        other = copy.copy(self._scheduler)
        vars(other).clear()
        vars(other).update(copy.deepcopy(held, memo))
        if "step" in vars(self._scheduler) and self._watcher.by_parts:
            vars(other)["step"] = partial(self._step_part, other.step)
        return other

    def _step_part(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        moment, output, sample = self._inputs(*args, **kwargs)
        steps, call, part = self.seen.steps, len(self.seen.calls) - 1, 0
        if steps and steps[-1].call == call:
            last = steps.pop()
            part = len(last.sample)
            if moment != last.timestep:
                raise ConfigError("parts of the sample are at different times")
            output = torch.cat([last.output, output[None]])
            sample = torch.cat([last.sample, sample[None]])
        elif len(steps) == self._steps:
            raise _Stop
        else:
            output, sample = output[None], sample[None]
        steps.append(WatchedStep(call, output, moment, sample))
        result = original(*args, **kwargs)
        chosen = None if self._samples is None else self._samples(len(steps) - 1)
        return result if chosen is None else stepped(result, chosen[part])


def remember_prompts(pipe: Any, results: dict[str, Any]) -> Callable[[], None]:
    """Let a pipeline encode each prompt once and keep the results; returns the undo."""
    if not callable(getattr(pipe, "encode_prompt", None)):
        return lambda: None

    def encode(*args: Any, **kwargs: Any) -> Any:
        given = values_in({"args": args, "kwargs": kwargs})
        key = repr([(path, tensor_digest(one) if isinstance(one, Tensor) else one) for path, one in given])
        if key not in results:
            results[key] = patch.original(*args, **kwargs)
        return results[key]

    patch = Patch(pipe, "encode_prompt", encode)
    return patch.undo


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


def stepped(result: Any, chosen: Tensor) -> Any:
    before = result[0] if isinstance(result, tuple) else result.prev_sample
    after = chosen.to(before).expand_as(before) if before.dim() > chosen.dim() else chosen.to(before)
    if isinstance(result, tuple):
        return (after, *result[1:])
    return type(result)(**{**result, "prev_sample": after})


def sample_of(output: Any) -> Tensor:
    """The result of a transformer, (B, ...); a list's tensors as one."""
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


def first_branch(arguments: Mapping[str, Any], branches: int) -> Mapping[str, Any]:
    """Arguments of a call for several branches of guidance, one behind the other: those of the first."""
    if branches == 1:
        return arguments
    rows = max((len(one) for _, one in tensors_in(arguments) if one.dim()), default=0)
    counts = [len(one) for path, one in tensors_in(arguments) if one.dim() > 2 and len(one) % branches == 0]
    rows = max(set(counts), key=counts.count) if counts else rows
    changes = {path: one[: rows // branches] for path, one in tensors_in(arguments) if one.dim() and len(one) == rows}
    return replaced(arguments, changes)


def _with_sample(output: Any, sample: Tensor, branches: int = 1) -> Any:
    """A transformer's output with another sample in every row; in rows of other branches nothing."""
    before = _sample_of(output)
    if isinstance(before, Tensor):
        value: Any = sample.to(before).expand_as(before).clone()
        if branches > 1:
            value[len(value) // branches :] = 0
    else:
        value = type(before)([sample.to(one).clone() for one in before])  # type: ignore[call-arg]
    if isinstance(output, (Tensor, list)):
        return value
    if isinstance(output, tuple):
        return (value, *output[1:])
    return type(output)(**{**output, next(iter(output)): value})
