"""How fast each sequence rank is: given, or measured on a real block."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from ..comm import Link

# How often a block is run to time it, after one run that does not count.
RUNS = 3
# Share of a new measurement in the weights when there is an older one.
FRESH = 0.5


class Balance:
    """Weights of the sequence ranks, the same on all of them.

    Args:
        setting: the configuration's ``weights``: numbers, ``"auto"`` to measure, None for equal ranks.
        link: the sequence ranks.
        device: where this rank computes.

    Attributes:
        weights: relative speeds, in rank order.
        wanted: whether the next call of the transformer is to measure; set it to measure again.
    """

    def __init__(
        self, setting: tuple[float, ...] | Literal["auto"] | None, link: Link, device: torch.device | str
    ) -> None:
        self._link = link
        self._device = torch.device(device)
        self._measured = False
        self.weights: tuple[float, ...] = setting if isinstance(setting, tuple) else (1.0,) * link.size
        self.wanted = setting == "auto"

    def measure(self, work: Callable[[], Any]) -> None:
        """Time ``work``, which is as much on every rank, and set the weights. A collective call.

        The new speeds are mixed half and half with those measured before: a machine's hiccup does not throw
        all tokens about.
        """
        work()
        times = [self._seconds(work) for _ in range(RUNS)]
        # The median: a speed that lasts counts, not the best moment nor the worst.
        mine = torch.tensor([1 / statistics.median(times)], dtype=torch.float64, device=self._device)
        speeds = self._link.gather(mine, (1,) * self._link.size, dim=0).tolist()
        fresh = [speed / sum(speeds) for speed in speeds]
        if self._measured:
            fresh = [FRESH * new + (1 - FRESH) * old for new, old in zip(fresh, self.weights, strict=True)]
        # Three digits are more than a measurement is worth, and two equal ranks stay equal.
        self.weights = tuple(round(weight / sum(fresh), 2) for weight in fresh)
        self._measured, self.wanted = True, False

    def _seconds(self, work: Callable[[], Any]) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        work()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start
