"""Budgets of the adaptive policy in units that people know: decibels of the image, or seconds of the request.

The policy's own budget is an error on a scale of its own: see `policy.Adaptive`. On the embedded models the root mean
square of the pixels (0 to 1) is in proportion to it, so that decibels can be had from it, with a margin. Seconds need
no model: steps are timed while they run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log10
from typing import ClassVar

from .policy import Adaptive, Decision, Outlook, PastStep, in_unit

# Root mean square of pixels (0 to 1) in units of the predicted error, at most: docs/staleness.md has what was measured.
PIXELS = 1.0


def decibels(error: float) -> float:
    """PSNR of images with a predicted error, with the margin of `PIXELS`."""
    return -20 * log10(max(error * PIXELS, 1e-10))


@in_unit("dB")
@dataclass(frozen=True)
class AdaptiveDecibels:
    """As few synchronous steps as keep the PSNR predicted for the image, against exact steps only, at ``least``.

    Attributes:
        least: decibels.
        most: synchronous steps at most, as `Adaptive` has it.
    """

    least: float
    most: int | None = None

    def __post_init__(self) -> None:
        if not (0 < self.least <= 120 and (self.most is None or self.most >= 1)):
            raise ValueError("impossible numbers")

    @property
    def _adaptive(self) -> Adaptive:
        return Adaptive(10 ** (-self.least / 20) / PIXELS, self.most)

    def decide(self, step: int, outlook: Outlook, past: Sequence[PastStep]) -> Decision:
        return self._adaptive.decide(step, outlook, past)

    def verdict(self, outlook: Outlook, past: Sequence[PastStep]) -> str:
        """Compare the error predicted for the stale steps, given their drift, with the budget, in a sentence."""
        made = self._adaptive.made(outlook, past)
        stale = sum(not before.synchronous for before in past)
        what = f"adaptive({self.least:g}dB): {len(past) - stale} of {len(past)} steps synchronous"
        if not stale:
            return f"{what}; the budget is kept: every step is exact"
        found = decibels(made)
        if found >= self.least:
            return f"{what}; the budget is kept: at least {found:.1f} dB predicted from the drift of the stale steps"
        why = (
            "keys drifted more than predicted" if self.most is None else f"no more than {self.most} steps were allowed"
        )
        return f"{what}; the budget is broken: only {found:.1f} dB predicted, as {why}"


@in_unit("s")
@dataclass(frozen=True)
class AdaptiveSeconds:
    """As many synchronous steps as there is time for, where they help most.

    The first step is synchronous, and the next one stale: then it is known how long each takes, the mean over all ranks
    and the median over steps. From then on a step is synchronous if it is among the worst of those that are left, of
    which so many can be synchronous as the time that is left allows.

    Attributes:
        limit: seconds of all steps together; text encoders and decoder are not counted.
        most: synchronous steps at most, as `Adaptive` has it.
    """

    limit: float
    most: int | None = None
    # All ranks learn how long the steps of all ranks took.
    reads_time: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.limit > 0 and (self.most is None or self.most >= 1)):
            raise ValueError("impossible numbers")

    def decide(self, step: int, outlook: Outlook, past: Sequence[PastStep]) -> Decision:
        # One more than there are steps: what is left decides.
        least = Adaptive(1e-30, outlook.total)
        if step == 0:
            return least.decide(step, outlook, past)
        stale = [one.seconds for one in past if not one.synchronous and one.seconds is not None]
        exact = [one.seconds for one in past[1:] if one.synchronous and one.seconds is not None]
        exact = exact or [one.seconds for one in past[:1] if one.seconds is not None]
        if not stale or not exact or outlook.total is None:
            # `Adaptive` refuses what has no known number of steps.
            decision = least.decide(step, outlook, past)
            return replace(decision, synchronous=False, reason="stale, to learn how long such a step takes")
        slow, fast = statistics.median(exact), statistics.median(stale)
        left = self.limit - spent(past) - fast * max(outlook.total - step, 1)
        # A step that is not slower when it is exact is always exact, as long as there is time.
        affordable = outlook.total if slow <= fast and left >= 0 else int(max(left, 0.0) / max(slow - fast, 1e-9))
        done = sum(one.synchronous for one in past)
        most = done + affordable if self.most is None else min(self.most, done + affordable)
        decision = Adaptive(1e-30, max(most, 1)).decide(step, outlook, past)
        time = f"{max(left, 0.0):.3g} s left for {affordable} synchronous steps of {slow:.3g} s instead of {fast:.3g} s"
        return replace(decision, reason=f"{time}; {'one of the worst' if decision.synchronous else 'others are worse'}")

    def verdict(self, outlook: Outlook, past: Sequence[PastStep]) -> str:
        """Compare the time of the steps with the limit, in a sentence."""
        took, exact = spent(past), sum(one.synchronous for one in past)
        what = f"adaptive({self.limit:g}s): {exact} of {len(past)} steps synchronous"
        if took <= self.limit:
            return f"{what}; the budget is kept: the steps took {took:.3g} s"
        why = "even with the first step alone synchronous" if exact <= 1 else "as steps took longer than those before"
        return f"{what}; the budget is broken: the steps took {took:.3g} s, {why}"


def spent(past: Sequence[PastStep]) -> float:
    """Seconds of the steps so far."""
    return sum(one.seconds or 0.0 for one in past)
