"""One request's steps: the clock, the policy's decisions, the drift measured, and the log of it all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .clock import StepClock
from .drift import DriftMonitor
from .policy import Decision, Outlook, Past, WarmupPolicy
from .schedule import even_levels


@dataclass
class StepRecord:
    """What happened in one step.

    Attributes:
        step: number, from 0.
        synchronous, reason: the policy's decision.
        predicted: the error predicted for the step if it is stale, when the policy predicts one.
        drift: relative L2 distance of keys and values from the step before, by block; empty for the first step.
        filled: attention calls of a stale step that were synchronous all the same on this rank, because there were
            no keys of the step before (another transformer took over, a branch came back).
    """

    step: int
    synchronous: bool
    reason: str
    predicted: float | None = None
    drift: dict[str, float] = field(default_factory=dict)
    filled: int = 0

    def measured(self, blocks: Sequence[str], drifts: Sequence[float | None]) -> None:
        """Take in the drift of every block; None where nothing was compared."""
        self.drift = {name: drift for name, drift in zip(blocks, drifts, strict=True) if drift is not None}

    @property
    def mean_drift(self) -> float | None:
        """Mean over the blocks; None for the first step."""
        return sum(self.drift.values()) / len(self.drift) if self.drift else None


@dataclass
class StalenessLog:
    """The steps of the latest request."""

    steps: list[StepRecord] = field(default_factory=list)

    @property
    def synchronous(self) -> int:
        """Number of synchronous steps."""
        return sum(record.synchronous for record in self.steps)

    def summary(self) -> str:
        """Such as ``4 of 12 steps synchronous``."""
        return f"{self.synchronous} of {len(self.steps)} steps synchronous"


class StepControl:
    """Says whether the step in progress is synchronous.

    Args:
        policy: decides.
        devices: ranks that share a picture.
        monitor: measures drift; strategies feed it.
        noise: noise levels of the request's steps, as in `Outlook`, asked for at its first call.
    """

    def __init__(
        self,
        policy: WarmupPolicy,
        devices: int,
        monitor: DriftMonitor,
        noise: Callable[[], tuple[float, ...] | None] = lambda: None,
    ) -> None:
        self.policy = policy
        self.devices = devices
        self.clock = StepClock()
        self.monitor = monitor
        self.log = StalenessLog()
        self.decision = Decision(True, "no step has begun")
        self._ask_noise = noise
        self._given: int | None = None
        self._outlook = Outlook(devices)
        self._past: list[Past] = []
        self._open = False

    @property
    def step(self) -> int:
        """Number of the step in progress."""
        return self.clock.step

    @property
    def branch(self) -> int:
        """Number of the guidance branch in progress."""
        return self.clock.branch

    def begin_request(self, steps: int | None = None) -> None:
        """A new request: nothing of the one before is seen any more.

        Args:
            steps: number of its steps, where no pipeline tells.
        """
        self.clock.reset()
        self.monitor.reset()
        self.log = StalenessLog()
        self.decision = Decision(True, "no step has begun")
        self._given = steps
        self._past = []
        self._open = False

    def begin_call(self, timestep: Any, latents: Any, others: Mapping[str, Any]) -> None:
        """A call of the transformer begins, as `StepClock.tick`. At a new step: one small all-reduce, a decision."""
        if not self.clock.tick(timestep, latents, others):
            return
        if self.clock.step == 0:
            noise = self._ask_noise() if self._given is None else even_levels(self._given)
            self._outlook = Outlook(self.devices, noise)
        else:
            self._close_step()
        self.decision = self.policy.decide(self.clock.step, self._outlook, self._past)
        self.log.steps.append(
            StepRecord(self.clock.step, self.decision.synchronous, self.decision.reason, self.decision.predicted)
        )
        self._open = True

    def end_request(self) -> None:
        """The request is over, and nobody raised: take the last step's drift into the log."""
        if self._open:
            self._close_step()

    def filled(self) -> None:
        """An attention call of this stale step was synchronous."""
        if self.log.steps:
            self.log.steps[-1].filled += 1

    def _close_step(self) -> None:
        self._open = False
        record = self.log.steps[-1]
        record.measured(self.monitor.blocks, self.monitor.close_step())
        self._past.append(Past(record.synchronous, record.mean_drift))
