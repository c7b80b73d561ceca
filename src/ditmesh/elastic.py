"""A job that outlives its ranks: when some are lost, those that are left go on from the step that was reached.

Which failures are worth it: a rank that is gone through no error of the job (its process was killed or has ended, its
GPU has failed, it has fallen silent). A rank that raised would raise again: bad input, a bug, memory that the job
itself has used up. Every restart has fewer ranks than the one before and must have got further than it, so there is an
end to them.

Bits stay the same only where they do not depend on the number of ranks: reproducible mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from . import journal
from .config import ParallelConfig
from .drawing import Drawn, Job, Kept, Loaded, Restart, Stepped, draw
from .errors import ConfigError, RankFailed
from .launch import guarded_folder, launcher


def check_elastic(config: ParallelConfig, devices: int) -> None:
    """Refuse a configuration that cannot go on with fewer ranks and draw the same pictures.

    Raises:
        ConfigError: naming the setting and the way out.
    """
    if not config.reproducible:
        raise ConfigError(
            "--elastic goes on with fewer devices, and only reproducible mode draws the same picture on them; "
            "add --reproducible (or 'reproducible: true' to the configuration file)"
        )
    if config.stages_or_patches:
        raise ConfigError(
            f"--elastic keeps what the transformer returned, not the keys and values that pipe={config.pipe}, "
            f"patches={config.patches} carry from step to step; use ring or ulysses instead"
        )
    if devices == 1:
        raise ConfigError("--elastic with 1 device has nothing to go on with; use --devices 2 or more")


def smaller(config: ParallelConfig, survivors: Sequence[int]) -> ParallelConfig:
    """The configuration for some of a configuration's ranks that comes closest to it.

    It is for as many of the survivors as can be used. Among those for equally many, the pictures' axis (data) shrinks
    first, then the branches' (cfg), then the stages' (pipe), then the tokens' (ring and ulysses together, which grow
    only where that uses more ranks). Everything that decides the bits stays: tiles, patches, the tensor degree.

    Args:
        config: the configuration for all ranks.
        survivors: ranks that are left, in the order in which they become ranks 0, 1, … of the new configuration; the
            last ones may stay without work.

    Returns:
        A configuration for ``world_size <= len(survivors)`` ranks. ``weights`` are those of the survivors; sequence
        ranks that several of them share have the slowest one's. Those of stages are not kept.

    Raises:
        ConfigError: not even the smallest fits: nobody is left, or fewer than share the weights (tensor).
    """
    left = len(survivors)
    if left < config.tensor:
        raise ConfigError(
            f"tensor={config.tensor} needs {config.tensor} ranks, and {left} {'is' if left == 1 else 'are'} left"
            if left
            else f"no rank of {config.describe()} is left"
        )
    tokens_limit = config.tiles if config.reproducible else left

    def closeness(degrees: tuple[int, int, int, int, int]) -> tuple[int, ...]:
        data, cfg, pipe, ring, ulysses = degrees
        sequence = ring * ulysses
        grown = max(0, sequence - config.sequence)
        return (data * cfg * pipe * sequence, -grown, sequence, ulysses, pipe, cfg, data)

    # A ring takes any number of ranks; Ulysses no more than the model has heads, of which the old degree is a proof.
    choices = product(
        range(1, config.data + 1),
        range(1, config.cfg + 1),
        range(1, config.pipe + 1),
        range(1, max(left, config.ring) + 1),
        range(1, config.ulysses + 1),
    )
    fitting = [
        degrees
        for degrees in choices
        if degrees[0] * degrees[1] * degrees[2] * degrees[3] * degrees[4] * config.tensor <= left
        and degrees[3] * degrees[4] <= tokens_limit
    ]
    data, cfg, pipe, ring, ulysses = max(fitting, key=closeness)
    changed: dict[str, Any] = {"data": data, "cfg": cfg, "pipe": pipe, "ring": ring, "ulysses": ulysses}
    if config.pipe > 1 and config.patches is None:
        # As many patches as there were stages.
        changed["patches"] = config.pipe
    if pipe != config.pipe and isinstance(config.stages, tuple):
        # Other stages: how their blocks are cut is decided anew.
        changed["stages"] = "estimated"
    if config.pipe > 1 and (pipe == 1 or isinstance(config.weights, tuple)):
        # Those of stages that are no more.
        changed["weights"] = None
    elif isinstance(config.weights, tuple):
        changed["weights"] = _weights(config, config.weights, survivors, ring * ulysses, pipe * cfg * data)
    return ParallelConfig(**{**config.model_dump(), **changed})


def _weights(
    config: ParallelConfig, weights: tuple[float, ...], survivors: Sequence[int], sequence: int, replicas: int
) -> tuple[float, ...] | None:
    """Weights of the new sequence ranks, from those of the ranks that take their places."""
    if sequence == 1:
        return None
    speeds = [weights[rank // config.tensor % config.sequence] for rank in survivors]
    shared = config.tensor
    return tuple(
        min(
            speeds[(replica * sequence + place) * shared + part]
            for replica in range(replicas)
            for part in range(shared)
        )
        for place in range(sequence)
    )


@dataclass(frozen=True)
class Restarted:
    """Reported when ranks were lost and the job goes on: what failed, and from where on what it goes on."""

    failure: str
    restart: Restart
    steps: int
    config: ParallelConfig

    def __str__(self) -> str:
        after, request, step = self.restart.after, self.restart.request, self.restart.step
        return (
            f"{self.failure}; going on from step {step}{f' of {self.steps}' if self.steps else ''} of prompt "
            f"{request + 1} on {after} {'device' if after == 1 else 'devices'}"
        )


def draw_elastically(
    job: Job,
    world_size: int,
    device: Literal["cpu", "cuda"],
    threads: int,
    report: Callable[[Any], None],
    draw: Callable[..., Any] = draw,
) -> tuple[list[Restart], float]:
    """Draw on ranks started here; when some are lost, go on with those that are left.

    Args:
        job: what to draw; its ``config`` is for ``world_size`` ranks.
        world_size: number of ranks to begin with.
        device: what they run on.
        threads: threads of each, before and after a restart: arithmetic depends on them.
        report: takes what rank 0 reports (`drawing.Loaded`, `Stepped`, `Drawn`), each step and picture once, and
            `Restarted`.
        draw: what the ranks run, called as `drawing.draw` is.

    Returns:
        The restarts, and the seconds from the first picture's beginning to the last one's end, with what the restarts
        took.

    Raises:
        RankFailed: a rank failed of the job itself, or the restarts came to an end.
        ConfigError: no configuration fits the ranks that are left.
    """
    if isinstance(job.config, str):
        raise ConfigError("a job that is to go on with fewer ranks needs a configuration, not 'auto'")
    config = job.config
    progress = _Progress(job, report)
    restarts: list[Restart] = []
    gpus = list(range(world_size))
    reached = (-1, -1)
    with guarded_folder("ditmesh-journal-") as folder:
        while True:
            ranks = len(gpus)
            progress.begin()
            try:
                with launcher(None, ranks, device, threads, job.timeout, gpus=gpus) as pool:
                    kept = Kept(folder, frozenset(progress.drawn), tuple(restarts))
                    pool.run(draw, job, kept, on_message=lambda _, message: progress.hear(message))
                break
            except RankFailed as failure:
                if progress.finished:
                    # Whoever was lost after that had nothing left to do.
                    break
                survivors = [rank for rank in range(ranks) if rank not in failure.lost]
                entries = journal.keep_longest(folder, progress.request)
                # A job that kills its ranks would do so for ever: at the same place.
                before, reached = reached, (len(progress.drawn), len(entries))
                if not failure.lost or not survivors or reached <= before:
                    raise
                try:
                    config = smaller(config, survivors)
                except ConfigError:
                    raise failure from None
                step = max(progress.steps, journal.steps(entries))
                restarts.append(Restart(progress.request, step, ranks, config.world_size))
                what = str(failure).split("\n", 1)[0]
                report(Restarted(what, restarts[-1], progress.steps_of_each, config))
                gpus = [gpus[rank] for rank in survivors][: config.world_size]
                job = replace(job, config=config)
    return restarts, progress.seconds


class _Progress:
    """What has been heard of a job, over all its restarts; passes on every step and picture once."""

    def __init__(self, job: Job, report: Callable[[Any], None]) -> None:
        self.drawn: set[int] = set()
        # Steps of the request that is being drawn.
        self.steps = 0
        self.steps_of_each = 0
        self._job, self._report = job, report
        self._again = 0
        self._started: float | None = None
        self._ended = 0.0

    @property
    def finished(self) -> bool:
        return len(self.drawn) == self._job.total

    @property
    def request(self) -> int:
        """The first one with pictures that are not on disk."""
        missing = (index for index in range(self._job.total) if index not in self.drawn)
        return next(missing, 0) // self._job.images

    @property
    def seconds(self) -> float:
        return self._ended - (self._started or self._ended)

    def begin(self) -> None:
        """Ranks start, and go through the steps of the request once more."""
        self._again = self.steps

    def hear(self, message: Any) -> None:
        """Take what rank 0 reports."""
        if isinstance(message, Loaded):
            self._started = self._started or time.perf_counter()
            self.steps_of_each = message.steps
        elif isinstance(message, Stepped):
            again = min(self._again, message.steps)
            self._again -= again
            self.steps += message.steps - again
            message = replace(message, steps=message.steps - again)
            if message.steps == 0:
                return
        elif isinstance(message, Drawn):
            self._ended = time.perf_counter()
            request = self.request
            self.drawn.add(message.receipt.index)
            if self.request != request or self.finished:
                self.steps = self._again = 0
        self._report(message)
