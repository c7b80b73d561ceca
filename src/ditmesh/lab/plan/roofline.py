"""The seconds of a step and of a request under a configuration: a roofline over the work of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...comm.grid import LINKS
from ...config import ParallelConfig
from ...memory.sizes import Workload
from ...staleness.policy import Outlook, parse
from .hardware import Hardware
from .step import KINDS, Steps, StepWork, steps_of

LAUNCHES = "kernel launches"


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a configuration.

    Attributes:
        synchronous: seconds of a synchronous step, by what takes them.
        steady: the same of a step in the steady state.
        exact_steps: how many steps are synchronous.
        once: seconds of a request besides its steps.
        sent: bytes that a rank sends in a steady step.
    """

    config: ParallelConfig
    workload: Workload
    synchronous: Mapping[str, float]
    steady: Mapping[str, float]
    exact_steps: int
    once: float = 0.0
    sent: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of a step after the warm-up."""
        return sum(self.steady.values())

    @property
    def first_step(self) -> float:
        """Seconds of a synchronous step."""
        return sum(self.synchronous.values())

    @property
    def latency(self) -> float:
        """Seconds of all denoising steps of a request."""
        late = self.workload.steps - self.exact_steps
        return self.exact_steps * self.first_step + late * self.step + (self.once if late else 0.0)

    def reason(self) -> str:
        """What takes most of a step, and how long ranks wait in it, in words."""
        computed = {name: seconds for name, seconds in self.steady.items() if not name.startswith("waits")}
        waits = {name: seconds for name, seconds in self.steady.items() if name.startswith("waits") and seconds > 0}
        most = max(computed, key=lambda name: computed[name])
        sentence = f"{milliseconds(computed[most])} of {milliseconds(self.step)} a step are {most}"
        if waits:
            longest = max(waits, key=lambda name: waits[name])
            sentence += f", {milliseconds(sum(waits.values()))} {longest}"
        return sentence


def predict(
    transformer: str,
    settings: Mapping[str, Any],
    config: ParallelConfig,
    workload: Workload,
    hardware: Hardware,
    dtype: torch.dtype,
) -> Prediction:
    """Predict the seconds of a configuration.

    Args:
        transformer, settings: class and configuration of the transformer.
        config: for as many devices as the hardware has, or fewer.

    Raises:
        ConfigError: the transformer cannot run with the configuration.
        LayoutError: it cannot run without values.
    """
    if config.stages_or_patches:
        return _staged(transformer, settings, config, workload, hardware, dtype)
    steps = steps_of(transformer, settings, config, workload, dtype)
    stale = config.stale_exchange
    exact = synchronous_steps(config, workload.steps) if stale else workload.steps
    return Prediction(
        config,
        workload,
        seconds(steps.synchronous, config, hardware),
        seconds(steps.steady, config, hardware, stale=stale),
        exact,
        sent=sum(steps.steady.sent.values()),
    )


def seconds(
    work: StepWork, config: ParallelConfig, hardware: Hardware, stale: bool = False, pieces: int = 1
) -> dict[str, float]:
    """Seconds of a step by what takes them: kinds of operations, launches, and waits by link.

    Args:
        stale: whether keys of the step before are used, so that messages of the ring travel beside the whole step.
        pieces: times that a block runs, each on a part of the tokens.
    """
    device = hardware.device
    speeds = {"matrix products": device.matmul, "attention": device.attention, "elementwise": device.matmul}
    terms: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for (kind, flops, size), count in work.operations.items():
        terms[kind] += count * max(flops / speeds[kind], size / device.bandwidth)
    busy, launches = sum(terms.values()), pieces * device.launch * sum(work.operations.values())
    # A host is as fast as its launches and a GPU as all else: the slower one says how long a step takes.
    terms[LAUNCHES] = max(0.0, launches - busy) if device.ahead else launches
    travelling = 0.0 if config.exchange == "gather" else terms["attention"]
    hidden = {"ring": busy if stale else travelling, "shard": busy}
    for (name, collective), sent in work.sent.items():
        size = config.shard if name == "shard" else config.size_of(LINKS[name])
        if collective == "all_reduce":
            sent = sent * 2 * (size - 1) // size
        time = hardware.transfer(collective, pieces * work.messages[name, collective], sent, size)
        beside = min(hardware.link.hidden * time, hidden.get(name, 0.0))
        terms[f"waits for {name}"] = terms.get(f"waits for {name}", 0.0) + time - beside
    return terms


def _staged(
    transformer: str,
    settings: Mapping[str, Any],
    config: ParallelConfig,
    workload: Workload,
    hardware: Hardware,
    dtype: torch.dtype,
) -> Prediction:
    """PipeFusion: a stage has its part of the blocks; patches go to the next one while the stage computes.

    In a synchronous step the stages run one after the other. With fewer patches than stages, a stage waits for the
    first one of the next step; a request begins with ``(stages - 1) / patches`` of a stage's step.
    """
    unstaged = config.model_copy(update={"pipe": 1, "patches": None, "stages": "estimated"})
    steps: Steps = steps_of(transformer, settings, unstaged, workload, dtype)
    patches = config.patches or config.pipe
    synchronous = seconds(steps.synchronous, unstaged, hardware)
    found = seconds(steps.steady, unstaged, hardware, pieces=patches)
    steady = {name: each / config.pipe for name, each in found.items()}
    stage = sum(steady.values())
    steady["waits for the next step's patch"] = max(0.0, config.pipe / patches - 1) * stage
    return Prediction(
        config,
        workload,
        synchronous,
        steady,
        synchronous_steps(config, workload.steps),
        stage * (config.pipe - 1) / patches,
        sum(steps.steady.sent.values()) / config.pipe,
    )


def synchronous_steps(config: ParallelConfig, steps: int) -> int:
    """The number of synchronous steps that a policy gives a request; all steps if it decides by drift."""
    policy = parse(config.warmup)
    if policy.reads_drift:
        return steps
    levels = tuple(1 - at / steps for at in range(steps + 1))
    outlook = Outlook(config.patches or max(config.sequence, config.pipe), levels)
    return min(steps, sum(policy.decide(step, outlook, ()).synchronous for step in range(steps)))


def milliseconds(value: float) -> str:
    """Such as ``31.6 ms``."""
    return f"{number(value)} s" if value >= 1 else f"{number(value * 1e3)} ms"


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
