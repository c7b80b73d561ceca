"""Messages between an owner and its ranks: whole ones through a socket, of which a part may be late."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

HEADER = struct.Struct("!Q")
# Bytes read at once.
READ_BYTES = 1 << 20


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


def encode_message(message: Any) -> bytes:
    """``("message", message)`` for the owner, as `encode` has it.

    Messages of ditmesh's own classes hold data only, and a server's rank sends several with every step: the plain
    pickler takes a tenth of cloudpickle's time.
    """
    if type(message).__module__.partition(".")[0] == __name__.partition(".")[0]:
        with contextlib.suppress(Exception):
            return pickle.dumps(("message", message))
    return encode(("message", message))


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


@dataclass(frozen=True)
class Reply:
    """A message of the owner to a rank in the middle of a call, pickled."""

    content: bytes


class OwnerChannel:
    """The owner's end of a connection: never waits for the rank, not even for the rest of a message.

    Any thread may send; one receives.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._lock = threading.Lock()
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def sending(self) -> bool:
        """True if a part of a message waits for room in the socket."""
        return bool(self._outgoing)

    def send(self, data: bytes) -> None:
        """Send as much as the socket takes; `flush` sends the rest."""
        with self._lock:
            self._outgoing += HEADER.pack(len(data))
            self._outgoing += data
            self._flush()

    def flush(self) -> None:
        """Send more of the rest. A rank that has ended gets nothing: the end of the connection shows it."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        try:
            # A closed connection has no number any more.
            while self._outgoing and self._connection.fileno() >= 0:
                del self._outgoing[: self._connection.send(memoryview(self._outgoing)[:READ_BYTES])]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            pass
        self._outgoing.clear()

    def received(self) -> Iterator[bytes]:
        """The messages that are complete by now; after the last, `EOFError` when the rank has closed its end."""
        data = b"more"
        while data:
            try:
                data = self._connection.recv(READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            self._incoming += data
        while len(self._incoming) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                break
            message = bytes(memoryview(self._incoming)[HEADER.size : end])
            del self._incoming[:end]
            yield message
        if not data:
            raise EOFError

    def close(self) -> None:
        with self._lock:
            self._connection.close()


class RankChannel:
    """A rank's end of a connection: waits until a message is through. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        """Send an ``"answer"``, a ``"failure"`` or a ``"message"``, or nothing and raise what pickling raises."""
        data = encode((kind, content)) if kind != "message" else encode_message(content)
        # When the owner is gone, so is this rank in a moment.
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(HEADER.pack(len(data)))
            self._connection.sendall(data)

    def __call__(self, message: Any) -> None:
        """Report a message to the owner's ``on_message``."""
        self.send("message", message)

    def reply(self) -> Any:
        """The owner's next reply (`RankPool.reply`); waits for it."""
        return pickle.loads(pickle.loads(self.receive()).content)

    def receive(self) -> bytes:
        """The next message; `EOFError` when the owner has closed its end."""
        (size,) = HEADER.unpack(self._read(HEADER.size))
        return self._read(size)

    def _read(self, count: int) -> bytes:
        data = self._reader.read(count)
        if len(data) < count:
            raise EOFError
        return data
