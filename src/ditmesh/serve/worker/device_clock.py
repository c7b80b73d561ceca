"""Times of work on a device, and a bound on how far the host may launch ahead of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Spans that are launched and not finished, the one in progress included. With one the device would be idle while the
# host launches the next; more make a cancel wait for all of them.
MAX_LAUNCHED_SPANS = 2


class DeviceClock:
    """Times spans of work by name, and waits before one for the one `MAX_LAUNCHED_SPANS` places earlier.

    A host only launches what a GPU computes: without a bound it is a whole request ahead, what it measures are
    launches, and a cancelled request goes on until everything launched is done. On a CPU the host computes, and nothing
    is waited for.

    Args:
        device: where the work is done, on its current stream.

    Attributes:
        seconds: of the latest span of each name that has finished; on a GPU up to
            `MAX_LAUNCHED_SPANS` spans ago.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._on_gpu = device.type == "cuda"
        self._under_way: deque[tuple[str, Any, Any]] = deque()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """The length of a ``with`` block is a span, also when it raises."""
        if not self._on_gpu:
            began = time.perf_counter()
            try:
                yield
            finally:
                self.seconds[name] = time.perf_counter() - began
            return
        while len(self._under_way) >= MAX_LAUNCHED_SPANS:
            self._under_way[0][2].synchronize()
            self._collect()
        # The host sleeps where it waits, and leaves the processor to others.
        start, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        start.record()
        try:
            yield
        finally:
            end.record()
            self._under_way.append((name, start, end))
            self._collect()

    def _collect(self) -> None:
        """Record finished spans, without waiting."""
        while self._under_way and self._under_way[0][2].query():
            name, start, end = self._under_way.popleft()
            self.seconds[name] = start.elapsed_time(end) / 1e3
