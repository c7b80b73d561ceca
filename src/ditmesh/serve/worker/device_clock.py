"""Times of work on a device, and a bound on how far the host may launch ahead of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

# Spans that are launched and not finished, the one in progress included. With one the device would be idle while the
# host launches the next; more make a cancel wait for all of them.
MAX_LAUNCHED_SPANS = 2


class DeviceClock:
    """Times spans of work, and waits before one for the one `MAX_LAUNCHED_SPANS` places earlier.

    A host only launches what a GPU computes: without a bound it is a whole request ahead, what it measures are
    launches, and a cancelled request goes on until everything launched is done. On a CPU nothing is waited for.

    Args:
        device: where the work is done, on its current stream.

    Attributes:
        seconds: of the latest span that has finished.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._device = device
        self._under_way: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def span(self) -> Iterator[None]:
        """The length of a ``with`` block is a span, also when it raises."""
        if self._device.type == "cpu":
            began = time.perf_counter()
            try:
                yield
            finally:
                self.seconds = time.perf_counter() - began
            return
        if len(self._under_way) >= MAX_LAUNCHED_SPANS:
            start, end = self._under_way.popleft()
            end.synchronize()
            self.seconds = start.elapsed_time(end) / 1e3
        # The host sleeps where it waits, and leaves the processor to others; torch's events for all devices cannot.
        make = partial(torch.cuda.Event, blocking=True) if self._device.type == "cuda" else torch.Event
        start, end = (make(enable_timing=True) for _ in range(2))
        start.record()
        try:
            yield
        finally:
            end.record()
            self._under_way.append((start, end))
