"""Faults, two at a time, in the order that a seed gives."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
from clients import Asker
from server import Supervised

from support import fault_points as points
from support.history import Recorder

# Seconds after which nothing is hoped for any more: that the service is back, and that a second server refuses.
BACK, SECOND = 240.0, 60.0


@dataclass
class Drills:
    """All faults of one server.

    Args:
        server: the server.
        faults: of its files and its clock.
        database: its queue.
        recorder: takes the faults, too.
        probe: an owner that only asks whether the server is back.
        wish: makes a request.
        seed: of the schedule.
        most: seconds for which a fault lasts.
    """

    server: Supervised
    faults: points.FaultPoints
    database: str
    recorder: Recorder
    probe: Asker
    wish: Callable[[random.Random, int], dict[str, Any]]
    seed: int
    most: float = 1.5
    found: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ended_second: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._probes = iter(range(2**40, 2**41, 16))
        self.kinds: dict[str, Callable[[], Any]] = {
            "kill-server": self._kill_server,
            "kill-rank": lambda: self._signal_ranks(signal.SIGKILL),
            "kill-helper": self._kill_helper,
            "terminate": lambda: self._signal(self.server.pid, signal.SIGTERM),
            "stop-server": lambda: self._stopped([self.server.pid]),
            "stop-rank": lambda: self._stopped(self._some(self.server.ranks())),
            "stop-all": lambda: self._stopped([one.pid for one in self.server.family()]),
            "kill-in-write": lambda: self._at(points.TEAR, points.WRITE, 30),
            "kill-at-sync": lambda: self._at(self._around(), points.SYNC, 15),
            "kill-at-rename": lambda: self._at(
                self._around(), points.RENAME | points.CREATE | points.MKDIR | points.UNLINK, 8
            ),
            "terminate-in-write": lambda: self._at(points.TERMINATE, points.WRITE | points.SYNC | points.RENAME, 30),
            "full-disk": lambda: self._failing(errno.ENOSPC, points.GROWS),
            "failing-disk": lambda: self._failing(errno.EIO, points.WRITE | points.SYNC | points.CREATE),
            "failing-sync": lambda: self._failing(errno.EIO, points.SYNC),
            "locked-database": self._locked,
            "clock-jump": self._clock,
            "slow-clients": self._slow_clients,
            "half-open-clients": self._half_open,
            "second-server": self._second_server,
            "out-of-memory": self._out_of_memory,
            "no-descriptors": self._no_descriptors,
        }  # fmt: skip
        # Two of one group would be one fault, as they use the same means.
        alone = {"kill-in-write", "kill-at-sync", "kill-at-rename", "terminate-in-write"}
        self._exclusive = alone | {"full-disk", "failing-disk", "failing-sync"}

    # ---- the schedule

    def schedule(self, number: int, kinds: list[str]) -> list[tuple[str, str]]:
        """Pairs of different kinds, so that all kinds come equally often."""
        pairs: list[tuple[str, str]] = []
        deck: list[str] = []
        while 2 * len(pairs) < number:
            if len(deck) < 2:
                deck += self.random.sample(kinds, len(kinds))
            one = deck.pop(0)
            fits = [
                place for place, other in enumerate(deck)
                if other != one and not {one, other} <= self._exclusive
            ]  # fmt: skip
            if not fits:
                deck += self.random.sample(kinds, len(kinds))
                deck.insert(0, one)
                continue
            pairs.append((one, deck.pop(fits[0])))
        return pairs

    def run(self, pairs: list[tuple[str, str]], pause: float, over: Callable[[], bool]) -> None:
        """All pairs, with a pause in which nothing fails after each."""
        for one, other in pairs:
            if over():
                return
            self.pair(one, other)
            time.sleep(pause * (0.5 + self.random.random()))

    def pair(self, one: str, other: str) -> None:
        """Two faults that overlap, and the time until the service is back."""
        numbers = [self.recorder.invoke("fault", "", kind=one)]
        problem = None
        with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
            try:
                self._begin(first, one)
                time.sleep(self.random.random() * self.most / 2)
                numbers.append(self.recorder.invoke("fault", "", kind=other))
                self._begin(second, other)
                time.sleep(self.random.random() * self.most)
            except (psutil.Error, OSError) as error:
                # The process that it was for has just gone.
                problem = f"{type(error).__name__}: {error}"
            # In any order.
            for stack in self.random.sample([first, second], 2):
                stack.close()
        self.faults.clear()
        ended = time.monotonic()
        back = self.back(ended)
        if back is None:
            self.problems.append(f"{one} with {other}: the service was not back after {BACK:g} s")
        for number in numbers:
            self.recorder.answer(number, "ok")
        done, accepted = (None, None) if back is None else (back["done"], back["accepted"])
        self.found.append(
            {"faults": [one, other], "back_seconds": done, "accepted_seconds": accepted, "problem": problem}
        )

    def _begin(self, stack: contextlib.ExitStack, kind: str) -> None:
        around = self.kinds[kind]()
        if around is not None:
            stack.enter_context(around)

    def back(self, since: float) -> dict[str, float] | None:
        """Seconds until a job that is asked for now is accepted, and until it is done; None: too many."""
        tag, found = str(next(self._probes)), dict[str, float]()
        while time.monotonic() - since < BACK:
            wish = self.wish(self.random, int(tag)) | {"n": 1}
            self.probe.owner.wishes[tag] = wish
            job = self.probe.submit(tag, wish)
            while job is not None and time.monotonic() - since < BACK:
                found.setdefault("accepted", time.monotonic() - since)
                if job["status"] == "succeeded":
                    return found | {"done": time.monotonic() - since}
                if job["status"] == "failed":
                    tag = str(next(self._probes))
                    break
                time.sleep(0.02)
                job = self.probe.status(job["id"])
            time.sleep(0.02)
        return None

    # ---- processes

    def _signal(self, pid: int, number: int) -> None:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill_server(self) -> None:
        self._signal(self.server.pid, signal.SIGKILL)

    def _some(self, pids: list[int]) -> list[int]:
        return self.random.sample(pids, 1) if pids else []

    def _signal_ranks(self, number: int) -> None:
        for pid in self._some(self.server.ranks()):
            self._signal(pid, number)

    def _kill_helper(self) -> None:
        for pid in self._some(self.server.helpers()):
            self._signal(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def _stopped(self, pids: list[int]) -> Iterator[None]:
        for pid in pids:
            self._signal(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                self._signal(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def _out_of_memory(self) -> Iterator[None]:
        """A rank gets no more memory than it has."""
        limited = []
        for pid in self._some(self.server.ranks()):
            with contextlib.suppress(OSError, psutil.Error):
                size = psutil.Process(pid).memory_info().vms
                before = resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
                limited.append((pid, before))
        try:
            yield
        finally:
            for pid, before in limited:
                with contextlib.suppress(OSError):
                    resource.prlimit(pid, resource.RLIMIT_AS, before)

    @contextlib.contextmanager
    def _no_descriptors(self) -> Iterator[None]:
        """The server can open no more files."""
        pid = self.server.pid
        before = None
        with contextlib.suppress(OSError, psutil.Error):
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (psutil.Process(pid).num_fds() + 2, before[1]))
        try:
            yield
        finally:
            if before is not None:
                with contextlib.suppress(OSError):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    # ---- files and the clock

    def _around(self) -> int:
        return self.random.choice([points.KILL_BEFORE, points.KILL_AFTER])

    def _at(self, action: int, kinds: int, most: int) -> None:
        self.faults.at(action, self.random.randint(1, most), kinds)

    @contextlib.contextmanager
    def _failing(self, error: int, kinds: int) -> Iterator[None]:
        self.faults.fail(error, kinds)
        try:
            yield
        finally:
            self.faults.clear()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Another process writes into the queue."""
        with contextlib.closing(sqlite3.connect(self.database, isolation_level=None, timeout=2.0)) as other:
            with contextlib.suppress(sqlite3.Error):
                other.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                with contextlib.suppress(sqlite3.Error):
                    other.execute("ROLLBACK")

    @contextlib.contextmanager
    def _clock(self) -> Iterator[None]:
        """The calendar's clock is set, and set back."""
        self.faults.clock = self.random.choice([-7200.0, -90.0, 90.0, 7200.0])
        try:
            yield
        finally:
            self.faults.clock = 0.0

    @contextlib.contextmanager
    def _second_server(self) -> Iterator[None]:
        """Another server on the same folder: it has to refuse, unless the first one is just not there."""
        command = self.server.command(0)
        second = subprocess.Popen(
            command, env=self.server.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            yield
        finally:
            try:
                _, said = second.communicate(timeout=SECOND)
            except subprocess.TimeoutExpired:
                # It had found the folder free; now the first one finds it taken.
                second.kill()
                _, said = second.communicate()
                said = "served while the first one was away"
            refused = "is used by another server" in said
            self.ended_second["refused" if refused else said.strip()[-160:]] += 1

    # ---- the network

    def _connections(self, number: int, say: bytes) -> list[socket.socket]:
        found = []
        for _ in range(number):
            with contextlib.suppress(OSError):
                one = socket.create_connection(("127.0.0.1", self.server.port), timeout=1.0)
                one.setblocking(False)
                one.send(say)
                found.append(one)
        return found

    @contextlib.contextmanager
    def _half_open(self) -> Iterator[None]:
        """Connections that say nothing, half a header, or half a body, and then vanish."""
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 900\r\n"
        held = self._connections(20, b"") + self._connections(20, head) + self._connections(20, head + b'\r\n{"prompt"')
        try:
            yield
        finally:
            for one in held:
                with contextlib.suppress(OSError):
                    # A reset, not an end.
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                one.close()

    @contextlib.contextmanager
    def _slow_clients(self) -> Iterator[None]:
        """Clients that read no answer, and clients that send a byte now and then."""
        key = f"Authorization: Bearer {self.probe.owner.key}\r\n".encode()
        ask = b"GET /v1/jobs?limit=1000 HTTP/1.1\r\nHost: 127.0.0.1\r\n" + key + b"\r\n"
        held = self._connections(10, ask * 20)
        slow = self._connections(10, b"GET /healthz HTTP/1.1\r\n")
        over = threading.Event()

        def drip() -> None:
            while not over.wait(0.1):
                for one in slow:
                    with contextlib.suppress(OSError):
                        one.send(b"X")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            for one in held + slow:
                one.close()
