"""The predicted cost of a configuration: seconds of a step and a request, bytes of a rank, term by term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..config import ParallelConfig
from ..recipe import RECIPE, Recipe, keeps_between_steps, wanted
from ..staleness.policy import Outlook, parse
from .costs.hardware import Hardware
from .costs.step import Share, StepForecast, Term, launched_ahead
from .costs.work import Work, Workload

# The memory of the rank that needs most under a configuration, by a walk; None: the model cannot run without values.
MemoryOf = Callable[[ParallelConfig], Sequence[Term] | None]


@dataclass(frozen=True)
class Prediction:
    """A configuration's prediction.

    Attributes:
        synchronous: terms of an exact step.
        stale: terms of one that reuses keys; as ``synchronous`` where none does.
        exact_steps: how many steps are synchronous.
        weights: bytes of the transformer's weights on the rank with most of them.
        keys: bytes of keys that patches of pipeline stages keep from step to step.
        memory_of: what says the memory, when it is asked for; None: the weights are all that is known.
    """

    config: ParallelConfig
    workload: Workload
    synchronous: tuple[Term, ...]
    stale: tuple[Term, ...]
    exact_steps: int
    weights: float
    keys: float
    memory_of: MemoryOf | None = field(default=None, repr=False, compare=False)

    @property
    def step(self) -> float:
        """Seconds of a step after the warm-up."""
        return _seconds(self.stale)

    @property
    def first_step(self) -> float:
        """Seconds of a synchronous step."""
        return _seconds(self.synchronous)

    @cached_property
    def latency(self) -> float:
        """Seconds of all denoising steps of a request."""
        late = self.workload.steps - self.exact_steps
        once = sum(term.seconds for term in self.stale if term.kind == "request") if late else 0.0
        return self.exact_steps * self.first_step + late * self.step + once

    @cached_property
    def kept(self) -> Sequence[Term]:
        """The memory of the rank that needs most: a walk, which takes a second where none was made before.

        Where a walk is impossible, the transformer's weights, by a name that says so.
        """
        found = self.memory_of and self.memory_of(self.config)
        return found or [Term("weights of the transformer alone", "memory", memory=self.weights)]

    @property
    def memory_is_known(self) -> bool:
        """True if `kept` is known already."""
        return "kept" in vars(self)

    @property
    def memory(self) -> float:
        """Bytes of the rank that needs most."""
        return sum(term.memory for term in self.kept)

    @property
    def waiting(self) -> float:
        """Seconds of a step in which nothing is computed."""
        return sum(term.seconds for term in self.stale if term.kind in ("transfer", "idle"))

    def throughput(self, devices: int) -> float:
        """Images per hour of so many devices, which run as many of these side by side as they can."""
        return 3600 * self.workload.pictures * (devices // self.config.world_size) / self.latency

    @property
    def device_seconds(self) -> float:
        """Device-seconds per image."""
        return self.latency * self.config.world_size / self.workload.pictures


def _seconds(terms: Sequence[Term]) -> float:
    return sum(term.seconds for term in terms if term.kind != "request")


def predict(
    config: ParallelConfig,
    work: Work,
    workload: Workload,
    hardware: Hardware,
    recipe: Recipe = RECIPE,
    memory_of: MemoryOf | None = None,
) -> Prediction:
    """Predict the cost of a configuration.

    Args:
        config: a valid configuration for the model.
        recipe: its strategies name their shares and exchanges.
        memory_of: as of `Prediction`.
    """
    strategies = wanted(recipe, config)
    late = bool(keeps_between_steps(recipe, config))
    exact = synchronous_steps(config, workload.steps) if late else workload.steps
    steps, terms = [], []
    for stale in (False, True) if late else (False,):
        blocks = tuple(block.count for block in work.blocks)
        rows, calls = workload.calls(workload.pictures, workload.branches)
        share = Share(rows=rows, calls=calls, blocks=blocks)
        for strategy in strategies:
            share = strategy.share(config, work, workload, share, stale)
        step = StepForecast(config, work, workload, hardware, share, stale)
        steps.append(step)
        terms.append([*step.compute(), *(term for strategy in strategies for term in strategy.terms(step))])
    # A stage holds its own blocks only, in every step.
    weights, keys = steps[-1].weights, sum(term.memory for term in terms[-1] if term.kind == "memory")
    timed = [_merged([term for term in some if term.kind != "memory"]) for some in terms]
    if hardware.device.ahead:
        # The queue is long enough for what ranks wait for, too.
        timed = [_merged(launched_ahead(some)) for some in timed]
    exact = min(exact, workload.steps)
    return Prediction(config, workload, timed[0], timed[-1], exact, weights, keys, memory_of)


def synchronous_steps(config: ParallelConfig, steps: int) -> int:
    """The number of synchronous steps that a policy gives a request; all steps if it decides by drift."""
    policy = parse(config.warmup)
    if getattr(policy, "reads_drift", True):
        return steps
    levels = tuple(1 - at / steps for at in range(steps + 1))
    outlook = Outlook(config.patches or max(config.sequence, config.pipe), levels)
    return sum(policy.decide(step, outlook, ()).synchronous for step in range(steps))


def _merged(terms: Sequence[Term]) -> tuple[Term, ...]:
    found: dict[tuple[str, str, str], Term] = {}
    for term in terms:
        key = (term.name, term.kind, term.through)
        one = found.get(key)
        found[key] = (
            term
            if one is None
            else replace(
                one,
                seconds=one.seconds + term.seconds,
                hidden=one.hidden + term.hidden,
                meetings=one.meetings + term.meetings,
                sent=one.sent + term.sent,
                memory=one.memory + term.memory,
            )
        )
    return tuple(sorted(found.values(), key=lambda term: (-term.seconds, -term.memory)))
