"""The current call of a transformer: its request, denoising step, guidance branch and rows of the batch."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .arguments import Arguments, covers, parameter_names
from .request import RequestValue
from .values import SeenValue, Values, is_plain, seen

# Argument names of the timestep.
TIMESTEPS = ("timestep", "t", "timesteps")


@dataclass(frozen=True)
class TransformerCall:
    """One call of a transformer, or the part of it that runs.

    Attributes:
        request: number of the pipeline's call, from 0; -1 before the first.
        step: number of the denoising step in its request, from 0; -1 before the first.
        branch: number of the branch of guidance in its step, from 0.
        rows: first row of the batch that runs, and one after the last; None where rows are not shared out.
        link: name of the link that shares the rows; empty when they are not shared.
        ahead: whether it runs before the pipeline asks for it.
        counted: whether the pipeline's scheduler tells the steps of this request apart.
    """

    request: int = -1
    step: int = -1
    branch: int = 0
    rows: tuple[int, int] | None = None
    link: str = ""
    ahead: bool = False
    counted: bool = False
    steadiness: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)

    @cached_property
    def steady(self) -> bool:
        """True if the call's arguments, timestep and latents apart, are those of the branch in the step before."""
        return self.steadiness()


@dataclass(frozen=True)
class _SeenCall:
    """The arguments of a call, by path."""

    model: int
    timestep: Mapping[str, SeenValue]
    latents: Mapping[str, SeenValue]
    others: Mapping[str, SeenValue]


@dataclass
class _Counted:
    """The calls of one request, as far as they are known."""

    # The call in progress, or the latest one.
    call: TransformerCall = field(default_factory=TransformerCall)
    values: Values = field(default_factory=Values)
    # Of this step, and of the one before.
    calls: list[_SeenCall] = field(default_factory=list)
    before: list[_SeenCall] = field(default_factory=list)
    # The scheduler, what it had counted, and whether it counts.
    at: tuple[Any, int | None] = (None, None)
    counts: bool = False
    # The next call begins a step.
    forced: bool = False


