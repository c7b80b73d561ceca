"""Calls of a transformer to denoising steps and guidance branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Equal to no timestep.
_NEVER = object()


@dataclass(frozen=True)
class _Seen:
    """One call: its latents and its other arguments (prompts, masks …), the timestep apart."""

    latents: Any
    others: Mapping[str, Any]


class StepClock:
    """Counts the steps of one request.

    A *step* is one evaluation of the (guided) model: calls at one timestep that differ in more than the latents
    are branches of guidance and belong to one step. A new timestep begins a new step; so does a call at the same
    timestep with other latents and otherwise the arguments of an earlier call of the step: a second-order sampler
    (Heun) evaluates the same model again, and what that evaluation finds must not be taken for another branch. Two
    calls that differ in nothing (guidance by a changed model) are two branches.

    Attributes:
        step: number of the step in progress, from 0; -1 before the first call.
        branch: number of the branch in progress. Whoever runs branches in another order than the pipeline asks for
            them sets it before each.
        rows: which rows of the batch run here (first, and one after the last), where they are shared out.
        steady: whether the call's other arguments are those of the same branch in the step before.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """A new request begins."""
        self.step = -1
        self.branch = 0
        self.rows: tuple[int, int] | None = None
        self.steady = False
        self._timestep: Any = _NEVER
        self._now: list[_Seen] = []
        self._before: list[_Seen] = []

    def tick(self, timestep: Any, latents: Any, others: Mapping[str, Any]) -> bool:
        """A call of the transformer begins; whether it begins a new step.

        Args:
            timestep: as the transformer gets it: a tensor of any shape, or a number.
            latents: the transformer's first argument: a tensor or a list of tensors.
            others: its other tensor and integer arguments, by path.
        """
        new = self._timestep is _NEVER or not same(timestep, self._timestep) or self._again(latents, others)
        if new:
            self.step += 1
            self._timestep = timestep
            self._before, self._now = self._now, []
        self.branch = len(self._now)
        self.steady = self.branch < len(self._before) and same(others, self._before[self.branch].others)
        # A copy: some pipelines write their latents in place.
        self._now.append(_Seen(_copy(latents), others))
        return new

    def advance(self) -> None:
        """Let the next call begin a new step, whatever its timestep: for those who know better."""
        self._timestep = _NEVER

    def _again(self, latents: Any, others: Mapping[str, Any]) -> bool:
        return any(same(others, seen.others) and not same(latents, seen.latents) for seen in self._now)


def same(a: Any, b: Any) -> bool:
    """Equal values: tensors by shape, dtype and content, containers by their parts."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and not isinstance(a, Tensor) and a == b


def _copy(latents: Any) -> Any:
    if isinstance(latents, Tensor):
        return latents.detach().clone()
    return [_copy(part) for part in latents] if isinstance(latents, (list, tuple)) else latents
