"""The server of the drills: a process that is started again whenever it has ended, as systemd would."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psutil

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"
# Seconds between the end of a server that could not start and the next attempt.
AGAIN = 0.3

Kind = Literal["light", "model"]


class Supervised:
    """A server on a folder, at one port, that somebody starts again.

    Attributes:
        pid: of its process; 0: none is there.
        port: where it answers.
        exits: exit codes of its processes (negative: the signal).
        said: lines of its log.
        starts: of processes.
    """

    def __init__(self, kind: Kind, folder: Path, keys: Path, environment: Mapping[str, str], size: int) -> None:
        self.kind, self.pid, self.port, self.starts = kind, 0, 0, 0
        self.exits: Counter[int] = Counter()
        self.said: list[str] = []
        self._over = False
        self._changed = threading.Condition()
        self._folder, self._keys, self._size = folder, keys, size
        self._environment = {**environment, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        self._process: subprocess.Popen[str]
        target = self._forked if kind == "light" else self._spawned
        threading.Thread(target=target, daemon=True).start()

    def command(self, port: int, keys: Path | None = None) -> list[str]:
        """Of a server with a model, or of a second server on the same folder."""
        command = [
            sys.executable,
            "-m",
            "ditmesh",
            "serve",
            "--devices",
            "2",
            "--threads",
            "1",
            "--log-level",
            "warning",
        ]
        command += ["--folder", str(self._folder), "--max-batch", "4", "--grace", "2", "--port", str(port)]
        return [*command, "--keys", str(keys or self._keys), "--stall", "20"]

    @property
    def environment(self) -> dict[str, str]:
        """Of its processes."""
        return self._environment

    def wait_until_up(self, seconds: float = 300.0) -> bool:
        """Until a process of it answers."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self.pid), seconds)

    def family(self) -> list[psutil.Process]:
        """Its process and all that it started."""
        with contextlib.suppress(psutil.Error, ValueError):
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        return []

    def ranks(self) -> list[int]:
        """Its ranks: children of a child of it, which forks them."""
        with contextlib.suppress(psutil.Error, ValueError):
            return [rank.pid for one in psutil.Process(self.pid).children() for rank in one.children()]
        return []

    def helpers(self) -> list[int]:
        """Its other processes."""
        with contextlib.suppress(psutil.Error, ValueError):
            return [one.pid for one in psutil.Process(self.pid).children()]
        return []

    def log(self) -> Counter[str]:
        """Lines of its log without numbers, and of a traceback the last line."""
        found, inside = Counter[str](), False
        for line in self.said:
            if line.startswith(("Traceback", "  ")) or not line:
                inside = inside or line.startswith("Traceback")
                continue
            text = re.sub(r"\d+(\.\d+)?", "N", re.sub(r"job_[0-9a-f]{32}", "job_...", line))[:200]
            found[f"RAISED {text}" if inside else text.partition(" ")[2]] += 1
            inside = False
        return found

    def end(self) -> None:
        """For good."""
        self._over = True
        if self.kind == "light":
            with contextlib.suppress(OSError):
                os.kill(self.pid, 15)
            self._wait_gone(30.0)
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _wait_gone(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.pid, seconds)

    def _set(self, pid: int, port: int = 0) -> None:
        with self._changed:
            self.pid, self.port = pid, port or self.port
            self._changed.notify_all()

    def _listen(self, lines: Any) -> None:
        for line in lines:
            if len(self.said) < 20_000:
                self.said.append(line.rstrip())

    def _spawned(self) -> None:
        while not self._over:
            self._process = subprocess.Popen(
                self.command(self.port),
                env=self._environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self.starts += 1
            threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True).start()
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if line:
                self._set(self._process.pid, int(line.split()[-1].rpartition(":")[2]))
            self.exits[self._process.wait()] += 1
            up, _ = self.pid, self._set(0)
            if not up:
                time.sleep(AGAIN)

    def _forked(self) -> None:
        command = [sys.executable, str(HERE / "light.py"), str(self._folder), str(self._keys)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=self._environment, text=True, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=1
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True).start()
        current = up = 0
        for line in self._process.stdout:
            what, *numbers = line.split()
            if what == "started":
                current, up, self.starts = int(numbers[0]), 0, self.starts + 1
            elif what == "up":
                up = int(numbers[0])
                self._set(up, int(numbers[1]))
            elif what == "ended" and int(numbers[0]) == current:
                self.exits[int(numbers[1])] += 1
                self._set(0)
                if not up:
                    time.sleep(AGAIN)
            if what in ("ready", "ended") and not self._over:
                with contextlib.suppress(OSError):
                    self._process.stdin.write(f"start {self.port}\n")
