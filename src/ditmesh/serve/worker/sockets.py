"""Connections of rank 0 with the other ranks of its host."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Seconds in which a rank that listens answers one on its host.
PATIENCE = 30.0


def connected(rank: int, size: int, gather: Callable[[Any], list[Any]]) -> dict[int, Connection] | None:
    """Connections between rank 0 and each other rank, over Unix sockets in a folder of this user alone.

    A collective call of all ranks. gloo hands every message to a thread of its own on both sides, and back.

    Args:
        rank, size: this rank, and their number.
        gather: every rank's value, in rank order.

    Returns:
        On rank 0 the other ranks' connections, elsewhere rank 0's, by rank; None on all ranks: one of them
        does not reach rank 0 in this way, since it is on another host or the system has no such sockets.
    """
    listener, folder = _listener(size) if rank == 0 else (None, None)
    try:
        path = gather(None if folder is None else str(folder / "socket"))[0]
        own: socket.socket | None = None
        if rank > 0 and path is not None:
            own = _reached(path, rank)
        if not all(gather(own is not None)[1:]) or path is None:
            if own is not None:
                own.close()
            return None
        if rank > 0:
            assert own is not None
            return {0: Connection(own.detach())}
        assert listener is not None
        return _accepted(listener, size)
    finally:
        if listener is not None:
            listener.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _listener(size: int) -> tuple[socket.socket | None, Path | None]:
    folder = None
    with suppress(OSError, AttributeError):
        # Others cannot enter it.
        folder = Path(tempfile.mkdtemp(prefix="ditmesh-"))
        listener = socket.socket(socket.AF_UNIX)
        listener.settimeout(PATIENCE)
        listener.bind(str(folder / "socket"))
        listener.listen(size)
        return listener, folder
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return None, None


def _reached(path: str, rank: int) -> socket.socket | None:
    with suppress(OSError, AttributeError):
        own = socket.socket(socket.AF_UNIX)
        own.settimeout(PATIENCE)
        own.connect(path)
        own.sendall(rank.to_bytes(4, "little"))
        own.settimeout(None)
        return own
    return None


def _accepted(listener: socket.socket, size: int) -> dict[int, Connection]:
    found = {}
    while len(found) < size - 1:
        one, _ = listener.accept()
        one.settimeout(PATIENCE)
        number = int.from_bytes(one.recv(4, socket.MSG_WAITALL), "little")
        one.settimeout(None)
        found[number] = Connection(one.detach())
    return found
