"""Processes that a test has started, directly or not, found by a mark in their environment (Linux)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

MARK = "DITMESH_TEST_MARK"


def marked(extra: dict[str, str]) -> tuple[str, dict[str, str]]:
    """A mark, and an environment that carries it to every process of the family."""
    mark = uuid.uuid4().hex
    return mark, {**os.environ, "OMP_NUM_THREADS": "1", **extra, MARK: mark}


def interruptible(command: list[str], environment: dict[str, str], **more: Any) -> subprocess.Popen[str]:
    """A command that hears Ctrl-C: what a shell starts in the background is deaf to it, and so is what that starts."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stderr=pipe, stdout=pipe, text=True, preexec_fn=_hear, **more)


def _hear() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def family(mark: str) -> list[int]:
    """Process ids that carry the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                carries = wanted in (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if carries and alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def actors_of(mark: str) -> list[int]:
    """Process ids of the ranks that a Ray cluster of this family has started."""
    found = []
    for pid in family(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [pid] if psutil.Process(pid).name() == "ray::_Rank" else []
    return sorted(found)


def ranks_of(command: int) -> list[int]:
    """Process ids of the ranks that a command has started on the CPU: its fork server's children."""
    mine = psutil.Process(command).children()
    return sorted(rank.pid for one in mine for rank in one.children() if alive(rank.pid))


def wait_until_gone(mark: str, seconds: float) -> list[int]:
    """Process ids that still carry the mark after ``seconds``."""
    limit = time.monotonic() + seconds
    while (left := family(mark)) and time.monotonic() < limit:
        time.sleep(0.1)
    return left
