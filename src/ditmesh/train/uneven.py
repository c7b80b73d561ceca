"""Work between collectives that takes ranks as long as it takes them: reading a data set, hashing, encoding.

The deadline of a collective is there for ranks that do not come. One that has ten times as much to encode comes late
and is well. So ranks tell one another through the job's store how far they are, and the deadline counts from the last
progress of each: a rank that gets on is waited for, and one that does not is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from ..comm.mesh import Mesh
from ..comm.state import PeerError
from ..errors import first_line

# Seconds between two looks at the others while this rank works, and at most while it waits.
LOOK = 0.5

# Takes the work, how many parts of it all ranks have done, and of how many; 0 is not known yet.
Show = Callable[[str, int, int], None]


class Advance:
    """The callback for progress inside `uneven_work`: ``advance(done, total)``.

    Raises `PeerError`: another rank has failed, or makes no progress; names it.
    """

    def __init__(self, mesh: Mesh, what: str, name: str, show: Show | None) -> None:
        self._mesh, self._what, self._name, self._show = mesh, what, name, show
        self._others = [rank for rank in range(mesh.world_size) if rank != mesh.rank]
        self._mine = "working 0 0"
        # For every rank its last message, and when this rank saw it first.
        self._seen: dict[int, tuple[str, float]] = {}
        self._looked = float("-inf")

    def __call__(self, done: int, total: int = 0) -> None:
        self._mine = f"working {done} {total}"
        if time.monotonic() - self._looked >= LOOK:
            self.say(self._mine)
            self._look()

    def say(self, message: str) -> None:
        """Tell the others a state, and how far this rank is."""
        self._mine = message
        if self._others:
            dist.distributed_c10d._get_default_store().set(f"ditmesh/{self._name}/{self._mesh.rank}", message)

    def finish(self) -> None:
        """Say that this rank is done, and wait for the others."""
        self.say(self._mine.replace("working", "done"))
        pause = LOOK / 64
        while not self._look():
            time.sleep(pause)
            pause = min(2 * pause, LOOK)

    def _look(self) -> bool:
        """See how far the others are; whether all are done."""
        self._looked = now = time.monotonic()
        messages = dict.fromkeys(self._others, "")
        for rank in self._others:
            store, key = dist.distributed_c10d._get_default_store(), f"ditmesh/{self._name}/{rank}"
            if store.check([key]):
                messages[rank] = store.get(key).decode()
        for rank, message in messages.items():
            if message.startswith("failed"):
                raise PeerError(f"rank {rank} has failed while {self._what}; see its own error")
            if rank not in self._seen or self._seen[rank][0] != message:
                self._seen[rank] = message, now
            limit = self._mesh.deadline
            if now - self._seen[rank][1] > limit and not message.startswith("done"):
                _, done, total = message.split() if message else ("", "0", "0")
                of = "" if total == "0" else f" of {total}"
                where = f"it stands at {done}{of}" if message else "it has not begun"
                raise PeerError(f"rank {rank} has not got on with {self._what} for {limit:g} s ({where})")
        if self._show is not None:
            counts = [tuple(map(int, message.split()[1:])) for message in (self._mine, *messages.values()) if message]
            self._show(self._what, sum(done for done, _ in counts), sum(total for _, total in counts))
        return all(message.startswith("done") for message in messages.values())


@contextmanager
def uneven_work(mesh: Mesh, what: str, show: Show | None = None) -> Iterator[Advance]:
    """Around work that ranks do at their own pace; at the end they wait for one another. Collective.

    Args:
        what: for messages, such as ``"encoding samples"``.
        show: called on this rank every half second at most, between two parts of the work or while it waits.

    Raises:
        PeerError: another rank has failed, or has not got on for as long as a collective may wait.
    """
    advance = Advance(mesh, what, mesh.world.broadcast_object(f"uneven-{time.time_ns()}"), show)
    try:
        advance.say("working 0 0")
        yield advance
        advance.finish()
    except PeerError:
        # The others find the same, or what this rank has found.
        raise
    except BaseException as error:
        # The store may be what has failed.
        with suppress(RuntimeError):
            advance.say("failed 0 0")
        if isinstance(error, dist.DistError):
            raise PeerError(f"the store of the job's ranks is gone ({first_line(error)})") from error
        raise
