"""Byte counters: what this rank has put on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class Traffic:
    """Bytes this rank has sent to other ranks and messages posted, by axis name.

    What a rank keeps for itself is not traffic. Counting is arithmetic on sizes known on the host: it never
    waits for a device.

    Attributes:
        observer: called as ``observer(axis, kind)`` before every operation of a link, where ``kind`` is the link's
            method; what it raises, the operation raises. For tests and measurements; None: nobody looks.
    """

    def __init__(self) -> None:
        self.observer: Callable[[str, str], None] | None = None
        self.bytes_sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def add(self, axis: str, sent: int) -> None:
        """Count one call on ``axis`` that sends ``sent`` bytes to other ranks."""
        self.bytes_sent[axis] += sent
        self.calls[axis] += 1

    def reset(self) -> None:
        """Start counting from zero."""
        self.bytes_sent.clear()
        self.calls.clear()
