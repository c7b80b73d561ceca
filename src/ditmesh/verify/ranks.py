"""The ranks of verify: started for each number of ranks, or started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch.distributed as dist

from ..comm.objects import broadcast_object, gather_objects
from ..errors import InputError
from ..generate.job import PictureJob
from ..launch import MessageSink, TorchrunRanks, guarded_folder, launcher
from .runs import RankRun, RunTask, run_tasks

OnBegan = Callable[[int, Any], None]


class VerifyRanks(Protocol):
    """Ranks that run tasks, on one device and on several.

    Attributes:
        is_reporter: whether this process has the results, and prints the verdicts.
        threads: of each rank.
    """

    is_reporter: bool
    threads: int

    def run(self, devices: int, job: PictureJob, tasks: Sequence[RunTask], on_message: OnBegan) -> list[list[RankRun]]:
        """For each task the runs of ``devices`` ranks, in rank order; see `runs.run_tasks`."""
        ...


class StartedRanks:
    """Ranks of a launcher, which are started for a call and end with it."""

    is_reporter = True

    def __init__(self, name: str | None, kind: Literal["cpu", "cuda"], threads: int, timeout: float) -> None:
        self._name, self._kind, self.threads, self._timeout = name, kind, threads, timeout

    def run(self, devices: int, job: PictureJob, tasks: Sequence[RunTask], on_message: OnBegan) -> list[list[RankRun]]:
        """See `VerifyRanks.run`."""
        with launcher(self._name, devices, self._kind, self.threads, self._timeout) as pool:
            every = pool.run(run_tasks, job, tasks, on_message=on_message)
        return [list(of_ranks) for of_ranks in zip(*every, strict=True)]


class JoinedRanks:
    """The ranks that torchrun has started; rank 0 also runs the one-device reference while the others wait."""

    def __init__(self, ranks: TorchrunRanks) -> None:
        self._ranks, self.is_reporter, self.threads = ranks, ranks.is_reporter, ranks.threads

    def run(self, devices: int, job: PictureJob, tasks: Sequence[RunTask], on_message: OnBegan) -> list[list[RankRun]]:
        """See `VerifyRanks.run`."""
        function = run_tasks if devices > 1 else _run_on_first
        every = self._ranks.run(function, job, tasks, on_message=on_message)
        return [list(of_ranks) for of_ranks in zip(*(every if devices > 1 else every[:1]), strict=True)]


def _run_on_first(job: PictureJob, tasks: Sequence[RunTask], *, report: MessageSink) -> list[RankRun]:
    return run_tasks(job, tasks, report=report) if dist.get_rank() == 0 else []


@contextmanager
def joined_folder(prefix: str, parent: str) -> Iterator[str]:
    """A temporary folder that the first rank of torchrun creates and removes. A collective call.

    Raises:
        InputError: a rank's host does not see it.
    """
    if dist.get_rank() == 0:
        with guarded_folder(prefix, parent) as folder:
            yield _agreed(folder, parent)
    else:
        yield _agreed(None, parent)


def _agreed(folder: str | None, parent: str) -> str:
    name: str = broadcast_object(folder)
    seen: list[bool] = gather_objects(os.path.isdir(name))
    if not all(seen):
        raise InputError(
            f"what one device computes is kept in {parent!r}, which rank {seen.index(False)} does not share with rank "
            "0; name a folder that all hosts share with --trace-dir"
        )
    return name
