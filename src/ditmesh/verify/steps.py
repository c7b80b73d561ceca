"""What a pipeline's scheduler is given and returns, step by step, against the same of one device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import Tensor

from ..core.digests import digest
from ..generate.steps import SchedulerStep, StepEvents
from ..parts.part import whole_of
from ..quality.metrics import absolute_error

# The tensors of one call of a pipeline by step, from 1, and name: ``"prediction"`` (after guidance) and ``"latents"``
# (after the step); step 0 has the latents that the first step starts from.
Steps = dict[tuple[int, str], Tensor]


class StepRecorder:
    """Keeps the tensors of a pipeline's scheduler while its context is open, which is for one call. Changes nothing."""

    def __init__(self, pipe: Any) -> None:
        self._scheduler = pipe.scheduler
        # As they are: reading one may wait for it.
        self._held: dict[tuple[int, str], Any] = {}
        self._step = 0

    def __enter__(self) -> StepRecorder:
        self._events = StepEvents(self._scheduler, self._stepped)
        return self

    def __exit__(self, *error: object) -> None:
        self._events.undo()

    def _stepped(self, step: SchedulerStep) -> None:
        if self._step == 0:
            self._held[0, "latents"] = step.sample
        self._step += 1
        self._held[self._step, "prediction"] = step.prediction
        self._held[self._step, "latents"] = step.latents()

    def steps(self) -> Steps:
        """The tensors, whole and on the host. Of stages they may still be in patches: a collective call."""
        return {
            place: whole_of(value).detach().to("cpu", copy=True)
            for place, value in self._held.items()
            if isinstance(value, Tensor)
        }


@dataclass(frozen=True)
class ComparedTensor:
    """One of the scheduler's tensors, named as in `Steps`, against that of one device.

    Attributes:
        prompt: number of the pipeline's call, from 1.
        largest: absolute difference; scale: largest absolute value on one device.
        ranks: those on which it differs.
    """

    prompt: int
    step: int
    tensor: str
    equal: bool
    largest: float
    scale: float
    ranks: tuple[int, ...] = ()

    @property
    def error(self) -> float:
        """The largest absolute difference over the largest absolute value on one device."""
        return self.largest / self.scale if self.scale else (inf if self.largest else 0.0)

    def describe(self) -> str:
        """The place as text, such as ``step 2, prediction (rank 1)``."""
        prompt = f"prompt {self.prompt}, " if self.prompt > 1 else ""
        ranks = f"{'rank' if len(self.ranks) == 1 else 'ranks'} {' and '.join(map(str, self.ranks))}"
        return f"{prompt}step {self.step}, {self.tensor} ({ranks})"


def compare_steps(prompt: int, ours: Steps, theirs: Steps, rank: int) -> list[ComparedTensor]:
    """The tensors of a call on one rank against those of one device, in the order of steps.

    One that either of them lacks, or of another shape or type, differs infinitely.
    """
    compared = []
    for place in dict.fromkeys([*theirs, *ours]):
        mine, reference = ours.get(place), theirs.get(place)
        equal, largest, scale = False, inf, 0.0
        if (
            mine is not None
            and reference is not None
            and (mine.shape, mine.dtype) == (reference.shape, reference.dtype)
        ):
            equal = digest(mine) == digest(reference)
            largest, scale = absolute_error(mine, reference) if mine.numel() else (0.0, 0.0)
        compared.append(ComparedTensor(prompt, *place, equal, largest, scale, () if equal else (rank,)))
    return compared


def merge(compared: Iterable[ComparedTensor]) -> list[ComparedTensor]:
    """What all ranks have found, put together."""
    merged: dict[tuple[int, int, str], ComparedTensor] = {}
    for tensor in compared:
        other = merged.setdefault((tensor.prompt, tensor.step, tensor.tensor), tensor)
        if other is not tensor:
            merged[tensor.prompt, tensor.step, tensor.tensor] = replace(
                other,
                equal=other.equal and tensor.equal,
                largest=max(other.largest, tensor.largest),
                scale=max(other.scale, tensor.scale),
                ranks=other.ranks + tensor.ranks,
            )
    return list(merged.values())
