"""A thread's time: seconds on a core, and seconds in which it was ready while other work had the core.

A rank that takes long for a step is slow, or shares its core with other work. Both count where it is to be given less.
Where ranks share the same cores in the same way, though, the system gives every one of them its turn: which one has
just waited for it changes from moment to moment, and says nothing about the next step.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Linux: nanoseconds on a core, nanoseconds of waiting for one, and turns of the thread that opens it.
STATISTICS = "/proc/thread-self/schedstat"
# Ranks with the same turns also share the machine and their part of it, besides cores and priority.
MACHINE, GROUPS = "/proc/sys/kernel/random/boot_id", "/proc/self/cgroup"
# Of control groups, those that share out cores; the second version has one for everything, without a name.
OF_CORES = {"", "cpu", "cpuset", "cpuacct"}


@dataclass(frozen=True)
class ThreadTime:
    """Seconds so far.

    Attributes:
        processor: in which the thread was on a core.
        delayed: in which it was ready to run, and other work had the core; 0 where the system does not say.
    """

    processor: float
    delayed: float

    def own(self, seconds: float, since: ThreadTime) -> float:
        """The length of so many seconds since an earlier reading, had there been no other work on the cores.

        Seconds on a core, and what the thread slept or was stopped as well, made shorter as the others are: a thread
        that is stopped for half of the time takes twice as long, however long it waits for its turns. Some of the delay
        may lie in seconds that the caller has already taken off, so the result is at least those on a core.
        """
        processor = self.processor - since.processor
        ready = processor + self.delayed - since.delayed
        return min(seconds, max(processor, seconds * processor / ready)) if ready > 0 else seconds


class ThreadClock:
    """Reads the calling thread's time; about three microseconds."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._file: int | None = None

    def read(self) -> ThreadTime:
        """Seconds of this thread so far."""
        if self._thread != threading.get_ident():
            self._open()
        delayed = 0.0
        if self._file is not None:
            try:
                delayed = int(os.pread(self._file, 100, 0).split()[1]) / 1e9
            except (OSError, ValueError, IndexError):
                self._close()
        return ThreadTime(time.thread_time(), delayed)

    def _open(self) -> None:
        self._close()
        self._thread = threading.get_ident()
        with suppress(OSError):
            self._file = os.open(STATISTICS, os.O_RDONLY | os.O_CLOEXEC)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)

    def __del__(self) -> None:
        self._close()


class CoreShare:
    """The cores that this thread may run on, and its priority, as a number that other ranks can compare."""

    def __init__(self) -> None:
        try:
            machine, groups = (Path(name).read_text(encoding="utf-8") for name in (MACHINE, GROUPS))
        except OSError:
            # Without them nothing says whether two ranks are on one machine.
            machine, groups = str(os.urandom(16)), ""
        # A line is a number, names, and a folder.
        lines = [line.split(":", 2)[1:] for line in groups.splitlines()]
        self._where = machine + str([line for line in lines if OF_CORES & set(line[0].split(","))])
        self._known: tuple[object, int] | None = None

    def number(self) -> int:
        """Equal, below 2^48, for ranks that get the same turns on the same cores; it may change at any time."""
        if not hasattr(os, "sched_getaffinity"):
            return self._hash("")
        now = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
        if self._known is None or self._known[0] != now:
            self._known = now, self._hash(f"{sorted(now[0])} {now[1]}")
        return self._known[1]

    def _hash(self, text: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self._where}{text}".encode(), digest_size=6).digest(), "big")
