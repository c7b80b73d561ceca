"""Whether a core is a process's own just now, and what something would have taken if it had been.

A virtual machine's cores may be halves of real ones, whose other halves belong to somebody else: for seconds everything
takes half as long again, and nothing in the machine says so. A loop that stays in the first-level cache does: it takes
as long as at its best, or the core is shared. So it runs before and after what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

# Products of small matrices of a probe (some 10 ms), and how many probes find out what the best is.
PRODUCTS, PROBES = 3000, 300
# How much longer than at its best a probe may take in a quiet moment.
LONGER = 1.08
# Products of a probe within what is timed (some 0.2 ms), and seconds from one to the next.
WITHIN, APART = 60, 0.008


def _seconds(products: int = PRODUCTS, clock: Callable[[], float] = time.perf_counter) -> float:
    a = torch.ones(48, 48)
    out = torch.empty(48, 48)
    start = clock()
    for _ in range(products):
        torch.mm(a, a, out=out)
    return clock() - start


@cache
def _best() -> list[float]:
    return [min(_seconds() for _ in range(PROBES))]


def longer() -> float:
    """How many times as long as at its best this core takes just now."""
    best, seconds = _best(), _seconds()
    best[0] = min(best[0], seconds)
    return seconds / best[0]


@contextmanager
def probed(model: torch.nn.Module) -> Iterator[list[tuple[float, float, float]]]:
    """Probes at a model's linear layers: when each began, seconds it took, and seconds of this thread's processor.

    The last is what a busy core shows in, and other threads of this process do not.
    """
    probes: list[tuple[float, float, float]] = []

    def probe(*_: object) -> None:
        start = time.perf_counter()
        if not probes or start - probes[-1][0] >= APART:
            own = _seconds(WITHIN, time.thread_time)
            probes.append((start, time.perf_counter() - start, own))

    hooks = [one.register_forward_pre_hook(probe) for one in model.modules() if isinstance(one, torch.nn.Linear)]
    try:
        yield probes
    finally:
        for hook in hooks:
            hook.remove()


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
