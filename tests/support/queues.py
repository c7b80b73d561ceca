"""A server's queue in a process of its own, to be killed, and what other programs do with its file meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ditmesh.serve.queue.database import FILE

# For each line "FOLDER KEY": open the folder, unless it is; accept the request with that key, and run it to its end
# unless the key says "waits".
PROGRAM = """
import sys
from ditmesh.serve.errors import IdempotencyKey
from ditmesh.serve.queue.database import FILE
from ditmesh.serve.queue.queue import Queue
from ditmesh.serve.types import JobImage, JobRequest

touched, queues = [], {}
sys.addaudithook(lambda event, args: touched.append(args[0]) if event == "open" and FILE in str(args[0]) else None)
print("starting", flush=True)
for number, line in enumerate(sys.stdin):
    folder, key = line.split()
    if folder not in queues:
        queues[folder] = Queue(folder)
        print("open", flush=True)
    queue, request = queues[folder], JobRequest(model="m", prompt=key, seed=number)
    job = queue.submit(f"{key}-run{queue.run}", request, "", 1.0, key=IdempotencyKey(key, key))
    print("accepted", key, job.id, flush=True)
    if "waits" not in key and job.status == "queued":
        picture = queue.begin(job.id)
        job = queue.finish(job.id, picture, "0.png", JobImage(index=0, seed=number, url="/0"))
        print("ended", key, job.id, flush=True)
    # Beside SQLite nothing in the process opens the file.
    assert not touched, touched
"""


class QueueProcess:
    """A process that has queues open, as a server has one."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._from = self.process.stdin, self.process.stdout

    def __enter__(self) -> QueueProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def wait_for(self, word: str) -> list[str]:
        """Read to the next line that begins with a word; the other words of it."""
        for line in self._from:
            if line.split()[0] == word:
                return line.split()[1:]
        raise AssertionError(f"the process ended before it said {word!r}")

    def send(self, folder: Path, key: str) -> None:
        """Ask for a job in the queue of a folder."""
        # The process may have been killed.
        with contextlib.suppress(OSError, ValueError):
            print(folder, key, file=self._to, flush=True)

    def kill(self) -> list[list[str]]:
        """Kill the process (SIGKILL); what it had said and was not read, by lines of words."""
        self.process.kill()
        # A line may be cut.
        lines = [line.split() for line in self._from.read().splitlines(keepends=True) if line.endswith("\n")]
        self.process.wait()
        for stream in (self._to, self._from):
            with contextlib.suppress(OSError):
                stream.close()
        return lines


def _connected(path: Path, *statements: str) -> None:
    # The server may hold the file at this moment, or must keep it to itself.
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=1.0)) as db,
        contextlib.suppress(sqlite3.OperationalError),
    ):
        for statement in statements:
            db.execute(statement).fetchall()


def _copied(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for file in path.parent.glob(f"{FILE}*"):
            with contextlib.suppress(OSError):
                shutil.copy(file, folder)


def _backed_up(path: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(path, timeout=1.0)) as db,
        contextlib.closing(sqlite3.connect(":memory:")) as backup,
        contextlib.suppress(sqlite3.OperationalError),
    ):
        db.backup(backup)


def _read_by_bytes(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        os.fsync(file.fileno())


# What another program may do with a queue's file, by what it is for. Not more than one at a time in a process.
OTHERS: dict[str, Callable[[Path], None]] = {
    "a look": lambda path: _connected(path, "SELECT id, status FROM jobs"),
    "a look at nothing": lambda path: _connected(path),
    "a check": lambda path: _connected(path, "PRAGMA integrity_check"),
    "a copy": _copied,
    "a backup": _backed_up,
    "a backup into a file": lambda path: _connected(path, "VACUUM INTO ''"),
    "a read of the bytes": _read_by_bytes,
    "a lock": lambda path: _connected(path, "BEGIN IMMEDIATE", "SELECT count(*) FROM jobs", "ROLLBACK"),
    "an exclusive lock": lambda path: _connected(path, "BEGIN EXCLUSIVE", "ROLLBACK"),
    "a checkpoint": lambda path: _connected(path, "PRAGMA wal_checkpoint(TRUNCATE)"),
    "another journal": lambda path: _connected(path, "PRAGMA journal_mode = DELETE"),
    "a clean-up": lambda path: _connected(path, "VACUUM"),
}
