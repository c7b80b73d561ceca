"""Whether a core is a process's own just now, and what something would have taken if it had been.

A virtual machine's cores may be halves of real ones, whose other halves belong to somebody else: for seconds everything
takes half as long again, and nothing in the machine says so. A loop that stays in the first-level cache does: it takes
as long as at its best, or the core is shared. So it runs before and after what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import torch

# Products of small matrices of a probe (some 10 ms), and how many probes find out what the best is.
PRODUCTS, PROBES = 3000, 300
# How much longer than at its best a probe may take in a quiet moment.
LONGER = 1.08


def _seconds() -> float:
    a = torch.ones(48, 48)
    out = torch.empty(48, 48)
    start = time.perf_counter()
    for _ in range(PRODUCTS):
        torch.mm(a, a, out=out)
    return time.perf_counter() - start


@cache
def _best() -> list[float]:
    return [min(_seconds() for _ in range(PROBES))]


def longer() -> float:
    """How many times as long as at its best this core takes just now."""
    best, seconds = _best(), _seconds()
    best[0] = min(best[0], seconds)
    return seconds / best[0]


def together(wait: float = 0.0) -> float:
    """The worst of all ranks of `longer`; looks again for so many seconds until it is quiet."""
    import torch.distributed as dist

    end = time.monotonic() + wait
    while True:
        worst = torch.tensor([longer(), float(time.monotonic() > end)])
        if dist.is_initialized():
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if worst[0] <= LONGER or worst[1]:
            return float(worst[0])


def exponents(groups: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """How far a busy core shows in what is timed: ``seconds = quiet seconds * before ** a * after ** b``.

    Args:
        groups: of samples (seconds, before, after) of the same thing; each group's quiet seconds are its own.
    """
    import numpy as np

    logs = [np.log(np.asarray(group, dtype=float)) for group in groups]
    apart = np.concatenate([each - each.mean(axis=0) for each in logs])
    a, b = np.linalg.lstsq(apart[:, 1:], apart[:, 0], rcond=None)[0]
    return float(a), float(b)


def at_best(sample: Sequence[float], shown: tuple[float, float]) -> float:
    """Seconds that a sample (seconds, before, after) would have taken on quiet cores, by its `exponents`."""
    seconds, before, after = sample
    return seconds / (before ** shown[0] * after ** shown[1])
