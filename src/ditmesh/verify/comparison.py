"""Comparison with one device: all runs in order, and their verdicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ..config import ParallelConfig
from ..generate.job import PictureJob
from ..quality import perceptual
from .ranks import VerifyRanks
from .runs import MakeTimeline, RankRun, RunTask, budget_of, config_name, reference_config
from .verdicts import Verdict, judge


class Comparison:
    """The runs of configurations and of their one-device references.

    Args:
        job, configs: the request, and the configurations.
        folder: keeps what one device computes.
        timeline: records when ranks compute and wait; None: nothing does.
        said: takes the present action, and how many runs have begun.

    Attributes:
        alone: runs of one device, by name.
    """

    def __init__(
        self,
        job: PictureJob,
        configs: Sequence[ParallelConfig],
        ranks: VerifyRanks,
        folder: str,
        timeline: MakeTimeline | None,
        said: Callable[[str, int], None],
    ) -> None:
        self._job, self._configs, self._ranks = job, configs, ranks
        self._folder, self._timeline, self._said = folder, timeline, said
        references = dict.fromkeys(reference_config(config) for config in configs)
        self._traces = {reference: f"{folder}/trace-{number}" for number, reference in enumerate(references)}
        self._runs: dict[str, list[RankRun]] = {}
        self.alone: dict[str, RankRun] = {}

    @property
    def runs(self) -> int:
        """The number of runs to make."""
        return len(self._traces) + len(self._configs)

    def run(self, trace_bytes: float) -> None:
        """Make all runs; traces take about so many bytes. A collective call of the ranks that torchrun has started."""
        budget = 0.0
        if self._ranks.is_reporter:
            budget = budget_of(self._folder, len(self._traces), trace_bytes)
            for trace in self._traces.values():
                os.mkdir(trace)
        tasks = [RunTask(reference, trace, True, budget, self._timeline) for reference, trace in self._traces.items()]
        for reference, (done,) in zip(self._traces, self._run(1, tasks), strict=True):
            self.alone[config_name(reference)] = done
        for devices in sorted({config.world_size for config in self._configs}):
            # A request that fails on one device is not run on several.
            able = [
                config
                for config in self._configs
                if config.world_size == devices and not self._reference(config).refused
            ]
            tasks = [
                RunTask(config, self._traces[reference_config(config)], timeline=self._timeline) for config in able
            ]
            for config, of_ranks in zip(able, self._run(devices, tasks) if able else [], strict=True):
                self._runs[config_name(config)] = of_ranks

    def _run(self, devices: int, tasks: Sequence[RunTask]) -> list[list[RankRun]]:
        self._said(f"starting {devices} rank{'s' if devices > 1 else ''}", 0)

        def begin(rank: int, began: Any) -> None:
            self._said(began.what, 1)

        return self._ranks.run(devices, self._job, tasks, begin)

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
                self._traces[reference_config(config)],
                tolerance,
                learned,
            )
            for config in self._configs
        ]

    def timelines(self) -> dict[str, list[Any]]:
        """The recorded timelines of all ranks, by name of the configuration."""
        runs = {name: [run] for name, run in self.alone.items()} | self._runs
        timelines = {name: [run.timeline for run in of_ranks if run.timeline] for name, of_ranks in runs.items()}
        return {name: of_ranks for name, of_ranks in timelines.items() if of_ranks}

    def rank_0(self) -> dict[str, RankRun]:
        """Rank 0's run of each configuration."""
        return {name: of_ranks[0] for name, of_ranks in self._runs.items()}
