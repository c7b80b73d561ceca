"""The ranks of verify: started for each number of ranks, or started by torchrun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..generate.job import PictureJob
from ..launch import TorchrunRanks, launcher
from .runs import RankRun, RunTask, run_tasks

OnBegan = Callable[[int, Any], None]


class StartedRanks:
    """Ranks of a launcher, which are started for a call and end with it.

    ``is_reporter``: whether this process has the results, and prints the verdicts.
    """

    is_reporter = True

    def __init__(self, name: str | None, kind: Literal["cpu", "cuda"], threads: int, timeout: float) -> None:
        self._name, self._kind, self.threads, self._timeout = name, kind, threads, timeout

    def run(self, devices: int, job: PictureJob, tasks: Sequence[RunTask], on_message: OnBegan) -> list[list[RankRun]]:
        """The runs of ``devices`` ranks, in rank order; see `runs.run_tasks`."""
        with launcher(self._name, devices, self._kind, self.threads, self._timeout) as pool:
            return pool.run(run_tasks, job, tasks, on_message=on_message)


class JoinedRanks:
    """The ranks that torchrun has started; rank 0 also runs the one-device reference while the others wait."""

    def __init__(self, ranks: TorchrunRanks) -> None:
        self._ranks, self.is_reporter, self.threads = ranks, ranks.is_reporter, ranks.threads

    def run(self, devices: int, job: PictureJob, tasks: Sequence[RunTask], on_message: OnBegan) -> list[list[RankRun]]:
        here = tasks if devices > 1 or self.is_reporter else ()
        return self._ranks.run(run_tasks, job, here, on_message=on_message)[:devices]
