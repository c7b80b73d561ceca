"""The steps of a request: the policy's decisions, the measured drift, and their log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ..core.clock import CallClock, TransformerCall
from ..core.request import RequestValue
from .drift import DriftMonitor, drifts_of
from .policy import Decision, Outlook, PastStep, WarmupPolicy
from .schedule import even_levels


@dataclass
class StepRecord:
    """The log of one step: its number, the policy's decision, and what was measured.

    Attributes:
        drift: relative L2 distance of keys and values from the step before, by block; empty where it was not measured.
        filled: attention calls of a stale step that were synchronous on this rank, as there were no keys of the step
            before (another transformer took over, a branch came back).
    """

    step: int
    synchronous: bool
    reason: str
    predicted: float | None = None
    drift: dict[str, float] = field(default_factory=dict)
    filled: int = 0

    @property
    def mean_drift(self) -> float | None:
        """Mean over the blocks; None where there is no drift."""
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
        """A short text such as ``4 of 12 steps synchronous``."""
        return f"{self.synchronous} of {len(self.steps)} steps synchronous"


@dataclass
class _Steps:
    """The steps of one request.

    Attributes:
        given: number of steps, where no pipeline gives it.
        levels: noise levels, once they were asked for; empty where nothing says them.
        unread: sums of the steps, which are added up over the ranks when the request is over.
        in_progress: whether a step has begun whose drift is not in the log.
    """

    log: StalenessLog = field(default_factory=StalenessLog)
    decision: Decision = field(default_factory=lambda: Decision(True, "no step has begun"))
    given: int | None = None
    outlook: Outlook | None = None
    levels: tuple[float, ...] | None = None
    unread: list[Tensor] = field(default_factory=list)
    in_progress: bool = False


class WarmupControl:
    """Decides at the beginning of every step whether it is synchronous. Shared by a pipeline's transformers.

    Args:
        devices: ranks that share an image, or patches that stand for them.
        monitor: measures drift; strategies feed it.
        noise: gives the noise levels, as in `Outlook`; asked at a request's first call by policies that read them.

    Attributes:
        policy: may be replaced between requests on every rank, by one of your own too.
        measure_drift: measure drift for the log though the policy does not read it; from the next request on. It is
            then added up when the request is over, and no step waits for it.
    """

    def __init__(
        self,
        policy: WarmupPolicy,
        devices: int,
        monitor: DriftMonitor,
        clock: CallClock,
        noise: Callable[[], tuple[float, ...] | None] = lambda: None,
    ) -> None:
        self.policy = policy
        self.monitor = monitor
        self.clock = clock
        self.measure_drift = False
        self._devices = devices
        self._ask_noise = noise
        self._of = RequestValue(_Steps)
        clock.on_step(self._begin_step)

    @property
    def log(self) -> StalenessLog:
        """The decisions of this request."""
        return self._of.value.log

    @property
    def decision(self) -> Decision:
        """For the step in progress."""
        return self._of.value.decision

    def begin_request(self, steps: int | None = None) -> None:
        """Begin a new request; ``steps``: number of its steps, where no pipeline gives it."""
        self.monitor.reset()
        self._of.renew()
        self._of.value.given = steps

    def end_request(self, failed: bool = False) -> None:
        """End the request, and add the last steps' drift to the log; ``failed``: drop it."""
        of = self._of.value
        if of.in_progress and not failed:
            self._take_drift()
            if of.unread:
                self._note(of.log.steps, self.monitor.reduce(torch.stack(of.unread)))
        of.in_progress = False
        of.unread.clear()
        # No sample of it is held any more.
        self.monitor.reset()

    def synchronous(self, known: bool) -> bool:
        """True if a call of this step is synchronous: the policy wants it, or no keys of the step before are known."""
        if not self.decision.synchronous and not known:
            self.log.steps[-1].filled += 1
        return self.decision.synchronous or not known

    def make_synchronous(self, reason: str) -> None:
        """Make the step that has just begun synchronous, on all ranks alike, whatever the policy has decided."""
        of = self._of.value
        if not of.decision.synchronous:
            of.decision = Decision(True, reason, of.decision.predicted)
            of.log.steps[-1].synchronous, of.log.steps[-1].reason = True, reason

    def goes_on(self, step: int) -> bool:
        """True if the noise changes both to this step and to the one before: second-order samplers stay at a level."""
        of = self._of.value
        if of.levels is None:
            of.levels = self._ask_noise() or ()
        latest = of.levels[max(step - 2, 0) : step + 1]
        return all(before != after for before, after in pairwise(latest))

    def _begin_step(self, _: TransformerCall) -> None:
        of, steps = self._of.value, self.log.steps
        if of.outlook is None:
            reads = self.policy.reads_drift
            noise = even_levels(of.given) if of.given is not None else None
            if noise is None and reads:
                noise = self._ask_noise()
            of.outlook = Outlook(self._devices, noise)
            self.monitor.active = reads or self.measure_drift
        else:
            self._take_drift()
        of.in_progress = True
        past = [PastStep(record.synchronous, record.mean_drift) for record in steps]
        made = of.decision = self.policy.decide(len(steps), of.outlook, past)
        steps.append(StepRecord(len(steps), made.synchronous, made.reason, made.predicted))

    def _take_drift(self) -> None:
        """Take the drift of the finished step: into the log if the policy reads it, else for the end."""
        if self.monitor.active:
            sums = self.monitor.take()
            if self.policy.reads_drift:
                self._note(self.log.steps[-1:], self.monitor.reduce(sums).unsqueeze(0))
            else:
                self._of.value.unread.append(sums)

    def _note(self, steps: Sequence[StepRecord], totals: Tensor) -> None:
        """Write the drifts of steps, sums of all ranks (steps, blocks, 2), to the log."""
        for record, drifts in zip(steps, drifts_of(totals), strict=True):
            by_block = zip(self.monitor.blocks, drifts, strict=True)
            record.drift = {name: drift for name, drift in by_block if drift is not None}
