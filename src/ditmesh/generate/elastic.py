"""Elastic jobs: when ranks are lost, the remaining ranks continue from the last step.

Which failures are worth it: a rank that is gone through no error of the job (its process was killed or has ended, its
GPU has failed, it has fallen silent). A rank that raised would raise again: bad input, a bug, memory that the job
itself has used up. Every restart has fewer ranks than the one before and must have got further than it, so there is an
end to them.

Bits stay the same only where they do not depend on the number of ranks: reproducible mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..config import ParallelConfig
from ..errors import ConfigError, RankFailed
from ..forecast.candidates import resized
from ..launch import guarded_folder, launcher
from . import journal
from .job import Generated, Kept, Loaded, PictureJob, Restart, StepDone
from .run import generate


def check_elastic(config: ParallelConfig, devices: int) -> None:
    """Reject a configuration that cannot continue with fewer ranks and the same images.

    Raises:
        ConfigError: naming the setting and the way out.
    """
    # Strategies need torch, for which a mistake on the command line is not to wait.
    from ..recipe import RECIPE, keeps_between_steps

    if not config.reproducible:
        raise ConfigError(
            "--elastic continues with fewer devices, and only reproducible mode generates the same image on them; "
            "add --reproducible (or 'reproducible: true' to the configuration file)"
        )
    if kept := keeps_between_steps(RECIPE, config):
        raise ConfigError(
            f"--elastic keeps the transformer's results and nothing else, but {kept}; use ring or ulysses instead"
        )
    if devices == 1:
        raise ConfigError("--elastic with 1 device has no other device to continue on; use --devices 2 or more")


@dataclass(frozen=True)
class Restarted:
    """Report of a restart: the failure, the step, and the remaining ranks."""

    failure: str
    restart: Restart
    prompt: int
    steps: int
    config: ParallelConfig

    def __str__(self) -> str:
        after, step = self.restart.after, self.restart.step
        return (
            f"{self.failure}; going on from step {step}{f' of {self.steps}' if self.steps else ''} of prompt "
            f"{self.prompt + 1} on {after} {'device' if after == 1 else 'devices'}"
        )


def generate_elastically(
    job: PictureJob,
    world_size: int,
    device: Literal["cpu", "cuda"],
    threads: int,
    report: Callable[[Any], None],
    generate: Callable[..., Any] = generate,
    launcher_name: str | None = None,
) -> tuple[list[Restart], float]:
    """Generate on ranks started here; when some are lost, continue on the remaining ranks.

    Args:
        job: what to generate; its ``config`` is for ``world_size`` ranks.
        world_size: number of ranks to begin with.
        threads: threads of each, before and after a restart: arithmetic depends on them.
        report: takes what rank 0 reports (`job.Loaded`, `StepDone`, `Generated`), each step and image once, and
            `Restarted`.
        generate: the function that the ranks run, called as `run.generate` is.
        launcher_name: see `launch.launcher`. On several hosts the folder of temporary files has to be one for all.

    Returns:
        The restarts, and the seconds from the first image's beginning to the last one's end, with what the restarts
        took.

    Raises:
        RankFailed: a rank failed of the job itself, or the restarts came to an end.
        ConfigError: no configuration fits the ranks that are left.
    """
    if isinstance(job.config, str):
        raise ConfigError("a job that may continue with fewer ranks needs a configuration, not 'auto'")
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
                with launcher(launcher_name, ranks, device, threads, job.timeout, gpus=gpus) as pool:
                    kept = Kept(folder, frozenset(progress.done), tuple(restarts))
                    pool.run(generate, job, kept, on_message=lambda _, message: progress.hear(message))
                break
            except RankFailed as failure:
                if progress.finished:
                    # Ranks that are lost after that had finished.
                    break
                survivors = [rank for rank in range(ranks) if rank not in failure.lost]
                entries = journal.keep_longest(folder, progress.request)
                # A job that kills its ranks would do so again at the same step.
                before, reached = reached, (len(progress.done), len(entries))
                if not failure.lost or not survivors or reached <= before:
                    raise
                try:
                    config = resized(config, len(survivors), lost=failure.lost)
                except ConfigError:
                    raise failure from None
                step = max(progress.steps, journal.steps(entries))
                restarts.append(Restart(progress.request, step, ranks, config.world_size))
                what = str(failure).split("\n", 1)[0]
                prompt = job.call(progress.request).prompt
                report(Restarted(what, restarts[-1], prompt, progress.steps_of_each, config))
                gpus = [gpus[rank] for rank in survivors][: config.world_size]
                job = job.changed(config=config)
    return restarts, progress.seconds


class _Progress:
    """The reports of a job over all its restarts; passes on every step and image once."""

    def __init__(self, job: PictureJob, report: Callable[[Any], None]) -> None:
        self.done: set[int] = set()
        # Steps of the request that is being generated.
        self.steps = 0
        self.steps_of_each = 0
        self._job, self._report = job, report
        self._again = 0
        self._first = 0
        self._started: float | None = None
        self._ended = 0.0

    @property
    def finished(self) -> bool:
        return len(self.done) == self._job.total

    @property
    def request(self) -> int:
        """The first call of the pipeline with images that are not on disk."""
        while self._first in self.done:
            self._first += 1
        return self._job.call_of(self._first) if self._first < self._job.total else 0

    @property
    def seconds(self) -> float:
        return self._ended - (self._started or self._ended)

    def begin(self) -> None:
        """Note the steps that restarted ranks will repeat."""
        self._again = self.steps

    def hear(self, message: Any) -> None:
        """Take what rank 0 reports."""
        if isinstance(message, Loaded):
            self._started = self._started or time.perf_counter()
            self.steps_of_each = message.steps
        elif isinstance(message, StepDone):
            again = min(self._again, message.steps)
            self._again -= again
            self.steps += message.steps - again
            message = replace(message, steps=message.steps - again)
            if message.steps == 0:
                return
        elif isinstance(message, Generated):
            self._ended = time.perf_counter()
            request = self.request
            self.done.add(message.receipt.index)
            if self.request != request or self.finished:
                self.steps = self._again = 0
        self._report(message)
