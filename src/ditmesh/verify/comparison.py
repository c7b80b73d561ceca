"""Comparison with one device: all runs in order, and their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..config import ParallelConfig
from ..generate.job import PictureJob
from ..quality import perceptual
from .ranks import JoinedRanks, StartedRanks
from .runs import RankRun, RunTask, config_name, reference_config
from .verdicts import Verdict, judge


class Comparison:
    """The runs of configurations and of their one-device references.

    Args:
        job, configs: the request, and the configurations.
        progress: takes the present action, and how many runs have begun.

    Attributes:
        alone: runs of one device, by name.
    """

    def __init__(
        self,
        job: PictureJob,
        configs: Sequence[ParallelConfig],
        ranks: StartedRanks | JoinedRanks,
        progress: Callable[[str, int], None],
    ) -> None:
        self._job, self._configs, self._ranks, self._progress = job, configs, ranks, progress
        self._references = list(dict.fromkeys(reference_config(config) for config in configs))
        self._runs: dict[str, list[RankRun]] = {}
        self.alone: dict[str, RankRun] = {}

    @property
    def runs(self) -> int:
        """The number of runs to make."""
        return len(self._references) + len(self._configs)

    def run(self) -> None:
        """Make all runs. A collective call of the ranks that torchrun has started."""
        references = self._run(1, [RunTask(reference) for reference in self._references])
        for reference, (run,) in zip(self._references, references, strict=True):
            self.alone[config_name(reference)] = run
        for devices in sorted({config.world_size for config in self._configs}):
            # A request that fails on one device is not run on several.
            able = [
                config
                for config in self._configs
                if config.world_size == devices and not self._reference(config).refused
            ]
            tasks = [RunTask(config, self._reference(config).steps) for config in able]
            for config, of_ranks in zip(able, self._run(devices, tasks) if able else [], strict=True):
                self._runs[config_name(config)] = of_ranks

    def _run(self, devices: int, tasks: Sequence[RunTask]) -> list[list[RankRun]]:
        """For each task the runs of its ranks."""
        self._progress(f"starting {devices} rank{'s' if devices > 1 else ''}", 0)

        def begin(rank: int, began: Any) -> None:
            self._progress(began.what, 1)

        ranks = self._ranks.run(devices, self._job, tasks, begin)
        return [list(of_ranks) for of_ranks in zip(*ranks, strict=True)]

    def _reference(self, config: ParallelConfig) -> RankRun:
        return self.alone[config_name(reference_config(config))]

    def verdicts(self, tolerance: float | None) -> list[Verdict]:
        """The verdict on each configuration; see `judge`."""
        learned = perceptual.available()
        return [
            judge(
                self._job,
                config,
                self._runs.get(config_name(config), [self._reference(config)]),
                self._reference(config),
                tolerance,
                learned,
            )
            for config in self._configs
        ]
