"""The steps of a request: the policy's decisions, the measured drift, and their log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import torch
from torch import Tensor

from ..core.clock import CallClock, TransformerCall
from ..core.request import RequestValue
from .drift import DriftMonitor, drifts_of
from .policy import Decision, Outlook, PastStep, WarmupPolicy
from .schedule import even_levels

# Seconds that a failed request waits for pending messages of other ranks.
MESSAGE_TIMEOUT = 20.0


@dataclass
class StepRecord:
    """The log of one step.

    Attributes:
        step: number, from 0.
        synchronous, reason: the policy's decision.
        predicted: the error predicted for the step if it is stale, when the policy predicts one.
        drift: relative L2 distance of keys and values from the step before, by block; empty for the first step, and
            where it was not asked for: see `WarmupControl.measure_drift`.
        filled: attention calls of a stale step that were synchronous all the same on this rank, because there were
            no keys of the step before (another transformer took over, a branch came back).
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


# A sum that is on its way: waits for it, for so long.
Coming = Callable[[timedelta | None], Tensor]


@dataclass
class _Steps:
    """The steps of one request.

    Attributes:
        log: what was decided.
        decision: for the step in progress.
        given: number of steps, where no pipeline gives it.
        outlook: what the policy is told; None before the first step.
        levels: noise levels, as in `Outlook`, once they were asked for; empty where nothing says them.
        coming, unread: sums of the latest steps, in their order: on their way; and those that are not read before the
            end.
        sent, taken: the number of steps with sums that were sent, and with sums that were taken in.
        reads: whether the policy reads drift.
    """

    log: StalenessLog = field(default_factory=StalenessLog)
    decision: Decision = field(default_factory=lambda: Decision(True, "no step has begun"))
    given: int | None = None
    outlook: Outlook | None = None
    levels: tuple[float, ...] | None = None
    coming: deque[Coming] = field(default_factory=deque)
    unread: list[Tensor] = field(default_factory=list)
    sent: int = 0
    taken: int = 0
    reads: bool = True


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
        devices: ranks that share an image, or patches that stand for them.
        monitor: measures drift; strategies feed it.
        clock: reports when a step begins.
        noise: noise levels of the request's steps, as in `Outlook`, asked for at its first call by policies that want
            to know.
        lag: steps that a drift may be late.
        share: as in `Outlook`.

    Attributes:
        policy: see above; may be replaced between requests.
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
        lag: int = 0,
        share: float | None = None,
    ) -> None:
        self.policy = policy
        self.monitor = monitor
        self.clock = clock
        self.measure_drift = False
        self._devices, self._share, self._lag = devices, share, lag
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
        """Begin a new request without state of the previous one.

        Args:
            steps: number of its steps, where no pipeline gives it.
        """
        self._forget(None)
        self._of.renew()
        self._of.value.given = steps

    def end_request(self, failed: bool = False) -> None:
        """End the request, and add the last steps' drift to the log; ``failed``: drop it.

        Raises:
            RuntimeError: another rank has gone, and nothing was said of a failure.
        """
        of = self._of.value
        if failed:
            with suppress(RuntimeError):
                self._forget(timedelta(seconds=MESSAGE_TIMEOUT))
            of.coming.clear()
        elif of.sent < len(of.log.steps):
            self._send()
            self._receive(0)
            if of.unread:
                self._take(self.monitor.post(torch.stack(of.unread))(None))
                of.unread.clear()
            # No sample of it is held any more.
            self.monitor.reset()

    def synchronous(self, known: bool) -> bool:
        """True if a call of this step is synchronous, given whether there are keys of the step before.

        A policy that wants the very first step stale gets it stale, with nothing to be stale on; later on, a call
        without keys is synchronous.
        """
        if self.decision.synchronous or known or not self.log.steps[0].synchronous:
            return self.decision.synchronous
        self.filled()
        return True

    def make_synchronous(self, reason: str) -> None:
        """Make the step that has just begun synchronous, on all ranks alike, whatever the policy has decided."""
        of = self._of.value
        if not of.decision.synchronous:
            of.decision = Decision(True, reason, of.decision.predicted)
            of.log.steps[-1].synchronous, of.log.steps[-1].reason = True, reason

    def goes_on(self, step: int) -> bool:
        """True if the noise changes both from the step before to this one and from the one before that.

        It does not where a sampler of second order evaluates the model twice at one level.
        """
        of = self._of.value
        if of.levels is None:
            of.levels = self._ask_noise() or ()
        latest = of.levels[max(step - 2, 0) : step + 1]
        return all(before != after for before, after in pairwise(latest))

    def filled(self) -> None:
        """Count a call of this stale step that was synchronous, because it had no keys of the step before."""
        self.log.steps[-1].filled += 1

    def _begin_step(self, _: TransformerCall) -> None:
        of = self._of.value
        reads = getattr(self.policy, "reads_drift", True)
        if not of.log.steps:
            noise = even_levels(of.given) if of.given is not None else None
            if noise is None and getattr(self.policy, "needs_total", True):
                noise = self._ask_noise()
            of.outlook = Outlook(self._devices, noise, self._share)
            of.reads, self.monitor.active = reads, reads or self.measure_drift
        else:
            self._send()
        steps = of.log.steps
        self._receive(0 if not steps or steps[-1].synchronous else self._lag)
        outlook = of.outlook or Outlook(self._devices, share=self._share)
        past = [PastStep(record.synchronous, record.mean_drift) for record in steps]
        made = of.decision = self.policy.decide(len(steps), outlook, past)
        steps.append(StepRecord(len(steps), made.synchronous, made.reason, made.predicted))

    def _send(self) -> None:
        """Send the drift of the finished step, if the policy reads it."""
        of = self._of.value
        of.sent += 1
        if not self.monitor.active:
            return
        sums = self.monitor.take()
        if of.reads:
            of.coming.append(self.monitor.post(sums))
        else:
            of.unread.append(sums)

    def _receive(self, under_way: int) -> None:
        """Wait for the sums of all steps but the latest ``under_way``, and take them in."""
        coming = self._of.value.coming
        while len(coming) > under_way:
            self._take(coming.popleft()(None).unsqueeze(0))

    def _take(self, totals: Tensor) -> None:
        """Take the drifts of the next steps, sums of all ranks (steps, blocks, 2), into the log."""
        of = self._of.value
        for drifts in drifts_of(totals):
            by_block = zip(self.monitor.blocks, drifts, strict=True)
            of.log.steps[of.taken].drift = {name: drift for name, drift in by_block if drift is not None}
            of.taken += 1

    def _forget(self, timeout: timedelta | None) -> None:
        """Drop what was measured, but not the log."""
        self.monitor.reset()
        of = self._of.value
        of.unread.clear()
        of.sent = of.taken = 0
        of.reads = True
        while of.coming:
            of.coming.popleft()(timeout)
