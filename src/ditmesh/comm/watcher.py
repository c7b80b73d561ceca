"""A thread on every rank that receives the failures of other ranks immediately.

A rank that fails over gloo closes its connections, and its peers stop waiting. NCCL reports nothing: the peers' hosts
run ahead until they need a value, and then wait for a kernel that waits for its peer. Only another thread can end that
wait, by aborting the groups.

The ranks form a ring over a gloo group of their own. The thread waits for a notice from the previous rank and passes it
on. It uses no time meanwhile, and receives an error when the previous rank's connection closes.
"""

from __future__ import annotations

import atexit
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

# Kinds of notices: a rank has failed a request; the previous rank leaves the ring.
_FAILED, _LEFT = range(2)
_NOTICE = struct.Struct("<3q488s")
# Seconds to wait for a thread at the end of a process, while the previous rank leaves the ring as well.
_END_SECONDS = 1.0
# Seconds to wait until the next rank knows that this one leaves the ring: its process may be stopped.
_LEAVING_SECONDS = 30.0
# Notices under way to the next rank before this one waits for the first of them.
_UNDER_WAY = 64

_WATCHING: weakref.WeakSet[FailureWatcher] = weakref.WeakSet()
# The connections of the ring stay those of the process that has the threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_WATCHING.clear)


class Notice(NamedTuple):
    """A failure of a rank; ``request``: number of the request; None: the rank has ended, and fails every request."""

    rank: int
    request: int | None
    reason: str


class FailureWatcher:
    """Sends this rank's failures to the other ranks, and receives theirs."""

    def __init__(self, group: dist.ProcessGroup, receive: Callable[[Notice], None]) -> None:
        """Start the thread.

        Args:
            group: a gloo group of all ranks, used by nothing else, without a deadline. It is given back in `close`.
            receive: called with every notice of another rank, in the watcher's thread; a bound method.
        """
        self._group, self._rank, size = group, dist.get_rank(), dist.get_world_size()
        self._following = _Following(group, (self._rank + 1) % size)
        self._open = True
        arguments = group, self._following, weakref.WeakMethod(receive), self._rank, size
        thread = threading.Thread(target=_listen, args=arguments)
        thread.name, thread.daemon = "ditmesh-failure-watcher", True
        self._thread = thread
        thread.start()
        _WATCHING.add(self)

    def tell(self, request: int, reason: str) -> None:
        """Tell all other ranks that this one has failed a request; returns at once."""
        if self._open:
            self._following.post(_FAILED, Notice(self._rank, request, reason))

    def close(self, seconds: float = _LEAVING_SECONDS) -> None:
        """Leave the ring; the thread ends when the previous rank has left it, too.

        ``seconds``: how long to wait until the next rank knows. After them it takes this one's process for ended.
        """
        if self._open:
            self._open = False
            self._following.post(_LEFT, Notice(self._rank, None, ""))
            self._following.wait(seconds)
            with suppress(ValueError):
                dist.destroy_process_group(self._group)
            # gloo's threads end with the last reference, and a closed mesh may be held for long.
            del self._group, self._following


class _Following:
    """The next rank of the ring, to which notices are sent without waiting for it.

    gloo ends a send when the other side receives. Ranks that waited for that before they receive themselves would wait
    for one another for ever when all of them fail at once.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._group, self.rank = group, rank
        # With their buffers.
        self._posted: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def post(self, kind: int, notice: Notice) -> None:
        """Send a notice; if the receiver has ended, its successor has seen the closed connection."""
        request = -1 if notice.request is None else notice.request
        words = _NOTICE.pack(kind, notice.rank, request, notice.reason.encode()[: _NOTICE.size - 24])
        box = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        with suppress(RuntimeError):
            self._posted.append((self._group.send([box], self.rank, 0), box))
            if len(self._posted) > _UNDER_WAY:
                self._posted.popleft()[0].wait()

    def wait(self, seconds: float) -> None:
        """Until everything has arrived, or for so many seconds each."""
        with suppress(RuntimeError, IndexError):
            while True:
                self._posted.popleft()[0].wait(timedelta(seconds=seconds))


def _listen(
    group: dist.ProcessGroup,
    following: _Following,
    receive: weakref.WeakMethod[Callable[[Notice], None]],
    rank: int,
    size: int,
) -> None:
    previous = (rank - 1) % size
    kind = _FAILED
    while kind == _FAILED:
        box = torch.empty(_NOTICE.size, dtype=torch.uint8)
        try:
            group.recv([box], previous, 0).wait()
            kind, failed, request, text = _NOTICE.unpack(bytes(box.tolist()))
            notice = Notice(failed, None if request < 0 else request, text.rstrip(b"\0").decode(errors="replace"))
        except RuntimeError:
            kind, notice = _LEFT, Notice(previous, None, "its process has ended")
        else:
            if kind == _LEFT:
                break
        # Before the abort, which may take a moment.
        if following.rank != notice.rank:
            following.post(_FAILED, notice)
        if (call := receive()) is not None:
            call(notice)
    following.wait(_END_SECONDS)


@atexit.register
def stop_watching() -> None:
    """Leave all rings and end their threads, at the end of a process that has not failed.

    Registered with `atexit`; processes without exit handlers call it themselves.
    """
    watchers = list(_WATCHING)
    for watcher in watchers:
        watcher.close(_END_SECONDS)
    for watcher in watchers:
        watcher._thread.join(_END_SECONDS)
