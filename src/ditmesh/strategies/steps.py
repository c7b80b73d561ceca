"""The steps of a request, for strategies that are synchronous in some of them.

`watch_calls` tells a `StepControl` of a transformer's calls; `Steps` is the control of PipeFusion, whose stages are not
in the same step at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

from torch import Tensor, nn

from ..comm.link import Link
from ..config import ParallelConfig
from ..errors import ConfigError, InputError
from ..layout.arguments import Arguments, covers, parameter_names
from ..staleness.control import StalenessLog, StepControl, StepRecord
from ..staleness.drift import DriftMonitor, drifts_of
from ..staleness.policy import Outlook, Past, WarmupPolicy, parse
from ..staleness.schedule import even_levels, noise_levels
from .base import ParallelModel, Request, Strategy
from .stages import blocks_of

# What transformers call the timestep.
TIMESTEPS = ("timestep", "t")
# Seconds that a request which failed waits for messages of other stages that are still under way.
PATIENCE = 20.0


def watch_calls(model: nn.Module, control: StepControl) -> Callable[[], None]:
    """Tell ``control`` of every call of the transformer before it runs; returns what stops it.

    Raises:
        ConfigError: the transformer takes no timestep, by which steps are told apart.
    """
    names = parameter_names(type(model).forward)
    timestep = next((name for name in TIMESTEPS if name in names), None)
    if timestep is None:
        raise ConfigError(
            f"stale strategies tell steps by their timestep, and {type(model).__name__} takes none "
            f"({' or '.join(TIMESTEPS)}); use exchange='exact'"
        )
    own = (names[0], timestep)

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = Arguments(names, args, kwargs)
        others = {path: value for path, value in arguments.leaves() if not any(covers(name, path) for name in own)}
        control.begin_call(arguments.get(timestep), arguments.get(names[0]), others)

    return model.register_forward_pre_hook(begin, with_kwargs=True).remove


class Steps:
    """The steps of a request, and which of them are synchronous. Shared by a pipeline's transformers.

    A stage begins a step when the stages behind it have not finished the one before: its drift is not known where it
    would be wanted. Every stage sends what it has measured when it begins the next step, and does not wait. Decided
    is with what was sent a step earlier, which is there when the prediction of a first patch comes back. After a
    synchronous step, for which all stages have waited anyway, its own drift is taken. Which drifts are known is thus
    itself the same on all ranks, for any number of stages.

    Args:
        policy: decides.
        patches: patches of the picture, which stand for the devices of the policy: M decides what is seen fresh.
        monitor: measures drift; the transformers' handlers feed it.
        link: all ranks of the job, over which drift is added up.
        noise: noise levels of the request's steps, asked for at its first call.

    Attributes:
        step: number of the step in progress, from 0; -1 before the first call.
        log: what was decided; `StepRecord.filled` counts the calls of a stale step that were synchronous because they
            had no keys of the step before.
        policy: see above; may be replaced between requests.
    """

    def __init__(
        self,
        policy: WarmupPolicy,
        patches: int,
        monitor: DriftMonitor,
        link: Link,
        noise: Callable[[], tuple[float, ...] | None] = lambda: None,
    ) -> None:
        self.policy = policy
        self.monitor = monitor
        self._link = link
        self._patches = patches
        self._ask_noise = noise
        # Sums of the latest steps, in their order: on their way, and here but not looked at yet.
        self._coming: deque[Callable[[timedelta | None], Tensor]] = deque()
        self._totals: deque[Tensor] = deque()
        self.begin_request()

    def begin_request(self, steps: int | None = None) -> None:
        """A new request; ``steps``: how many steps it has, where no pipeline tells."""
        self._forget(None)
        self.step = -1
        self.log = StalenessLog()
        self._given = steps
        self._past: list[Past] = []
        self._outlook = Outlook(self._patches)

    def end_request(self, failed: bool = False) -> None:
        """The request is over: take the last steps' drift into the log; ``failed``: it has raised, forget them.

        Raises:
            RuntimeError: another rank has gone, and nothing was said of a failure.
        """
        if failed:
            with suppress(RuntimeError):
                self._forget(timedelta(seconds=PATIENCE))
            self._coming.clear()
        elif self._sent <= self.step:
            self._send()
            self._receive(0)
            self._look()

    def next(self) -> None:
        """A new step begins: decide."""
        if self.step >= 0:
            self._send()
        self.step += 1
        if self.step == 0:
            noise = self._ask_noise() if self._given is None else even_levels(self._given)
            # A patch sees those before it fresh: of M - 1 others half, on average.
            self._outlook = Outlook(self._patches, noise, (self._patches - 1) / (2 * self._patches))
        self._receive(0 if not self._past or self._past[-1].synchronous else 1)
        # To look at numbers is to wait for the device; who does not want them need not.
        if getattr(self.policy, "uses_drift", True):
            self._look()
        decision = self.policy.decide(self.step, self._outlook, self._past)
        self._past.append(Past(decision.synchronous))
        self.log.steps.append(StepRecord(self.step, decision.synchronous, decision.reason, decision.predicted))

    def _send(self) -> None:
        """Tell the others what was measured in the step that has run here."""
        self._coming.append(self._link.post_sum(self.monitor.take()))
        self._sent += 1

    def _receive(self, under_way: int) -> None:
        """Wait for the sums of all steps but the latest ``under_way``."""
        while len(self._coming) > under_way:
            self._totals.append(self._coming.popleft()(None))

    def _look(self) -> None:
        """Take the drifts that are here into the past and the log."""
        while self._totals:
            step = self._looked
            record = self.log.steps[step]
            record.measured(self.monitor.blocks, drifts_of(self._totals.popleft()))
            self._past[step] = Past(record.synchronous, record.mean_drift)
            self._looked += 1

    def _forget(self, timeout: timedelta | None) -> None:
        self.monitor.reset()
        self._totals.clear()
        # Steps whose sums were sent, and looked at.
        self._sent = self._looked = 0
        while self._coming:
            self._coming.popleft()(timeout)

    def synchronous(self, known: bool) -> bool:
        """Whether a call of this step is synchronous, given whether there are keys of the step before.

        A policy that wants the very first step stale gets it stale, with nothing to be stale on; later on, a call
        without keys is synchronous.
        """
        record = self.log.steps[-1]
        if record.synchronous or known or not self.log.steps[0].synchronous:
            return record.synchronous
        record.filled += 1
        return True


def numbered(model: ParallelModel, monitor: DriftMonitor) -> dict[str, int]:
    """Number in the drift monitor of every block of a transformer, by path."""
    return {path: monitor.add_block(model.prefix + path) for path, _ in blocks_of(model.model, model.layout)}


class StaleSteps(Strategy):
    """The steps of a request, and which of them are synchronous. Before the strategies that ask."""

    name = "warm-up"
    promise = "none"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        """See `Strategy.wanted`."""
        return config.exchange != "exact" or config.stages_or_patches

    def prepare(self, pipe: Any) -> None:
        """See `Strategy.prepare`: the noise levels are those of the pipeline's scheduler."""
        config, mesh = self.context.config, self.context.mesh
        monitor = DriftMonitor(mesh.world.all_reduce, mesh.device)
        policy = parse(config.warmup)

        def noise() -> tuple[float, ...] | None:
            return noise_levels(getattr(self.pipe, "scheduler", None))

        if config.stages_or_patches:
            self._source: Steps | StepControl = Steps(policy, config.patches or config.pipe, monitor, mesh.world, noise)
        else:
            self._source = StepControl(policy, mesh.sequence.size, monitor, noise)
        self.context.add(self._source)
        self.pipe = pipe

    def apply(self, undo: ExitStack) -> None:
        """See `Strategy.apply`."""
        if isinstance(self._source, StepControl):
            for model in self.context.models:
                undo.callback(watch_calls(model.model, self._source))

    def begin_request(self, request: Request) -> None:
        """See `Strategy.begin_request`."""
        self.pipe = request.pipe
        self._source.begin_request(request.steps)

    def end_request(self, failed: bool) -> None:
        """See `Strategy.end_request`."""
        if isinstance(self._source, Steps):
            self._source.end_request(failed)
        elif not failed:
            self._source.end_request()

    def outside_request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `Strategy.outside_request`."""
        raise InputError(
            "a transformer with stale keys and values was called outside of a request, and cannot know where one "
            "begins; call ditmesh.parallelize() on the pipeline that calls it, too (they share the ranks), or "
            "ditmesh.engine_of(...).begin_request() before its first step"
        )
