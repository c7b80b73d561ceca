"""Work between collectives that takes ranks as long as it takes them: reading a data set, hashing, encoding.

The deadline of a collective is there for ranks that do not come. One that has ten times as much to encode comes late
and is well. So ranks tell one another through the job's store how far they are, and the deadline counts from the last
progress of each: a rank that gets on is waited for, and one that does not is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..comm.mesh import Mesh
from ..comm.state import PeerError
from ..errors import first_line

# Seconds between two looks at the others while this rank works, and at most while it waits.
LOOK = 0.5

_WORKING, _DONE, _FAILED = "working", "done", "failed"


@dataclass(frozen=True)
class RankProgress:
    """The progress of one rank: ``done`` of ``total`` parts; a total of 0 is not known yet."""

    done: int = 0
    total: int = 0


# Takes how far every rank is, in rank order.
Show = Callable[[list[RankProgress]], None]


class Advance:
    """The callback for progress inside `uneven_work`: ``advance(done, total)``.

    Raises:
        PeerError: another rank has failed, or makes no progress; names it.
    """

    def __init__(self, mesh: Mesh, what: str, name: str, show: Show | None) -> None:
        self._mesh, self._what, self._name, self._show = mesh, what, name, show
        self._mine = RankProgress()
        self._others = [rank for rank in range(mesh.world_size) if rank != mesh.rank]
        # For every rank its last message, and when this rank saw it first.
        self._seen: dict[int, tuple[str, float]] = {}
        self._looked = float("-inf")

    def __call__(self, done: int, total: int = 0) -> None:
        self._mine = RankProgress(done, total)
        if time.monotonic() - self._looked >= LOOK:
            self._say(_WORKING)
            self._look()

    def begin(self) -> None:
        """Say that this rank is here."""
        self._say(_WORKING)

    def finish(self) -> None:
        """Say that this rank is done, and wait for the others."""
        self._say(_DONE)
        pause = LOOK / 64
        while not self._look():
            time.sleep(pause)
            pause = min(2 * pause, LOOK)

    def fail(self) -> None:
        """Say that this rank has failed."""
        # The store may be what has failed.
        with suppress(RuntimeError):
            self._say(_FAILED)

    def _say(self, state: str) -> None:
        if self._others:
            self._asked(lambda store: store.set(self._key(self._mesh.rank), self._packed(state)))

    def _packed(self, state: str) -> str:
        return f"{state} {self._mine.done} {self._mine.total}"

    def _key(self, rank: int) -> str:
        return f"ditmesh/{self._name}/{rank}"

    def _asked(self, call: Callable[[Any], object]) -> object:
        try:
            return call(dist.distributed_c10d._get_default_store())
        except RuntimeError as error:
            raise PeerError(f"the store of the job's ranks is gone ({first_line(error)})") from error

    def _look(self) -> bool:
        """See how far the others are; whether all are done."""
        self._looked = now = time.monotonic()
        states = {rank: self._message(rank) for rank in self._others}
        failed = [rank for rank, message in states.items() if message.startswith(_FAILED)]
        if failed:
            raise PeerError(f"rank {failed[0]} has failed while {self._what}; see its own error")
        for rank, message in states.items():
            if rank not in self._seen or self._seen[rank][0] != message:
                self._seen[rank] = message, now
            silent, limit = now - self._seen[rank][1], self._mesh.deadline
            if silent > limit and not message.startswith(_DONE):
                raise PeerError(f"rank {rank} has not got on with {self._what} for {limit:g} s ({_where(message)})")
        if self._show is not None:
            every = {self._mesh.rank: self._mine} | {rank: _unpacked(message) for rank, message in states.items()}
            self._show([every[rank] for rank in sorted(every)])
        return all(message.startswith(_DONE) for message in states.values())

    def _message(self, rank: int) -> str:
        key = self._key(rank)

        def ask(store: Any) -> str:
            return store.get(key).decode() if store.check([key]) else ""

        return str(self._asked(ask))


def _unpacked(message: str) -> RankProgress:
    return RankProgress(*map(int, message.split()[1:]))


def _where(message: str) -> str:
    now = _unpacked(message)
    if not message:
        return "it has not begun"
    return f"it stands at {now.done} of {now.total}" if now.total else f"it stands at {now.done}"


@contextmanager
def uneven_work(mesh: Mesh, what: str, show: Show | None = None) -> Iterator[Advance]:
    """Around work that ranks do at their own pace; at the end they wait for one another. Collective.

    Args:
        mesh: the ranks, and their deadline.
        what: for messages, such as ``"encoding samples"``.
        show: called on this rank every half second at most, between two parts of the work or while it waits.

    Raises:
        PeerError: another rank has failed, or has not got on for as long as a collective may wait.
    """
    name = mesh.world.broadcast_object(f"uneven-{time.time_ns()}")
    advance = Advance(mesh, what, name, show)
    try:
        advance.begin()
        yield advance
        advance.finish()
    except PeerError:
        # The others find the same, or what this rank has found.
        raise
    except BaseException:
        advance.fail()
        raise
