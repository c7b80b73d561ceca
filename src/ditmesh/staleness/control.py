"""The steps of a request: the policy's decisions, the measured drift, and their log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from ..core.clock import CallClock, TransformerCall
from .drift import DriftMonitor, drifts_of
from .policy import Decision, Outlook, Past, WarmupPolicy
from .schedule import even_levels

# Seconds that a failed request waits for pending messages of other ranks.
PATIENCE = 20.0


@dataclass
class StepRecord:
    """The log of one step.

    Attributes:
        step: number, from 0.
        synchronous, reason: the policy's decision.
        predicted: the error predicted for the step if it is stale, when the policy predicts one.
        seconds: how long it took, the mean over all ranks, when the policy reads it.
        drift: relative L2 distance of keys and values from the step before, by block; empty for the first step, and
            where it was not asked for: see `WarmupControl.measure_drift`.
        filled: attention calls of a stale step that were synchronous all the same on this rank, because there were
            no keys of the step before (another transformer took over, a branch came back).
    """

    step: int
    synchronous: bool
    reason: str
    predicted: float | None = None
    seconds: float | None = None
    drift: dict[str, float] = field(default_factory=dict)
    filled: int = 0

    @property
    def mean_drift(self) -> float | None:
        """Mean over the blocks; None where there is no drift."""
        return sum(self.drift.values()) / len(self.drift) if self.drift else None


@dataclass
class StalenessLog:
    """The steps of the latest request; ``verdict``: whether the policy's budget was kept, when it is over."""

    steps: list[StepRecord] = field(default_factory=list)
    verdict: str = ""

    @property
    def synchronous(self) -> int:
        """Number of synchronous steps."""
        return sum(record.synchronous for record in self.steps)

    def summary(self) -> str:
        """A short text such as ``4 of 12 steps synchronous``."""
        return f"{self.synchronous} of {len(self.steps)} steps synchronous"


