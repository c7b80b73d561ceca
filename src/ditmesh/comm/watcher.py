"""A thread of every rank that hears at once when another rank fails a request, or ends.

Over gloo a rank that fails closes its connections, which ends its peers' waiting. NCCL tells them nothing: their hosts
run ahead until they need a value, and then wait behind a kernel that waits for its peer. Only a thread that waits
elsewhere can end that, by aborting the groups.

The ranks form a ring over a gloo group of their own. Every thread waits for a notice of the rank before, and passes it
on. It costs nothing meanwhile, and sees when that rank's connection closes.
"""

from __future__ import annotations

import atexit
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

# The rank has failed a request; the rank leaves the ring.
_FAILED, _LEFT = range(2)
_NOTICE = struct.Struct("<3q488s")
# Longest wait for a thread at the end of a process, in seconds: the rank before leaves the ring as well.
_END = 1.0

_WATCHING: weakref.WeakSet[FailureWatcher] = weakref.WeakSet()


class Notice(NamedTuple):
    """What a rank has failed of.

    Attributes:
        rank: the failed one.
        request: number of the request; None: the rank has ended, and fails every request.
        reason: its error, one line.
    """

    rank: int
    request: int | None
    reason: str


class FailureWatcher:
    """Tells the other ranks of a failure, and hears of theirs."""

    def __init__(self, group: dist.ProcessGroup, hear: Callable[[Notice], None]) -> None:
        """Begin to listen.

        Args:
            group: a gloo group of all ranks, used by nothing else, without a deadline. It is given back in `close`.
            hear: called with every notice of another rank, in the watcher's thread.
        """
        self._group, self._rank, self._size = group, dist.get_rank(), dist.get_world_size()
        self._open = True
        thread = threading.Thread(target=_listen, args=(group, weakref.WeakMethod(hear), self._rank, self._size))
        thread.name, thread.daemon = "ditmesh-failure-watcher", True
        self._thread = thread
        thread.start()
        _WATCHING.add(self)

    def tell(self, request: int, reason: str) -> None:
        """Tell all other ranks that this one has failed a request."""
        if self._open:
            _send(self._group, (self._rank + 1) % self._size, _FAILED, Notice(self._rank, request, reason))

    def close(self) -> None:
        """Leave the ring; the thread ends when the rank before has left it, too."""
        if self._open:
            self._open = False
            _send(self._group, (self._rank + 1) % self._size, _LEFT, Notice(self._rank, None, ""))
            with suppress(ValueError):
                dist.destroy_process_group(self._group)


def _listen(group: dist.ProcessGroup, hear: weakref.WeakMethod[Callable[[Notice], None]], rank: int, size: int) -> None:
    before, after = (rank - 1) % size, (rank + 1) % size
    kind = _FAILED
    while kind == _FAILED:
        box = torch.empty(_NOTICE.size, dtype=torch.uint8)
        try:
            group.recv([box], before, 0).wait()
            kind, failed, request, text = _NOTICE.unpack(bytes(box.tolist()))
            notice = Notice(failed, None if request < 0 else request, text.rstrip(b"\0").decode(errors="replace"))
        except RuntimeError:
            kind, notice = _LEFT, Notice(before, None, "it has ended")
        else:
            if kind == _LEFT:
                return
        # First: what is done about it may take a moment.
        if after != notice.rank:
            _send(group, after, _FAILED, notice)
        if (call := hear()) is not None:
            call(notice)


def _send(group: dist.ProcessGroup, to: int, kind: int, notice: Notice) -> None:
    """Send a notice; a rank that has ended needs none, and the one behind it has seen its end."""
    request = -1 if notice.request is None else notice.request
    words = _NOTICE.pack(kind, notice.rank, request, notice.reason.encode()[: _NOTICE.size - 24])
    with suppress(RuntimeError):
        group.send([torch.frombuffer(bytearray(words), dtype=torch.uint8)], to, 0).wait()


@atexit.register
def stop_watching() -> None:
    """Leave all rings: this process ends, and has not failed. A thread must not be met by the end of the interpreter.

    `atexit` calls it; processes that end without that call it themselves.
    """
    watchers = list(_WATCHING)
    for watcher in watchers:
        watcher.close()
    for watcher in watchers:
        watcher._thread.join(_END)
