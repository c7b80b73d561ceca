"""Messages between processes of one host, through memory that all of them see.

Through a socket a message is packed by the sender, copied into the kernel and out of it again, and by threads that
take their time from the cores the ranks compute on. Here the sender packs it into a piece of shared memory, and the
receiver reads it where it lies. The memory is anonymous (``memfd_create``) and reached through
``/proc/PID/fd/N``: it has no name that could be left behind, whatever ends a process.

A rank's memory begins with a table for every link and receiver: a ring of entries, each of which says where the next
message lies. Behind it are slots, one for a message; a receiver that has no more use for a message marks its slot,
and the slot is used again once all its receivers have done so. There are as many slots as messages were ever on their
way at once. Slots are cut from regions, which are large: a mapping costs a file descriptor, but memory that no rank
has written to costs nothing.

An entry also says what its message is (`Header`): a receiver that waits for another one raises and takes nothing. A
word behind the table says which request has failed on this rank; a waiting rank looks there and waits no more.

Publishing a message is an ordinary store after those of its contents, which other cores see in that order on x86-64
and not everywhere else; other processors do without shared memory.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.alignment import ALIGNMENT, rounded_up
from .objects import gather_objects
from .state import DesyncError, Header, PeerError, RequestState, Spec

# Messages that one rank may have on their way to another on one link.
ENTRIES = 1024
# Words of 8 bytes of an entry: number of the message + 1 (0: the entry is free), place of its slot in the region,
# place and size of the region, the four words of its header.
_ENTRY = 8
_PAGE = mmap.ALLOCATIONGRANULARITY
REGION_BYTES = 1 << 30
# A slot's first page says who has no more use for it: a word for every rank of the job.
MOST_RANKS = _PAGE // 8
# A waiting rank looks so often without a pause, then sleeps ever longer (seconds), and looks whether the other lives.
_LOOKS = 500
_SHORTEST_NAP, _LONGEST_NAP, _SIGN_OF_LIFE = 2e-5, 1e-3, 0.05


@dataclass
class _MessageSlot:
    """A piece of this rank's memory that holds one message at a time."""

    place: int
    region: tuple[int, int]
    taken: memoryview
    contents: Tensor
    receivers: tuple[int, ...] = ()

    def free(self) -> bool:
        return all(self.taken[rank] for rank in self.receivers)


@dataclass
class _Peer:
    """Another rank's memory as this one sees it."""

    process: int
    fd: int
    alive: int | None
    table: memoryview
    regions: dict[int, memoryview] = field(default_factory=dict)

    def gone(self) -> bool:
        """True if the process has ended."""
        if self.alive is None:
            return not Path(f"/proc/{self.process}").exists()
        # Not select(), which takes no number above 1023.
        poll = select.poll()
        poll.register(self.alive, select.POLLIN)
        return bool(poll.poll(0))


