"""Speeds of sequence ranks: given, or measured on a real block."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from ..comm import Link

# The number of runs of a block that are timed, after one run that does not count.
RUNS = 3
# Ranks are equal where the slowest takes less than this share longer than the mean.
EQUAL_SPEEDS = 0.2


class Balance:
    """Speeds of the sequence ranks; the same on all ranks.

    Args:
        setting: the configuration's ``speeds``: numbers, ``"auto"`` to measure, None for equal shares.
        shares: how many share the work; default: every rank of the link has a share of its own.
        share: this rank's, where several ranks have one together (slices of one weight); the slowest of them counts.

    Attributes:
        speeds: relative ones, in the order of ranks.
        wanted: whether the next call of the transformer is to measure.
    """

    def __init__(
        self,
        setting: tuple[float, ...] | Literal["auto"] | None,
        link: Link,
        device: torch.device | str,
        shares: int | None = None,
        share: int | None = None,
    ) -> None:
        self._link, self._setting, self._device = link, setting, torch.device(device)
        self._shares = link.size if shares is None else shares
        self._share = link.rank if share is None else share
        self.forget()

    def forget(self) -> None:
        """Reset the measurements on all ranks: the next call measures again."""
        equal = (1.0,) * self._shares
        self.speeds: tuple[float, ...] = self._setting if isinstance(self._setting, tuple) else equal
        self.wanted = self._setting == "auto"

    def measure(self, work: Callable[[], Any]) -> None:
        """Time ``work``, which is as much on every rank, and set the speeds. A collective call."""
        self.agree(median_seconds(work, self._device))

    def agree(self, seconds: float) -> None:
        """Set the speeds from the time that every rank takes for the same work. A collective call."""
        mine = torch.tensor([[self._share, 1 / seconds]], dtype=torch.float64, device=self._device)
        gathered = self._link.all_gather(mine, (1,) * self._link.size, dim=0).tolist()
        fresh = [min(speed for share, speed in gathered if share == number) for number in range(self._shares)]
        times = [1 / speed for speed in fresh]
        if max(times) < (1 + EQUAL_SPEEDS) * statistics.mean(times):
            fresh = [1.0] * self._shares
        # Three digits are more than a measurement is worth, and two equal ranks stay equal.
        self.speeds = tuple(round(speed / sum(fresh), 2) for speed in fresh)
        self.wanted = False


def median_seconds(work: Callable[[], Any], device: torch.device | str) -> float:
    """The median time of ``work``, after one run that does not count."""
    wait = partial(torch.accelerator.synchronize, device) if torch.device(device).type != "cpu" else lambda: None
    seconds = []
    for _ in range(1 + RUNS):
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
