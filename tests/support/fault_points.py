"""Faults in the calls by which processes change the files of a folder, and in their clock.

A library that is loaded into a process (LD_PRELOAD, as libfaketime and CharybdeFS's predecessors do it) stands between
it and the C library: calls of Python and of SQLite alike fail with an error of the system, are the last of their
process (SIGKILL before, after or, for a write, in the middle of them), or come together with SIGTERM. Which ones is
said in a page of memory that this process and all those with the library share, at any time. As no file of `src` knows
of it, every write, sync, rename, creation and removal is a crash point by itself, those inside SQLite too. That all
crash points of a storage protocol have to be enumerated and cannot be guessed: Pillai et al., OSDI 2014.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

SOURCE = Path(__file__).with_suffix(".c")
# Of struct control in the library's source.
LAYOUT, FOLDER = struct.Struct("@iiiiqqq"), 1024
# Kinds of calls.
WRITE, SYNC, RENAME, CREATE, UNLINK, MKDIR, TRUNCATE = (1 << bit for bit in range(7))
EVERY = (1 << 7) - 1
# What grows a file or makes one.
GROWS = WRITE | CREATE | MKDIR | TRUNCATE
# What happens to a call.
NONE, FAIL, KILL_BEFORE, KILL_AFTER, TEAR, TERMINATE = range(6)


def missing() -> str | None:
    """Why there can be no such faults on this machine; None: there can."""
    if os.uname().sysname != "Linux":
        return "fault points need Linux"
    return None if shutil.which("cc") else "fault points need a C compiler (cc); install gcc"


class FaultPoints:
    """The faults of all processes that are started with `environment`.

    Args:
        folder: whose files' changes may fail.
        scratch: for the library and the shared page; not inside ``folder``.
    """

    def __init__(self, folder: str | Path, scratch: str | Path) -> None:
        self._library, page = Path(scratch) / "fault_points.so", Path(scratch) / "fault_points.page"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O2", "-w", "-o", str(self._library), str(SOURCE), "-ldl"], check=True
        )
        name = os.fsencode(os.path.realpath(folder))
        page.write_bytes(LAYOUT.pack(0, 0, 0, 0, 0, 0, 0) + name.ljust(FOLDER, b"\0"))
        self._attach(page)

    @classmethod
    def own(cls) -> FaultPoints:
        """Those of this process, which was started with `environment`."""
        found = cls.__new__(cls)
        found._library = Path(os.environ["LD_PRELOAD"])
        found._attach(Path(os.environ["DITMESH_FAULT_POINTS"]))
        return found

    def _attach(self, page: Path) -> None:
        self._page = page
        with page.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def __enter__(self) -> FaultPoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._memory.close()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Of a process that has these faults, and its children."""
        return {**base, "LD_PRELOAD": str(self._library), "DITMESH_FAULT_POINTS": str(self._page)}

    def _fields(self) -> tuple[int, ...]:
        return LAYOUT.unpack_from(self._memory)

    def _set(self, action: int, kinds: int, error: int, countdown: int) -> None:
        *_, clock = self._fields()
        # The action comes last: a process may look at any time.
        struct.pack_into("@iii", self._memory, 4, kinds, error, countdown)
        struct.pack_into("@qq", self._memory, 16, 0, 0)
        struct.pack_into("@q", self._memory, 32, clock)
        struct.pack_into("@i", self._memory, 0, action)

    def fail(self, error: int, kinds: int) -> None:
        """All such calls fail with an error of the system, until `clear`."""
        self._set(FAIL, kinds, error, 0)

    def at(self, action: int, countdown: int, kinds: int) -> None:
        """The call with this number from now on, from 1, of these kinds, has a fault: once."""
        self._set(action, kinds, 0, countdown)

    def count(self, kinds: int = EVERY) -> None:
        """Count such calls, without a fault."""
        self._set(NONE, kinds, 0, 0)

    def clear(self) -> None:
        """Nothing fails any more."""
        self._set(NONE, 0, 0, 0)

    @property
    def seen(self) -> int:
        """Calls of the chosen kinds since the last choice."""
        return self._fields()[4]

    @property
    def hits(self) -> int:
        """Calls that had a fault since the last choice."""
        return self._fields()[5]

    @property
    def clock(self) -> float:
        """Seconds by which the processes' calendar is ahead."""
        return self._fields()[6] / 1e9

    @clock.setter
    def clock(self, seconds: float) -> None:
        struct.pack_into("@q", self._memory, 32, int(seconds * 1e9))

    @contextmanager
    def full(self) -> Iterator[None]:
        """The disk is full."""
        self.fail(errno.ENOSPC, GROWS)
        try:
            yield
        finally:
            self.clear()


@contextmanager
def fault_points(folder: str | Path) -> Iterator[FaultPoints]:
    """Fault points of a folder, with a temporary folder for the library."""
    with tempfile.TemporaryDirectory() as scratch, FaultPoints(folder, scratch) as found:
        yield found
