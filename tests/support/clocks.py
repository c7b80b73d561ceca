"""A clock that only hooks move: what is measured with it is the same on every machine, however busy it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


class SimulatedClock:
    """Stands for `time.perf_counter` while speeds and blocks are measured.

    Attributes:
        seconds: that it shows.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.seconds += seconds

    def perf_counter(self) -> float:
        return self.seconds


@contextmanager
def measured_by(clock: SimulatedClock) -> Iterator[None]:
    """`strategies.balance` measures by this clock inside."""
    with mock.patch("ditmesh.strategies.balance.time", clock):
        yield