class WarmupControl:
    """Decides at the beginning of every step whether it is synchronous. Shared by a pipeline's transformers.

    With ``lag`` 0 all ranks are in one step, and the drift of the step before is known when the next one is decided.
    A pipeline's stages are not: a stage begins a step when the stages behind it have not finished the one before.
    With ``lag`` 1 every stage sends what it has measured when it begins the next step, and does not wait::

        step begins      sent: sums of    known: sums of
        t                step t - 1       steps up to t - 2, and of t - 1 if that was synchronous

    After a synchronous step all stages have waited anyway. Which drifts are known is thus the same on all ranks, for
    any number of stages.

    Args:
        policy: decides.
        devices: ranks that share an image, or patches that stand for them.
        monitor: measures drift; strategies feed it.
        clock: reports when a step begins.
        noise: noise levels of the request's steps, as in `Outlook`, asked for at its first call by policies that want
            to know.
        lag: steps that a drift may be late.
        share: as in `Outlook`.
        timer: seconds, for tests.

    Attributes:
        policy: see above; may be replaced between requests.
        measure_drift: measure drift for the log though the policy does not read it; from the next request on. It is
            then added up when the request is over, and no step waits for it.
        log: what was decided in this request.
        decision: for the step in progress.
    """

    def __init__(
        self,
        policy: WarmupPolicy,
        devices: int,
        monitor: DriftMonitor,
        clock: CallClock,
        noise: Callable[[], tuple[float, ...] | None] = lambda: None,
        lag: int = 0,
        share: float | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy = policy
        self._timer = timer
        self.monitor = monitor
        self.clock = clock
        self.measure_drift = False
        self._devices, self._share, self._lag = devices, share, lag
        self._ask_noise = noise
        # Sums of the latest steps, in their order: on their way; and those that are not read before the end.
        self._coming: deque[Callable[[timedelta | None], Tensor]] = deque()
        self._unread: list[Tensor] = []
        self.begin_request()
        clock.on_step(self._begin_step)

    def begin_request(self, steps: int | None = None) -> None:
        """Begin a new request without state of the previous one.

        Args:
            steps: number of its steps, where no pipeline gives it.
        """
        self._forget(None)
        self.log = StalenessLog()
        self.decision = Decision(True, "no step has begun")
        self._given = steps
        self._outlook = Outlook(self._devices, share=self._share)

    def end_request(self, failed: bool = False) -> None:
        """End the request, and add the last steps' drift to the log; ``failed``: drop it.

        Raises:
            RuntimeError: another rank has gone, and nothing was said of a failure.
        """
        if failed:
            with suppress(RuntimeError):
                self._forget(timedelta(seconds=PATIENCE))
            self._coming.clear()
        elif self._sent < len(self.log.steps):
            self._send()
            self._receive(0)
            if self._unread:
                self._take(self.monitor.post(torch.stack(self._unread))(None))
                self._unread.clear()
            verdict = getattr(self.policy, "verdict", None)
            if verdict is not None:
                self.log.verdict = verdict(self._outlook, self._past())

    def synchronous(self, known: bool) -> bool:
        """Whether a call of this step is synchronous, given whether there are keys of the step before.

        A policy that wants the very first step stale gets it stale, with nothing to be stale on; later on, a call
        without keys is synchronous.
        """
        if self.decision.synchronous or known or not self.log.steps[0].synchronous:
            return self.decision.synchronous
        self.filled()
        return True

    def make_synchronous(self, reason: str) -> None:
        """Make the step that has just begun synchronous, on all ranks alike, whatever the policy has decided."""
        if not self.decision.synchronous:
            self.decision = Decision(True, reason, self.decision.predicted)
            self.log.steps[-1].synchronous, self.log.steps[-1].reason = True, reason

    def filled(self) -> None:
        """Count a call of this stale step that was synchronous, because it had no keys of the step before."""
        self.log.steps[-1].filled += 1

    def _begin_step(self, _: TransformerCall) -> None:
        reads = getattr(self.policy, "reads_drift", True)
        if not self.log.steps:
            noise = even_levels(self._given) if self._given is not None else None
            if noise is None and getattr(self.policy, "needs_total", True):
                noise = self._ask_noise()
            self._outlook = Outlook(self._devices, noise, self._share)
            self._reads, self.monitor.active = reads, reads or self.measure_drift
            self._times = reads and getattr(self.policy, "reads_time", False)
        else:
            self._send()
        steps = self.log.steps
        self._receive(0 if not steps or steps[-1].synchronous else self._lag)
        made = self.decision = self.policy.decide(len(steps), self._outlook, self._past())
        self._began = self._timer()
        steps.append(StepRecord(len(steps), made.synchronous, made.reason, made.predicted))

    def _past(self) -> list[Past]:
        return [Past(record.synchronous, record.mean_drift, record.seconds) for record in self.log.steps]

    def _send(self) -> None:
        """Send the drift of the finished step, if the policy reads it."""
        self._sent += 1
        if not self.monitor.active:
            return
        sums = self.monitor.take()
        if self._times:
            took = torch.tensor([[self._timer() - self._began, 1.0]], dtype=sums.dtype).to(sums.device)
            sums = torch.cat([sums, took])
        if self._reads:
            self._coming.append(self.monitor.post(sums))
        else:
            self._unread.append(sums)

    def _receive(self, under_way: int) -> None:
        """Wait for the sums of all steps but the latest ``under_way``, and take them in."""
        while len(self._coming) > under_way:
            self._take(self._coming.popleft()(None).unsqueeze(0))

    def _take(self, totals: Tensor) -> None:
        """Take the drifts of the next steps, sums of all ranks (steps, blocks, 2), into the log."""
        if self._times:
            *_, (seconds, ranks) = totals[0].tolist()
            self.log.steps[self._taken].seconds = seconds / ranks
            totals = totals[:, :-1]
        for drifts in drifts_of(totals):
            by_block = zip(self.monitor.blocks, drifts, strict=True)
            self.log.steps[self._taken].drift = {name: drift for name, drift in by_block if drift is not None}
            self._taken += 1

    def _forget(self, timeout: timedelta | None) -> None:
        self.monitor.reset()
        self._unread.clear()
        # Steps whose sums were sent, and taken in.
        self._sent = self._taken = 0
        self._reads, self._times, self._began = True, False, 0.0
        while self._coming:
            self._coming.popleft()(timeout)