class CallClock:
    """Counts the calls of a pipeline's transformers. Fed once per call, before any other layer sees it.

    A *step* is one evaluation of the (guided) model: calls at one timestep that differ in more than the latents
    are branches of guidance and belong to one step. A new timestep begins a new step; so does a call at the same
    timestep with other latents and otherwise the arguments of an earlier call of the step: a second-order sampler
    (Heun) evaluates the same model again, and what that evaluation finds must not be taken for another branch. Two
    calls that differ in nothing (guidance by a changed model) are two branches.

    A scheduler that counts its steps needs no look at any tensor: the calls between two of its steps are one step.
    It is believed from the first step on that it was seen to count. Otherwise values are compared, at most
    once per call.
    """

    def __init__(self, scheduler: Callable[[], Any] = lambda: None) -> None:
        self._of = RequestValue(_Counted)
        self._scheduler = scheduler
        self._listeners: list[Callable[[TransformerCall], None]] = []
        self._models = self._requests = 0

    @property
    def call(self) -> TransformerCall:
        """The call in progress, or the latest one."""
        return self._of.value.call

    @property
    def values(self) -> Values:
        """Compares values of this request."""
        return self._of.value.values

    def begin_request(self) -> None:
        """Begin a new request: its first call begins step 0."""
        self._of.renew()
        self._of.value.call = TransformerCall(self._requests)
        self._requests += 1

    def end_request(self) -> None:
        """End the request, and release its tensors."""
        before = self._of.renew()
        self._of.value.call = replace(before.call, steadiness=lambda: False)

    def on_step(self, listener: Callable[[TransformerCall], None]) -> None:
        """Tell ``listener`` of every first call of a step, before it runs."""
        self._listeners.append(listener)

    def watch(self, model: nn.Module, timestep: str | None) -> Callable[[], None]:
        """Count a transformer's calls, before other hooks, by its ``timestep`` (`timestep_of`); returns the undo."""
        names = parameter_names(type(model).forward)
        number, self._models = self._models, self._models + 1

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Find the step and the branch of guidance of a call."""
            arguments = Arguments(names, args, kwargs)
            if model.training and torch.is_grad_enabled():
                # Training: a call is a step. To compare its times with those before would be to wait for the device.
                self.advance()
            parts: tuple[dict[str, Any], ...] = ({}, {}, {})
            for path, value in arguments.leaves():
                time, main = timestep is not None and covers(timestep, path), covers(names[0], path)
                parts[0 if time else 1 if main else 2][path] = value
            if timestep is not None and not parts[0]:
                parts[0][timestep] = arguments.get(timestep)
            self.tick(*parts, model=number)

        return model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove

    def tick(
        self, timestep: Mapping[str, Any], latents: Mapping[str, Any], others: Mapping[str, Any], model: int = 0
    ) -> TransformerCall:
        """A call of a transformer begins: tensors and numbers by path of timestep, first argument and others.

        ``model``: number of the transformer in its pipeline.
        """
        if self.call.request < 0:
            self.begin_request()
        of = self._of.value
        times, given = ({path: seen(value) for path, value in part.items()} for part in (timestep, others))
        # Of latents that are written to unseen a copy is kept.
        record = _SeenCall(model, times, {path: seen(value, copied=True) for path, value in latents.items()}, given)
        new = self._begins_step(record)
        if new:
            of.before, of.calls = of.calls, []
            of.values.turn()
        branch = len(of.calls)
        before = of.before[branch] if branch < len(of.before) else None
        of.calls.append(record)
        of.call = TransformerCall(
            of.call.request,
            of.call.step + new,
            branch,
            counted=of.counts,
            steadiness=lambda: (
                before is not None and before.model == model and of.values.all_same(given, before.others)
            ),
        )
        for listener in self._listeners if new else ():
            listener(of.call)
        return of.call

    def advance(self) -> None:
        """Let the next call begin a new step, whatever its arguments: for loops with a timestep that stands still."""
        self._of.value.forced = True

    @contextmanager
    def narrowed(self, **changes: Any) -> Iterator[TransformerCall]:
        """A part of the call runs: ``branch``, ``rows``, ``link`` and ``ahead`` as given, all else as it is."""
        of = self._of.value
        before = of.call
        of.call = replace(before, **changes)
        try:
            yield of.call
        finally:
            of.call = before

    def _begins_step(self, now: _SeenCall) -> bool:
        of, scheduler = self._of.value, self._scheduler()
        index = getattr(scheduler, "step_index", None)
        before, of.at = of.at, (scheduler, index if isinstance(index, int) else None)
        forced, of.forced = of.forced, False
        same_scheduler = bool(of.calls) and scheduler is not None and scheduler is before[0]
        if same_scheduler and of.at[1] != before[1]:
            of.counts = of.at[1] is not None
            return True
        of.counts = of.counts and same_scheduler
        if forced or not of.calls:
            return True
        if of.counts:
            return False
        # Or with equal arguments, but other latents.
        return not self._at_one_time(now.timestep, of.calls[0].timestep) or any(
            now.model == call.model
            and self.values.all_same(now.others, call.others)
            and not self.values.all_same(now.latents, call.latents)
            for call in of.calls
        )

    def _at_one_time(self, one: Mapping[str, SeenValue], other: Mapping[str, SeenValue]) -> bool:
        if one.keys() != other.keys():
            return False
        for path, value in one.items():
            places = self._place(value), self._place(other[path])
            if None not in places and places[0] != places[1]:
                # A scheduler may have a time twice: for two evaluations, of which each is a step.
                return False
            if not self.values.same(value, other[path]):
                return False
        return True

    def _place(self, time: SeenValue) -> Any:
        """The place among the scheduler's timesteps of which a tensor is a view, repeated; None: it is not one."""
        tensor, all_ = time.value, getattr(self._of.value.at[0], "timesteps", None)
        if not is_plain(tensor) or not is_plain(all_) or all_.dim() != 1 or not tensor.numel():
            return None
        if (tensor.dtype, tensor.device) != (all_.dtype, all_.device) or not all_.is_contiguous():
            return None
        place, rest = divmod(tensor.data_ptr() - all_.data_ptr(), all_.element_size())
        repeated = all(size == 1 or stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return place if repeated and not rest and 0 <= place < len(all_) else None


def timestep_of(model: nn.Module, layout: Any = None) -> str | None:
    """The name of a transformer's timestep: as its layout says, else one of the usual names; None: it takes none."""
    names, known = parameter_names(type(model).forward), getattr(layout, "timestep", None)
    return known if known in names else timestep_among(names)


def timestep_among(names: Container[str]) -> str | None:
    """The usual name of a timestep that is among some names; None: there is none."""
    return next((name for name in TIMESTEPS if name in names), None)
