"""Warm-up policies: which steps of a stale strategy are synchronous, that is, exact.

A decision is a pure function of what every rank knows alike: the step, the number of steps, the devices and the
drifts measured so far. All ranks therefore decide alike without asking one another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Protocol

from ..errors import ConfigError

FORMS = "'fixed(4)', 'sqrt(2)', 'periodic(5)', 'first_last(2, 1)' or 'adaptive(0.1)'"


@dataclass(frozen=True)
class Decision:
    """Whether a step is synchronous, and why; ``predicted``: the error the step would make if it were not."""

    synchronous: bool
    reason: str
    predicted: float | None = None


@dataclass(frozen=True)
class Measured:
    """What was measured of a step, alike on all ranks.

    Attributes:
        change: relative L2 distance of the transformer's latents from those of the step before; None for the first
            step. Known before the step runs.
        drift: relative L2 distance of the step's own keys and values from those of the step before, over all blocks
            and ranks; None for the first step, and while the step has not run.
    """

    change: float | None = None
    drift: float | None = None


class WarmupPolicy(Protocol):
    """Decides for one step at a time."""

    @property
    def needs_total(self) -> bool:
        """Whether the number of steps must be known."""
        ...

    @property
    def measures(self) -> bool:
        """Whether decisions depend on what was measured."""
        ...

    def decide(self, step: int, total: int | None, devices: int, measured: Sequence[Measured]) -> Decision:
        """The decision for ``step`` (from 0).

        Args:
            step: number of the step.
            total: number of steps of the request, when known.
            devices: ranks that share a picture.
            measured: of every step up to this one; this one's drift is not known yet.
        """
        ...


@dataclass(frozen=True)
class _Blind:
    """A policy that looks at nothing measured."""

    @property
    def needs_total(self) -> bool:
        return False

    @property
    def measures(self) -> bool:
        return False


@dataclass(frozen=True)
class Fixed(_Blind):
    """The first ``steps`` steps. With 0 the very first step is stale with nothing to be stale on: see `displaced`."""

    steps: int

    def decide(self, step: int, total: int | None, devices: int, measured: Sequence[Measured]) -> Decision:
        return _first(step, self.steps)


@dataclass(frozen=True)
class Sqrt(_Blind):
    """The first round(base · √devices) steps: more devices see less of the picture fresh."""

    base: float

    def decide(self, step: int, total: int | None, devices: int, measured: Sequence[Measured]) -> Decision:
        return _first(step, round(self.base * sqrt(devices)))


@dataclass(frozen=True)
class Periodic(_Blind):
    """Step 0 and every ``every``-th step."""

    every: int

    def decide(self, step: int, total: int | None, devices: int, measured: Sequence[Measured]) -> Decision:
        if step % self.every == 0:
            return Decision(True, f"every {self.every}th step" if step else "the first step")
        return Decision(False, f"between two synchronous steps, {self.every} apart")


@dataclass(frozen=True)
class FirstLast:
    """The first ``first`` and the last ``last`` steps."""

    first: int
    last: int

    @property
    def needs_total(self) -> bool:
        return self.last > 0

    @property
    def measures(self) -> bool:
        return False

    def decide(self, step: int, total: int | None, devices: int, measured: Sequence[Measured]) -> Decision:
        if self.last and total is None:
            raise ConfigError(
                f"warmup='first_last({self.first}, {self.last})' needs the number of steps, and this transformer runs "
                "without a pipeline; call engine_of(...).begin_request(steps=...) before the first call"
            )
        if total is not None and step >= total - self.last:
            return Decision(True, f"one of the last {self.last} steps")
        return _first(step, self.first)


@dataclass(frozen=True)
class Adaptive:
    """The steps whose predicted error is above ``budget``.

    The error of a stale step grows with the distance between the keys it uses and those it should use, which is
    one step's drift; the part of the keys that is stale is (N - 1) / N on N devices. Before a step runs its drift is
    not known, but its latents are, on every rank: the drift is predicted as that of the step before, times the ratio
    of the two steps' changes of the latents.

    The first two steps are always synchronous: drift is known from two steps on.
    """

    budget: float

    @property
    def needs_total(self) -> bool:
        return False

    @property
    def measures(self) -> bool:
        return True

    def decide(self, step: int, total: int | None, devices: int, measured: Sequence[Measured]) -> Decision:
        if step < 2:
            return Decision(True, "drift is not known yet")
        before, now = measured[step - 1], measured[step]
        if before.drift is None:
            return Decision(True, "the drift of the step before is not known")
        ratio = now.change / before.change if now.change is not None and before.change else 1.0
        predicted = before.drift * ratio * (devices - 1) / max(devices, 1)
        if predicted > self.budget:
            return Decision(True, f"predicted error {predicted:.3g} above the budget {self.budget:g}", predicted)
        return Decision(False, f"predicted error {predicted:.3g} within the budget {self.budget:g}", predicted)


def _first(step: int, count: int) -> Decision:
    if step < count:
        return Decision(True, f"one of the first {count} steps" if count > 1 else "the first step")
    return Decision(False, f"after {count} warm-up {'step' if count == 1 else 'steps'}")


def parse(text: str) -> WarmupPolicy:
    """The policy that ``text`` names, such as ``"fixed(4)"``.

    Raises:
        ConfigError: not a policy, or impossible numbers; names the forms.
    """
    match = re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", text)
    name = match[1] if match else ""
    try:
        numbers = [float(part) for part in match[2].split(",")] if match else []
    except ValueError:
        numbers = []
    whole = [int(number) for number in numbers if isfinite(number) and number == int(number)]
    if name == "fixed" and len(numbers) == len(whole) == 1 and whole[0] >= 0:
        return Fixed(whole[0])
    if name == "sqrt" and len(numbers) == 1 and isfinite(numbers[0]) and numbers[0] > 0:
        return Sqrt(numbers[0])
    if name == "periodic" and len(numbers) == len(whole) == 1 and whole[0] >= 1:
        return Periodic(whole[0])
    if name == "first_last" and len(numbers) == len(whole) == 2 and min(whole) >= 0:
        return FirstLast(whole[0], whole[1])
    if name == "adaptive" and len(numbers) == 1 and isfinite(numbers[0]) and numbers[0] > 0:
        return Adaptive(numbers[0])
    raise ConfigError(f"warmup={text!r} is not a warm-up policy; use {FORMS}, with numbers of steps from 0 up")
