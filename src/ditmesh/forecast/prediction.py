"""The predicted cost of a configuration: seconds of a step and a request, bytes of a rank, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..config import ParallelConfig
from ..recipe import RECIPE, Recipe, wanted
from ..staleness.policy import Outlook, parse
from ..strategies.stale.warmup import StaleSteps
from .costs.hardware import Hardware
from .costs.step import Share, StepForecast, Term, launched_ahead
from .costs.work import Work, Workload


@dataclass(frozen=True)
class Prediction:
    """A configuration's prediction.

    Attributes:
        config: the configuration.
        workload: what is asked for.
        synchronous: terms of an exact step.
        stale: terms of one that reuses keys; as ``synchronous`` where none does.
        exact_steps: how many steps are synchronous.
        kept: terms of memory.
    """

    config: ParallelConfig
    workload: Workload
    synchronous: tuple[Term, ...]
    stale: tuple[Term, ...]
    exact_steps: int
    kept: tuple[Term, ...]

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

    @property
    def memory(self) -> float:
        """Bytes of the rank that needs most."""
        return sum(term.memory for term in self.kept)

    @property
    def waiting(self) -> float:
        """Seconds of a step in which nothing is computed."""
        return sum(term.seconds for term in self.stale if term.kind in ("transfer", "idle"))

    def throughput(self, devices: int) -> float:
        """Pictures per hour of so many devices, which run as many of these side by side as they can."""
        return 3600 * self.workload.pictures * (devices // self.config.world_size) / self.latency

    @property
    def device_seconds(self) -> float:
        """Device-seconds per image."""
        return self.latency * self.config.world_size / self.workload.pictures


def _seconds(terms: Sequence[Term]) -> float:
    return sum(term.seconds for term in terms if term.kind != "request")


def predict(
    config: ParallelConfig, work: Work, workload: Workload, hardware: Hardware, recipe: Recipe = RECIPE
) -> Prediction:
    """Predict the cost of a configuration.

    Args:
        config: a valid configuration for the model.
        work: of the transformer.
        workload: what is asked for.
        hardware: devices and links.
        recipe: its strategies say what they share out and exchange.
    """
    strategies = wanted(recipe, config)
    late = StaleSteps in strategies
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
    memory = [*_memory_estimate(steps[-1]), *(term for term in terms[-1] if term.kind == "memory")]
    timed = [_merged([term for term in some if term.kind != "memory"]) for some in terms]
    if hardware.device.ahead:
        # The queue is long enough for what ranks wait for, too.
        timed = [_merged(launched_ahead(some)) for some in timed]
    return Prediction(config, workload, timed[0], timed[-1], min(exact, workload.steps), _merged(memory))


def _memory_estimate(step: StepForecast) -> list[Term]:
    """Of what a rank holds beside what strategies keep, linear in the tokens: it takes no class of a model.

    `ditmesh.forecast.memory` says what a rank really needs, and takes seconds a configuration; a search asks it of the
    best configurations of which this estimate is near the limit.
    """
    workload, share, work = step.workload, step.share, step.work
    weights = float(work.rest.parameters + work.buffers)
    for block, count in step.kinds():
        weights += count * (block.parameters - block.sliced + block.sliced / share.tensor)
    image, text = workload.image / share.image / share.pieces, workload.text / share.text
    peak = share.rows * max((block.peak.of(image, text) for block in work.blocks), default=0.0)
    # What surrounds the blocks sees all tokens.
    around = share.rows * work.rest.peak.of(workload.image, workload.text)
    activations = max(peak, around) * workload.element
    # In bands every rank has its rows alone (those of neighbours left out, which are few).
    bands = 1 if step.config.vae == "whole" or step.config.reproducible else step.config.world_size
    return [
        Term("weights", "memory", memory=weights * workload.element, holds="weights"),
        Term("text encoders and VAE", "memory", memory=workload.beside),
        Term("activations", "memory", memory=max(activations, workload.decode / bands)),
        Term("process", "memory", memory=step.hardware.device.runtime),
    ]


def synchronous_steps(config: ParallelConfig, steps: int) -> int:
    """How many steps of a request a stale strategy's policy makes synchronous; all of them if it goes by drift."""
    policy = parse(config.warmup)
    if getattr(policy, "reads_drift", True):
        return steps
    levels = tuple(1 - at / steps for at in range(steps + 1))
    outlook = Outlook(config.patches or max(config.sequence, config.pipe), levels)
    return sum(policy.decide(step, outlook, ()).synchronous for step in range(steps))


def _merged(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Terms of one name and link added up, the longest first."""
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
