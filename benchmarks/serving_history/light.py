"""Servers that start in a blink, for thousands of restarts: what takes seconds elsewhere is imported once.

``python light.py FOLDER KEYS`` imports the server and forks one for every line ``start PORT`` that it reads. Each is
the real HTTP side, queue and dispatcher; its ranks are processes without a model (tests/support/serve.py), which a
process that was forked before any thread began forks in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging.config
import os
import pickle
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from ditmesh.errors import DitmeshError, RankFailed
from ditmesh.serve.http.app import create_app
from ditmesh.serve.http.listen import HttpServer, bound
from ditmesh.serve.http.logs import log_config
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.service import Service
from ditmesh.serve.settings import ApiSettings, ServiceSettings
from support.serve import ThreadReport, serve_fake

SIZE = struct.Struct("!I")
REPLICAS, BATCH, GRACE = 2, 4, 2.0
# Seconds without a sign of a rank's life. Other programs may have the cores.
STALL = 20.0


def dies_with_its_parent() -> None:
    """The system kills this process when the one that forked it is gone (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def send(connection: socket.socket, message: Any) -> None:
    """A pickled message with its length in front."""
    data = pickle.dumps(message)
    connection.sendall(SIZE.pack(len(data)) + data)


def received(connection: socket.socket) -> Any:
    """The next message. Raises `EOFError`: the other end is gone."""

    def exactly(number: int) -> bytes:
        data = b""
        while len(data) < number:
            with contextlib.suppress(ConnectionError):
                if more := connection.recv(number - len(data)):
                    data += more
                    continue
            raise EOFError
        return data

    return pickle.loads(exactly(SIZE.unpack(exactly(SIZE.size))[0]))


class PipeReport(ThreadReport):
    """What a rank in a process of its own reports to."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def __call__(self, message: Any) -> None:
        send(self._connection, message)

    def reply(self) -> Any:
        return received(self._connection)


class Nursery:
    """The process that forks ranks: it has no threads, and is forked from one that has none."""

    connection: socket.socket

    @classmethod
    def open(cls) -> None:
        """Fork it."""
        cls.connection, theirs = socket.socketpair()
        if os.fork() == 0:
            cls.connection.close()
            dies_with_its_parent()
            cls._fork_ranks(theirs)
        theirs.close()

    @staticmethod
    def _fork_ranks(requests: socket.socket) -> NoReturn:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            message, files, *_ = socket.recv_fds(requests, 1, 1)
            if not message:
                os._exit(0)
            if (rank := os.fork()) == 0:
                requests.close()
                dies_with_its_parent()
                with contextlib.suppress(BaseException):
                    connection = socket.socket(fileno=files[0])
                    function, args, kwargs = received(connection)
                    function(*args, report=PipeReport(connection), **kwargs)
                os._exit(0)
            os.close(files[0])
            requests.sendall(SIZE.pack(rank))

    @classmethod
    def rank(cls) -> tuple[int, socket.socket]:
        """A new rank: its process, and the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(cls.connection, [b"r"], [theirs.fileno()])
        return SIZE.unpack(cls.connection.recv(SIZE.size))[0], ours


STARTING = threading.Lock()


class ForkedRanks:
    """A launcher of one rank, a process (`launch.backend.Conversing`)."""

    device, is_reporter, threads, world_size = "cpu", True, 1, 1

    def __init__(self, world_size: int, device: str, threads: int | None, timeout: float, **options: Any) -> None:
        assert world_size == 1
        try:
            with STARTING:
                self.pid, self._connection = Nursery.rank()
        except OSError as error:
            raise RankFailed(f"rank 0 of 1 could not start: {error}", 0) from None
        self.pids = [self.pid]
        self._replies: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._reply, daemon=True).start()

    def _reply(self) -> None:
        while (content := self._replies.get()) is not None:
            with contextlib.suppress(OSError):
                send(self._connection, content)

    def run(
        self, fn: Callable[..., Any], *args: Any, on_message: Any, watch: Callable[[], str | None], **kwargs: Any
    ) -> list[Any]:
        """Call a function on the rank until it ends."""
        self._replies.put((fn, args, kwargs))
        while True:
            if select.select([self._connection], [], [], 0.2)[0]:
                try:
                    message = received(self._connection)
                except EOFError:
                    raise RankFailed("rank 0 of 1 has ended", 0) from None
                on_message(0, message)
            if (missed := watch()) is not None:
                raise RankFailed(f"rank 0 of 1 had not {missed}", 0)

    def reply(self, content: Any, ranks: Any = None) -> None:
        """Send the rank a message."""
        self._replies.put(content)

    def close(self) -> None:
        """End it."""
        self._replies.put(None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._connection.close()

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def serve(folder: str, keys: str, port: int) -> int:
    """One server, until it is told to end; its exit code."""
    dies_with_its_parent()
    Nursery.open()
    logging.config.dictConfig(log_config("text", "WARNING"))
    settings = ServiceSettings(
        launcher="light:ForkedRanks", device="cpu", replicas=REPLICAS, max_batch=BATCH, stall=STALL, max_per_owner=250
    )
    try:
        service = Service([ModelSpec("sd3", "emoji-sd3")], folder, settings, serve_fake)
        with bound("127.0.0.1", port) as listening:
            server = HttpServer(
                create_app(service, ApiSettings(keys=Path(keys))), GRACE, leave=lambda number: os._exit(128 + number),
                up=lambda: say(f"up {os.getpid()} {listening.getsockname()[1]}"),
            )  # fmt: skip
            asyncio.run(server.run_on(listening))
    except DitmeshError as error:
        print(f"ERROR {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def say(line: str) -> None:
    """To the program that asked for the servers, in one piece."""
    os.write(1, f"{line}\n".encode())


def main() -> None:
    """Fork servers as they are asked for, and say how they end."""
    folder, keys = sys.argv[1:3]
    awake, wakes = socket.socketpair()
    awake.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    say("ready")
    asked = b""
    while True:
        readable = select.select([0, awake], [], [])[0]
        if awake in readable:
            awake.recv(100)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            say(f"ended {pid} {os.waitstatus_to_exitcode(status)}")
        if 0 not in readable:
            continue
        data = os.read(0, 4096)
        if not data:
            return
        *lines, asked = (asked + data).split(b"\n")
        for line in lines:
            if (pid := os.fork()) == 0:
                # As a process that was just started.
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                awake.close()
                wakes.close()
                code = 1
                try:
                    sys.modules["light"] = sys.modules["__main__"]
                    code = serve(folder, keys, int(line.split()[1]))
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            say(f"started {pid} {time.monotonic()}")


if __name__ == "__main__":
    main()
