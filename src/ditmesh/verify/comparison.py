"""Comparison with one device: all runs in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..config import ParallelConfig
from ..generate.job import PictureJob
from ..launch import Launcher
from .runs import RankRun, RunTask, reference_config, run_tasks

# Runs of all ranks, by configuration; None: plain diffusers.
Runs = dict[ParallelConfig | None, list[RankRun]]


@dataclass(frozen=True)
class VerifyRanks:
    """The ranks of verify: ``start`` gives those for a number of devices, or all that torchrun has started.

    ``is_reporter``: whether this process has the results, and prints the verdicts.
    """

    start: Callable[[int], AbstractContextManager[Launcher]]
    threads: int
    is_reporter: bool = True

    def run(
        self, devices: int, job: PictureJob, tasks: Sequence[RunTask], on_message: Callable[[int, Any], None]
    ) -> list[list[RankRun]]:
        """The runs of ``devices`` ranks, in rank order; see `runs.run_tasks`."""
        # Of torchrun's ranks the first also runs the one device, while the others wait.
        here = tasks if devices > 1 or self.is_reporter else ()
        with self.start(devices) as ranks:
            return ranks.run(run_tasks, job, here, on_message=on_message)[:devices]


def compared_runs(
    job: PictureJob,
    configs: Sequence[ParallelConfig],
    ranks: VerifyRanks,
    progress: Callable[[str, int, int], None],
) -> Runs:
    """The runs of configurations and, first, of their one-device references. Every rank of torchrun calls this.

    A request that fails on one device is not run on several: the reference's runs stand for it. ``progress``: takes the
    present action, how many runs have begun, and how many there will be.
    """
    references = list(dict.fromkeys(map(reference_config, configs)))
    total = len(references) + len(configs)

    def run(devices: int, tasks: Sequence[RunTask]) -> list[list[RankRun]]:
        """For each task the runs of its ranks."""
        progress(f"starting {devices} rank{'s' if devices > 1 else ''}", 0, total)

        def begin(rank: int, began: Any) -> None:
            progress(began, 1, total)

        by_rank = ranks.run(devices, job, tasks, begin)
        return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]

    runs: Runs = dict(zip(references, run(1, [RunTask(reference) for reference in references]), strict=True))
    alone = {config: runs[reference_config(config)][0] for config in configs}
    for devices in sorted({config.world_size for config in configs}):
        able = [config for config in configs if config.world_size == devices and not alone[config].refused]
        tasks = [RunTask(config, alone[config].steps) for config in able]
        runs |= zip(able, run(devices, tasks) if able else [], strict=True)
    return runs | {config: [alone[config]] for config in configs if alone[config].refused}
