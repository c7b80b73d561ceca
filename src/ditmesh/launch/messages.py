"""What an owner and its ranks say to one another: whole messages through a socket, of which a part may be late."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

HEADER = struct.Struct("!Q")
# Bytes read at once.
CHUNK = 1 << 20


def encode(content: Any) -> bytes:
    """A message for another process, which imports the same modules.

    Functions and classes travel by name. Those that have none there (lambdas, closures, what a notebook defines) travel
    by value, with copies of the globals they use.

    Raises:
        Exception: whatever pickling raises.
    """
    import cloudpickle

    if _main_file() is None:
        return cloudpickle.dumps(content)
    try:
        return pickle.dumps(content)
    except Exception:
        return cloudpickle.dumps(content)


def encode_call(fn: Any, content: Any) -> bytes:
    """`encode` for a message with a function that may be another one in the file of the main module.

    Raises:
        Exception: whatever pickling raises.
    """
    import cloudpickle

    code, main = getattr(fn, "__code__", None), _main_file()
    if code is None or main is None or fn.__module__ != "__main__":
        return encode(content)
    # Defined at a prompt, after the file was run: by name ranks would find the file's, or none.
    typed = os.path.abspath(code.co_filename) != os.path.abspath(main)
    return cloudpickle.dumps(content) if typed else encode(content)


def _main_file() -> str | None:
    """The file of this process's main module, which ranks import as well; None in a notebook or at a prompt."""
    return getattr(sys.modules["__main__"], "__file__", None)


class Channel:
    """The owner's end of a connection: never waits for the rank, not even for the rest of a message."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._incoming = bytearray()
        self._outgoing = bytearray()
        os.set_blocking(connection.fileno(), False)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def sending(self) -> bool:
        """Whether a part of what was to be sent has found no room yet."""
        return bool(self._outgoing)

    def send(self, data: bytes) -> None:
        """Send what the socket takes; `flush` sends the rest."""
        self._outgoing += HEADER.pack(len(data))
        self._outgoing += data
        self.flush()

    def flush(self) -> None:
        """Send more of what is left. A rank that is gone gets nothing: the end of the connection says so."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._connection.fileno(), memoryview(self._outgoing)[:CHUNK])]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._outgoing.clear()

    def received(self) -> Iterator[bytes]:
        """The messages that are complete by now.

        Raises:
            EOFError: the rank has closed its end; after the last message.
        """
        ended = False
        while not ended:
            try:
                data = os.read(self._connection.fileno(), CHUNK)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            ended = not data
            self._incoming += data
        while len(self._incoming) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                break
            message = bytes(memoryview(self._incoming)[HEADER.size : end])
            del self._incoming[:end]
            yield message
        if ended:
            raise EOFError

    def close(self) -> None:
        self._connection.close()


def send(connection: Connection, data: bytes) -> None:
    """A rank's way to send: until all is sent."""
    # When the owner is gone, so is this rank in a moment.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for part in (HEADER.pack(len(data)), data):
            view = memoryview(part)
            while view:
                view = view[os.write(connection.fileno(), view) :]


def receive(connection: Connection) -> bytes:
    """A rank's way to wait for a message.

    Raises:
        EOFError: the owner has closed its end.
    """
    return _exactly(connection, HEADER.unpack(_exactly(connection, HEADER.size))[0])


def _exactly(connection: Connection, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = os.read(connection.fileno(), min(CHUNK, count - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