class SharedMemory:
    """One rank's side of the memory that the ranks of a job on one host share, for a number of links.

    Made collectively over all ranks, by the process group ``group``, where it is `possible`. ``timeout`` is the
    deadline of every wait, ``near`` are the ranks that share it with this one, itself included. `PeerError`: one of
    them has ended meanwhile.
    """

    def __init__(
        self,
        links: int,
        timeout: timedelta,
        state: RequestState,
        group: dist.ProcessGroup | None,
        near: Collection[int],
    ) -> None:
        self.rank, self._world = dist.get_rank(), dist.get_world_size()
        self.state, self._timeout = state, timeout
        # Number + 1 of the request that has failed on this rank.
        self._failed = links * self._world * ENTRIES * _ENTRY
        self._table_bytes = rounded_up((self._failed + 1) * 8, _PAGE)
        self._slots: dict[int, list[_MessageSlot]] = {}
        self._peers: dict[int, _Peer] = {}
        self._files = ExitStack()
        # Also for a mesh that was never closed.
        weakref.finalize(self, self._files.close)
        self._fd = os.memfd_create("ditmesh", os.MFD_CLOEXEC)
        self._files.callback(os.close, self._fd)
        os.ftruncate(self._fd, self._table_bytes)
        self._table = memoryview(mmap.mmap(self._fd, self._table_bytes)).cast("q")
        # The region that slots are cut from: its place and size, its memory, and what of it is in use.
        self._region, self._memory, self._used = (self._table_bytes, 0), memoryview(b""), 0
        addresses: list[tuple[int, int]] = gather_objects((os.getpid(), self._fd), group)
        for rank, (process, fd) in enumerate(addresses):
            if rank != self.rank and rank in near:
                try:
                    self._peers[rank] = self._open(process, fd)
                except OSError as error:
                    what = f"the memory of rank {rank} (process {process}) cannot be opened ({error.strerror})"
                    raise PeerError(f"{what}; it may have ended: see what it says") from error

    def fail(self) -> None:
        """Tell the ranks that wait for this one that the request has failed here."""
        self._table[self._failed] = self.state.number + 1

    def failed(self, rank: int) -> bool:
        """True if another rank has said that this request has failed there."""
        peer = self._peers.get(rank)
        return peer is not None and peer.table[self._failed] > self.state.number

    def close(self) -> None:
        """Free this rank's memory; parts that others still read stay until they have finished."""
        self._files.close()
        self._peers.clear()
        self._slots.clear()
        self._memory = memoryview(b"")

    def _open(self, process: int, fd: int) -> _Peer:
        opened = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._files.callback(os.close, opened)
        table = memoryview(mmap.mmap(opened, self._table_bytes)).cast("q")
        alive = None
        # Fails on an old kernel, or in a Python built on one.
        with suppress(OSError, AttributeError):
            alive = os.pidfd_open(process)
            self._files.callback(os.close, alive)
        return _Peer(process, opened, alive, table)

    # --- sending -------------------------------------------------------------------------------------------

    def pack(self, tensors: Sequence[Tensor], specs: tuple[Spec, ...], receivers: tuple[int, ...]) -> _MessageSlot:
        """Put a message for some ranks of the job into a slot of its own."""
        places, size = _places(specs)
        slot = self._slot(size)
        slot.receivers = receivers
        for rank in receivers:
            slot.taken[rank] = 0
        for tensor, place, (shape, dtype) in zip(tensors, places, specs, strict=True):
            slot.contents[place].view(dtype).view(shape).copy_(tensor)
        return slot

    def publish(self, slot: _MessageSlot, link: int, receiver: int, number: int, header: Header) -> None:
        """Enter message ``number`` of this link to a rank of the job in the table: its place and its header."""
        table, at = self._table, self._entry(link, receiver, number)
        self.wait(lambda: table[at] == 0, receiver, None)
        table[at + 1], table[at + 2], table[at + 3] = slot.place, *slot.region
        for word, value in enumerate(header, at + 4):
            table[word] = value
        table[at] = number + 1

    def _slot(self, size: int) -> _MessageSlot:
        # Sizes are powers of two so that few slots serve many shapes. Memory that is never written to takes no room.
        size = max(_PAGE, 1 << (size - 1).bit_length())
        slots = self._slots.setdefault(size, [])
        if (free := next((slot for slot in slots if slot.free()), None)) is not None:
            return free
        place, self._used = self._used, self._used + _PAGE + size
        if self._used > self._region[1]:
            self._region = (sum(self._region), max(REGION_BYTES, _PAGE + size))
            os.ftruncate(self._fd, sum(self._region))
            self._memory = memoryview(mmap.mmap(self._fd, self._region[1], offset=self._region[0]))
            place, self._used = 0, _PAGE + size
        memory = self._memory[place : self._used]
        contents = torch.frombuffer(memory[_PAGE:], dtype=torch.uint8)
        slot = _MessageSlot(place, self._region, memory[:_PAGE].cast("q"), contents)
        slots.append(slot)
        return slot

    # --- receiving -----------------------------------------------------------------------------------------

    def take(
        self, link: int, sender: int, number: int, header: Header, specs: tuple[Spec, ...], timeout: timedelta | None
    ) -> list[Tensor]:
        """The tensors of a message; its slot is the sender's again when the last of them is forgotten.

        Raises:
            PeerError: it did not come in time, or never will.
            DesyncError: the message has another header than ``header``.
        """
        self.state.check()
        if (peer := self._peers.get(sender)) is None:
            raise PeerError(f"the request of a message from rank {sender} is over; it cannot be received any more")
        at = self._entry(link, self.rank, number)
        table = peer.table
        self.wait(lambda: table[at] == number + 1, sender, timeout)
        if (sent := Header(*table[at + 4 : at + 8])) != header:
            other = " of other shapes or dtypes" if str(sent) == str(header) else ""
            raise DesyncError(
                f"rank {sender} sent {sent}{other}, but rank {self.rank} expected {header}, {list(specs)}; make the "
                "same calls with the same shapes on every rank"
            )
        slot, region, size = table[at + 1], table[at + 2], table[at + 3]
        table[at] = 0
        if region not in peer.regions:
            peer.regions[region] = memoryview(mmap.mmap(peer.fd, size, offset=region))
        memory = peer.regions[region][slot:]
        places, total = _places(specs)
        contents = memory[_PAGE : _PAGE + total]
        # The tensors keep `contents` alive, and nothing else does.
        weakref.finalize(contents, memory[:_PAGE].cast("q").__setitem__, self.rank, 1).atexit = False
        whole = torch.frombuffer(contents, dtype=torch.uint8)
        return [whole[p].view(dtype).view(shape) for p, (shape, dtype) in zip(places, specs, strict=True)]

    def wait(self, ready: Callable[[], bool], rank: int, timeout: timedelta | None) -> None:
        """Until another rank has done something; `PeerError`: it has ended or failed the request, or is late."""
        if not ready():
            with self.state.waiting():
                self._wait(ready, rank, timeout)

    def _wait(self, ready: Callable[[], bool], rank: int, timeout: timedelta | None) -> None:
        for _ in range(_LOOKS):
            if ready():
                return
            os.sched_yield()
        limit = (self._timeout if timeout is None else timeout).total_seconds()
        began = time.monotonic()
        looked, passed = 0.0, 0.0
        while not ready():
            passed = time.monotonic() - began
            if self.failed(rank) and not ready():
                raise PeerError(f"rank {rank} has failed this request; its own error says why")
            if passed - looked > _SIGN_OF_LIFE:
                looked, peer = passed, self._peers[rank]
                if peer.gone() and not ready():
                    raise PeerError(f"rank {rank} (process {peer.process}) has ended")
            if passed > limit:
                raise PeerError(f"timed out waiting {limit:g} s for rank {rank}")
            time.sleep(min(max(passed / 16, _SHORTEST_NAP), _LONGEST_NAP))

    def _entry(self, link: int, receiver: int, number: int) -> int:
        return ((link * self._world + receiver) * ENTRIES + number % ENTRIES) * _ENTRY


