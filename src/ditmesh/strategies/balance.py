"""Speeds of ranks and stages: given, or measured on a real block."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from ..comm import Link
from ..core.thread_clock import CoreShare, ThreadClock
from .loads import levelled_speeds

# The number of runs of a block that are timed, after one run that does not count.
RUNS = 3
# Share of a new measurement in the speeds when there is an older one.
FRESH = 0.5


class Balance:
    """Speeds of those that share the work, sequence ranks or stages; the same on all ranks.

    Args:
        setting: the configuration's ``speeds``: numbers, ``"auto"`` to measure, None for equal shares.
        link: the ranks that have to agree.
        shares: how many share the work; default: every rank of the link has a share of its own.
        share: this rank's, where several ranks have one together (a stage); the slowest of them counts.
        band: where the slowest is measured to take less than this share longer than the mean, all are equal.

    Attributes:
        speeds: relative ones, in the order of ranks or stages.
        wanted: whether the next call of the transformer is to measure; set it to measure again.
    """

    def __init__(
        self,
        setting: tuple[float, ...] | Literal["auto"] | None,
        link: Link,
        device: torch.device | str,
        shares: int | None = None,
        share: int | None = None,
        band: float = 0.0,
    ) -> None:
        self._band = band
        self._link, self._setting, self._device = link, setting, torch.device(device)
        self._shares = link.size if shares is None else shares
        self._share = link.rank if share is None else share
        self.forget()

    def forget(self) -> None:
        """Reset the measurements on all ranks: the next call measures again."""
        equal = (1.0,) * self._shares
        self.speeds: tuple[float, ...] = self._setting if isinstance(self._setting, tuple) else equal
        self._measured, self.wanted = False, self._setting == "auto"

    def measure(self, work: Callable[[], Any]) -> None:
        """Time ``work``, which is as much on every rank, and set the speeds. A collective call."""
        self.agree(*median_times(work, self._device))

    def agree(self, seconds: float, own: float | None = None) -> None:
        """Set the speeds from the time that every rank takes for the same work. A collective call.

        Args:
            seconds: by the clock.
            own: of these, those that other work on this machine did not take; default: all. They count where all ranks
                get the same turns on the same cores.

        The new speeds are mixed half and half with those measured before: a machine's hiccup does not throw
        all tokens about.
        """
        told = [self._share, 1 / seconds, 1 / (own or seconds), CoreShare().number()]
        mine = torch.tensor([told], dtype=torch.float64, device=self._device)
        gathered = self._link.all_gather(mine, (1,) * self._link.size, dim=0).tolist()
        which = 2 if len({cores for *_, cores in gathered}) == 1 else 1
        measured = [(int(one[0]), one[which]) for one in gathered]
        speeds = [min(speed for share, speed in measured if share == number) for number in range(self._shares)]
        fresh: Sequence[float] = [speed / sum(speeds) for speed in speeds]
        fresh = levelled_speeds(fresh, self._band)
        if self._measured:
            fresh = mixed(fresh, self.speeds)
        # Three digits are more than a measurement is worth, and two equal ranks stay equal.
        self.speeds = tuple(round(speed / sum(fresh), 2) for speed in fresh)
        self._measured, self.wanted = True, False


def mixed(fresh: Sequence[float], before: Sequence[float]) -> list[float]:
    """New measurements, softened by the older ones."""
    return [FRESH * new + (1 - FRESH) * old for new, old in zip(fresh, before, strict=True)]


def median_seconds(work: Callable[[], Any], device: torch.device | str) -> float:
    """The time of ``work`` by the clock; see `median_times`."""
    return median_times(work, device)[0]


def median_times(work: Callable[[], Any], device: torch.device | str) -> tuple[float, float]:
    """The times of ``work`` after one run that does not count: by the clock, and without that of other work.

    The median: a speed that lasts counts, not the best moment nor the worst.
    """
    on_gpu = torch.device(device).type == "cuda"
    wait = partial(torch.cuda.synchronize, device) if on_gpu else lambda: None
    clock, seconds, own = ThreadClock(), [], []
    for _ in range(1 + RUNS):
        wait()
        start, before = time.perf_counter(), clock.read()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
        own.append(seconds[-1] if on_gpu else clock.read().own(seconds[-1], before))
    return statistics.median(seconds[1:]), statistics.median(own[1:])
