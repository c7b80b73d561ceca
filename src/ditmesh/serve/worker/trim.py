"""Host memory of a rank that serves for days: garbage is collected and free memory returned at regular intervals."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from ...launch.heap import return_free_memory

# Between two collections.
TRIM_SECONDS = 30.0


class MemoryTrimmer:
    """Collects a rank's cyclic garbage, and returns the free memory of the C library to the system, twice a minute.

    Python starts a full collection by the number of objects, not by their size: the tensors of ended requests that are
    part of reference cycles would wait for thousands of other objects. glibc returns only what is free at the end of
    its heap, so that a block which lives on there keeps all free memory below it.
    """

    def __init__(self, seconds: float = TRIM_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock, self._latest = seconds, clock, clock()

    def trim_when_due(self) -> bool:
        """Collect and trim if the interval is over; the return value says if it was."""
        if self._clock() - self._latest < self._seconds:
            return False
        self._latest = self._clock()
        gc.collect()
        return_free_memory()
        return True
