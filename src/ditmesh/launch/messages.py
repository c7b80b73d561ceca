"""Messages between an owner and its ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any


def encode(content: Any, fn: Any = None, main: bool = True) -> bytes:
    """Pickle a message for another process, which imports the same modules; the main module too, if ``main``.

    Functions and classes travel by name. Those that have none there (lambdas, closures, what a notebook defines) travel
    by value, with copies of the globals they use. ``fn`` is a function in the message that may be another one in the
    file of the main module. Raises whatever pickling raises.
    """
    import cloudpickle

    # Ranks import the file of the main module as well; a notebook or a prompt has none. A function that was defined at
    # a prompt after the file was run would be the file's by name, or none.
    file, code = getattr(sys.modules["__main__"], "__file__", None), getattr(fn, "__code__", None)
    own = file is not None and (
        code is None or fn.__module__ != "__main__" or os.path.abspath(code.co_filename) == os.path.abspath(file)
    )
    if own and main:
        with contextlib.suppress(Exception):
            return pickle.dumps(content)
    return cloudpickle.dumps(content)


def encode_call(fn: Callable[..., Any], *call: Any, main: bool = True) -> bytes:
    """``(fn, *call)`` for the ranks, as `encode` has it; a `TypeError` of one sentence when it cannot be pickled."""
    try:
        return encode((fn, *call), fn, main)
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"cannot send {name} and its arguments to the ranks ({error}); use a function of an "
            f"importable module and arguments that can be pickled"
        ) from error


class OwnerChannel:
    """The owner's end of a connection, which never waits for the rank to take something. Any thread may send.

    ``connection``: becomes readable with each message; ``ended``: whether the rank has closed its end.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection, self.ended = connection, False
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="ditmesh-sends-to-rank", daemon=True)
        self._sender.start()

    def send(self, data: bytes) -> None:
        """Send a message. A rank that has ended gets nothing: the end of its connection shows it."""
        self._outgoing.put(data)

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):
            while (data := self._outgoing.get()) is not None:
                self.connection.send_bytes(data)

    def received(self) -> Iterator[bytes]:
        """The messages that have come so far."""
        try:
            while self.connection.poll():
                yield self.connection.recv_bytes()
        except (EOFError, OSError):
            self.ended = True

    def close(self, seconds: float) -> None:
        """Close the connection of a rank that has ended."""
        self._outgoing.put(None)
        self._sender.join(seconds)
        # Its number would be another file's, and be written to.
        if not self._sender.is_alive():
            self.connection.close()


class RankChannel:
    """A rank's end of a connection: waits until a message is through. Any thread may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        """Send an ``"answer"``, a ``"failure"`` or a ``"message"``, or nothing and raise what pickling raises."""
        data = encode((kind, content))
        # When the owner is gone, so is this rank in a moment.
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send_bytes(data)

    def __call__(self, message: Any) -> None:
        """Report a message to the owner's ``on_message``."""
        self.send("message", message)

    def reply(self) -> Any:
        """The owner's next reply (`RankPool.reply`); waits for it."""
        return pickle.loads(pickle.loads(self.receive()))

    def receive(self) -> bytes:
        """The next message; `EOFError` when the owner has closed its end."""
        return self._connection.recv_bytes()
