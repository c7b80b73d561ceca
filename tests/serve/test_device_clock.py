"""How far a host may be ahead of a device, with events of a GPU that does one span when it is asked to."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from ditmesh.serve.worker.device_clock import MAX_LAUNCHED_SPANS, DeviceClock


class LazyGpu:
    """What `torch.cuda.Event` is made of: a stream that takes 0.25 s a span and advances only where it is waited for.

    Attributes:
        launched, finished: events of ends; the most of the first over the second.
    """

    def __init__(self) -> None:
        self.now, self.ends, self.finished, self.most, self.waits = 0.0, 0, 0, 0, 0
        self.recorded: list[Any] = []

    def event(self, **options: Any) -> Any:
        gpu = self
        assert options == {"enable_timing": True, "blocking": True}

        class Event:
            at: float | None = None

            def record(self) -> None:
                gpu.recorded.append(self)
                # Start, end, start, end …
                if len(gpu.recorded) % 2 == 0:
                    gpu.ends += 1
                gpu.most = max(gpu.most, gpu.ends - gpu.finished)

            def synchronize(self) -> None:
                gpu.waits += 1
                for place, event in enumerate(gpu.recorded):
                    if event.at is None:
                        gpu.now += 0.25 * (place % 2)
                        event.at = gpu.now
                        gpu.finished += place % 2
                    if event is self:
                        return

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) * 1e3

        return Event()


def test_at_most_two_spans_are_launched_and_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LazyGpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    clock = DeviceClock(torch.device("cuda"))
    for number in range(30):
        # A span that raises is one as well.
        with contextlib.suppress(RuntimeError), clock.span():
            assert number - gpu.finished < MAX_LAUNCHED_SPANS == 2
            if number % 3:
                raise RuntimeError("on purpose")
        # The device's seconds, not those of launches.
        assert clock.seconds == (0.25 if number >= 2 else 0.0)
    assert gpu.most == 2
    # The host has waited for no span but the one two places earlier.
    assert gpu.finished == 28 == gpu.waits