class SharedChannel:
    """Messages of one link, of this number and these global ranks, through shared memory.

    Each rank counts them per peer, as all send and expect them in order.
    """

    def __init__(self, memory: SharedMemory, link: int, ranks: Sequence[int]) -> None:
        self._memory, self._link, self._ranks = memory, link, tuple(ranks)
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()

    def send(self, kind: str, tensors: Sequence[Tensor], to: Sequence[int]) -> None:
        """Send the same tensors, of any strides, to some ranks of the link. They may be written to at once."""
        specs = _with_elements(tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors))
        if not specs or not to:
            return
        header = Header.of(self._memory.state.number, kind, specs)
        with_elements = [tensor for tensor in tensors if tensor.numel()]
        slot = self._memory.pack(with_elements, specs, tuple(self._ranks[rank] for rank in to))
        for rank in to:
            self._memory.publish(slot, self._link, self._ranks[rank], self._sent[rank], header)
            self._sent[rank] += 1

    def expect(self, kind: str, specs: Sequence[Spec], source: int) -> Callable[[timedelta | None], list[Tensor]]:
        """The next message from a rank of the link: a function that waits for it. Call it once, in any order."""
        wanted = _with_elements(tuple(specs))
        header = Header.of(self._memory.state.number, kind, wanted)
        number = self._expected[source]
        if wanted:
            self._expected[source] += 1

        def take(timeout: timedelta | None) -> list[Tensor]:
            sender = self._ranks[source]
            tensors = self._memory.take(self._link, sender, number, header, wanted, timeout) if wanted else []
            if len(tensors) == len(specs):
                return tensors
            taken = iter(tensors)
            return [next(taken) if prod(shape) else torch.empty(shape, dtype=dtype) for shape, dtype in specs]

        return take


# Shapes repeat from block to block.
@lru_cache(maxsize=4096)
def _places(specs: tuple[Spec, ...]) -> tuple[list[slice], int]:
    """Byte offsets of a message's tensors, aligned as torch aligns its own, and the end of the last one."""
    places, end = [], 0
    for shape, dtype in specs:
        start = rounded_up(end, ALIGNMENT)
        end = start + prod(shape) * dtype.itemsize
        places.append(slice(start, end))
    return places, end


@lru_cache(maxsize=4096)
def _with_elements(specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    return tuple((shape, dtype) for shape, dtype in specs if prod(shape))


def possible(ranks: int) -> bool:
    """True if processes of this system can send messages through memory, in a job of so many ranks."""
    system = sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")
    return system and ranks <= MOST_RANKS
