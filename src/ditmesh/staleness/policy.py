"""Warm-up policies: which steps of a stale strategy are synchronous, that is, exact.

A decision is a pure function of what every rank knows alike: the step, the number of steps, the devices and the
drifts measured so far. All ranks therefore decide alike without asking one another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar, Protocol

from ..errors import ConfigError

# The spellings of policies, for messages.
FORMS = "'fixed(4)', 'sqrt(2)', 'adaptive(0.05)', 'adaptive(0.05, 6)' or 'steps(0 1 5)'"
FORMS_WITHOUT_DRIFT = "'fixed(4)', 'sqrt(2)' or 'steps(0 1 5)'"


@dataclass(frozen=True)
class Decision:
    """The choice of a synchronous or a stale step, and why; ``predicted``: the error predicted for a stale one."""

    synchronous: bool
    reason: str
    predicted: float | None = None


@dataclass(frozen=True)
class Outlook:
    """The facts that are known of a request before it runs: how many devices share an image, and its noise levels.

    ``noise``: share of noise σ in the latents, at every step and after the last; None: the number of steps is unknown.
    """

    devices: int
    noise: tuple[float, ...] | None = None

    @property
    def stale(self) -> float:
        """Of the keys that a query sees in a stale step, the share of the step before: those of the other devices."""
        return (self.devices - 1) / self.devices

    @property
    def total(self) -> int | None:
        """Number of steps, when known."""
        return None if self.noise is None else len(self.noise) - 1


@dataclass(frozen=True)
class PastStep:
    """A step that has run: whether it was synchronous, and its drift over all blocks, alike on all ranks.

    ``drift``: see `StepRecord`; None for the first step, and for one of which it is not known yet.
    """

    synchronous: bool
    drift: float | None = None


class WarmupPolicy(Protocol):
    """Decides for one step at a time; for one of your own see `WarmupControl.policy`.

    ``reads_drift``: whether it reads the drift of past steps and the noise levels; else none is measured.
    """

    reads_drift: ClassVar[bool]

    def decide(self, step: int, outlook: Outlook, past: Sequence[PastStep]) -> Decision:
        """The decision for ``step`` (from 0), given all steps before it."""
        ...


@dataclass(frozen=True)
class FirstSteps:
    """The first ``steps`` steps, ``by_root`` times √devices, as more devices see less of the image fresh.

    With 0 the very first step is stale with nothing to be stale on: see `displaced`.
    """

    steps: float
    by_root: bool = False
    reads_drift: ClassVar[bool] = False

    def decide(self, step: int, outlook: Outlook, past: Sequence[PastStep]) -> Decision:
        count = round(self.steps * sqrt(outlook.devices) if self.by_root else self.steps)
        if step < count:
            return Decision(True, f"one of the first {count} steps" if count > 1 else "the first step")
        return Decision(False, f"after {count} warm-up {'step' if count == 1 else 'steps'}")


@dataclass(frozen=True)
class Adaptive:
    """As few synchronous steps as keep the error predicted for the image within ``budget``, where they help most.

    A stale step attends to keys that are off by one step's drift d, on a share f of the tokens ((N - 1) / N on N
    devices), of which w = (σ - σ') / √(s² (1 - σ)² + σ²) reaches the image: the sampling equation, linearised for
    images that spread by s = 0.5 (Karras et al. 2022, arXiv:2206.00364; derived in docs/lab/stale.md). The predicted
    error of a step is d w f, and that of several the root of the sum of their squares. Drift is predicted in proportion
    to the share of the signal-to-noise ratio that is new since the step before, by the factor of the latest two steps.
    Of this and all coming steps those stay stale that fit in the budget, smallest error first; never the first step.

    Attributes:
        budget: predicted error of the image.
        most: synchronous steps at most, the first one counted; they go where the predicted errors are largest. None:
            as many as it takes.
    """

    budget: float
    most: int | None = None
    reads_drift: ClassVar[bool] = True

    def decide(self, step: int, outlook: Outlook, past: Sequence[PastStep]) -> Decision:
        if outlook.total is None:
            raise ConfigError(
                f"warmup='adaptive({self.budget:g})' needs the number of steps, and this transformer runs without a "
                "pipeline; call engine_of(...).begin_request(steps=...) before the first call"
            )
        if step == 0:
            return Decision(True, "the first step")
        squares, step_error, coming = self._errors(step, outlook.total, outlook, past)
        error = sqrt(squares + step_error**2 + sum(other**2 for other in coming if other <= step_error))
        what = f"predicted error {error:.3g} with this and all cheaper steps stale"
        left = None if self.most is None else self.most - sum(before.synchronous for before in past)
        if left is not None and sum(other > step_error for other in coming) >= left:
            what = f"predicted error {step_error:.3g} of this step"
            return Decision(False, f"{what}; the {self.most} synchronous steps are for worse ones", step_error)
        if error > max(self.budget, sqrt(squares) * NEXT_TO_NOTHING):
            return Decision(True, f"{what}, above the budget {self.budget:g}", step_error)
        within = "within the budget" if error <= self.budget else "hardly more than is made already, above the budget"
        return Decision(False, f"{what}, {within} {self.budget:g}", step_error)

    @staticmethod
    def _errors(step: int, total: int, outlook: Outlook, past: Sequence[PastStep]) -> tuple[float, float, list[float]]:
        """The sum of the squares of the errors made so far, and those of this step and of the coming ones if stale."""
        noise = outlook.noise or ()
        # A sampler that takes more steps than it has announced takes them at its last.
        place = [min(at, total - 1) for at in range(max(step + 1, total))]
        weights = [_weight(noise, at) * outlook.stale for at in place]
        news = [_news(noise, at) for at in place]
        factors = [before.drift / news[at] for at, before in enumerate(past) if before.drift is not None]
        factor = sum(factors[-2:]) / len(factors[-2:]) if factors else ASSUMED_DRIFT
        squares = sum(
            ((factor * news[at] if before.drift is None else before.drift) * weights[at]) ** 2
            for at, before in enumerate(past)
            if not before.synchronous
        )
        here, *coming = (factor * new * weight for new, weight in zip(news[step:], weights[step:], strict=True))
        return squares, here, coming


@dataclass(frozen=True)
class GivenSteps:
    """Exactly these steps."""

    steps: frozenset[int]
    reads_drift: ClassVar[bool] = False

    def decide(self, step: int, outlook: Outlook, past: Sequence[PastStep]) -> Decision:
        return Decision(step in self.steps, "one of the steps given" if step in self.steps else "not one of them")


# With fewer steps stale keys may show in images (docs/lab/findings.md, number of steps).
FEW_STEPS = 12
# Drift of a step in which all of the signal is new, while none has been measured.
ASSUMED_DRIFT = 0.25
# Growth of an error that does not count.
NEXT_TO_NOTHING = 1.005
# The least share of news: a second evaluation at one noise level sees other latents, too.
LEAST_NEWS = 0.05
# Spread of images around what is being drawn, in units of the latents.
IMAGE_SPREAD = 0.5


def _weight(noise: Sequence[float], step: int) -> float:
    level, after = noise[step], noise[step + 1]
    move = abs(level - after)
    if level in (after, noise[step - 1] if step else None):
        # A second evaluation at one level: each has half of the move on either side.
        move = (move + abs(noise[step - 1] - level)) / 2 if step else move
    return move / sqrt((IMAGE_SPREAD * (1 - level)) ** 2 + level**2)


def _news(noise: Sequence[float], step: int) -> float:
    """The share of a step's signal-to-noise ratio that the step before did not have."""
    if step == 0 or noise[step - 1] >= 1 or noise[step] <= 0:
        return 1.0
    before, now = ((1 - noise[at]) / noise[at] for at in (step - 1, step))
    return max(1 - (before / now) ** 2 if now > 0 else 0.0, LEAST_NEWS)


def few_steps(steps: int) -> str | None:
    """The sentence that speaks against stale keys in a request of so many steps; None: they are enough."""
    if steps >= FEW_STEPS:
        return None
    return (
        f"with {steps} steps keys of the step before may show in the image (under {FEW_STEPS}, see docs/stale.md); use "
        "an exact strategy, such as ulysses, ring or cfg, or more steps"
    )


def parse(text: str) -> WarmupPolicy:
    """The policy that ``text`` names, such as ``"fixed(4)"``; else a `ConfigError` that names the forms."""
    match = re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", text)
    name, numbers = match.groups() if match is not None else ("", "")
    with suppress(ValueError):
        if name == "steps":
            given = frozenset(map(int, numbers.split()))
            if min(given, default=0) >= 0:
                return GivenSteps(given)
        first, *more = numbers.split(",")
        if name == "fixed" and not more and int(first) >= 0:
            return FirstSteps(int(first))
        if name == "sqrt" and not more and 0 < float(first) < inf:
            return FirstSteps(float(first), by_root=True)
        if name == "adaptive" and 0 < float(first) < inf and len(more) < 2 and all(int(most) >= 1 for most in more):
            return Adaptive(float(first), *map(int, more))
    raise ConfigError(f"warmup={text!r} is not a warm-up policy; use {FORMS}, with numbers of steps from 0 up")
