"""A rank without peers: links that send nothing and use the same memory as real links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ..comm import Link, Traffic, Transfer
from ..comm.grid import LINKS
from ..comm.mesh import Mesh
from ..comm.shared import Spec, message_bytes
from ..comm.transports import Way
from ..config import ParallelConfig
from ..core.alive import LiveBytes

# Maximum number of pending messages.
_UNDER_WAY = 2


@dataclass
class _PhantomSlot:
    touched: int = 0
    free: bool = True


@dataclass
class _Pool:
    """Slots of one rank's shared memory, taken as `ditmesh.comm.shared.SharedMemory` takes them.

    Attributes:
        bytes: that were ever written to.
    """

    slots: dict[int, list[_PhantomSlot]] = field(default_factory=dict)
    bytes: int = 0

    def take(self, size: int) -> _PhantomSlot:
        among = self.slots.setdefault(1 << max(12, (size - 1).bit_length()), [])
        slot = next((slot for slot in among if slot.free), None)
        if slot is None:
            among.append(slot := _PhantomSlot())
        slot.free = False
        self.bytes += max(0, size - slot.touched)
        slot.touched = max(size, slot.touched)
        return slot


class SharedPools:
    """Shared memory that a rank sees.

    Args:
        alive: counts tensors, of which those in shared memory are none.

    Attributes:
        own: the memory of this rank's messages.
        others: what other ranks have written theirs for this one to.
    """

    def __init__(self, alive: LiveBytes) -> None:
        self.alive = alive
        self.own = _Pool()
        self.others: dict[int, _Pool] = {}

    def message(self, size: int) -> Tensor:
        """A message of another rank, which is no tensor of this one's."""
        before = self.alive.peak
        whole = torch.empty(size, dtype=torch.uint8)
        self.alive.ignore(whole)
        self.alive.peak = before
        return whole

    @property
    def bytes(self) -> int:
        """Bytes of all messages, own and others'."""
        return self.own.bytes + sum(pool.bytes for pool in self.others.values())


class _Channel:
    """Messages of one link, as `ditmesh.comm.shared.SharedChannel` passes them on. All ranks do as this one does."""

    def __init__(self, pools: SharedPools, ranks: Sequence[int]) -> None:
        self._pools, self._ranks = pools, ranks
        self._unanswered: list[_PhantomSlot] = []

    def send(self, kind: str, tensors: Sequence[Tensor], to: Sequence[int]) -> None:
        if (size := message_bytes([(tuple(t.shape), t.dtype) for t in tensors])) and to:
            self._unanswered.append(self._pools.own.take(size))
            while len(self._unanswered) > _UNDER_WAY * len(self._ranks):
                self._unanswered.pop(0).free = True

    def expect(self, kind: str, specs: Sequence[Spec], source: int) -> Callable[[timedelta | None], list[Tensor]]:
        # When this rank forgets a message, the other one has forgotten its own.
        answered = self._unanswered.pop(0) if self._unanswered else _PhantomSlot()

        def take(timeout: timedelta | None) -> list[Tensor]:
            size = message_bytes(specs)
            slots = [answered]
            if size:
                slots.append(self._pools.others.setdefault(self._ranks[source], _Pool()).take(size))
            whole = self._pools.message(size)
            finalize(whole.untyped_storage(), _freed, slots).atexit = False
            return [_inside(whole, shape, dtype) for shape, dtype in specs]

        return take


def _freed(slots: Sequence[_PhantomSlot]) -> None:
    for slot in slots:
        slot.free = True


def _inside(whole: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return whole[:count].view(dtype).view(shape)


class PhantomLink(Link):
    """A `Link` to absent ranks. Received tensors have shapes and no values.

    Args:
        name, size, rank: as of `Link`.
        traffic: what counts the bytes sent.
        pools: shared memory of the ranks; None: tensors travel over a process group.
        listen: told of each exchange: the link's name, its kind and the bytes that this rank sends.

    Attributes:
        over: what is gathered from now on is not looked at: weights that are put together behind the last step.
    """

    def __init__(
        self,
        name: str,
        size: int,
        rank: int,
        traffic: Traffic,
        pools: SharedPools | None,
        listen: Callable[[str, str, int], None] | None = None,
    ) -> None:
        super().__init__(name, range(size), rank, traffic)
        self._listen = listen
        self.over = False
        # It stands for a `SharedChannel`.
        self.connect(None, None if pools is None or size == 1 else _Channel(pools, range(size)))  # type: ignore[arg-type]

    @property
    def transport(self) -> str:
        return "nothing"

    @property
    def _way(self) -> Way:
        # Messages of gloo go pair by pair.
        return "tags" if self._channel is None else "memory"

    def all_gather(self, piece: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        if not self.over:
            return super().all_gather(piece, lengths, dim)
        return piece.new_empty((*piece.shape[:dim], sum(lengths), *piece.shape[dim + 1 :]))

    def _together(self, collective: Callable[..., Any], *tensors: Any) -> None:
        """Ranks that are not there have the same."""
        if self._listen is not None:
            sent = sum(each.nbytes for each in tensors if isinstance(each, Tensor))
            self._listen(self.name, collective.__name__, sent)

    def _start(
        self,
        kind: str,
        outgoing: Sequence[tuple[Sequence[Tensor], Sequence[int]]],
        incoming: Sequence[tuple[Sequence[Tensor], int]],
    ) -> Transfer:
        if self._listen is not None:
            self._listen(self.name, kind, sum(each.nbytes * len(to) for tensors, to in outgoing for each in tensors))
        if self._channel is not None:
            return super()._start(kind, outgoing, incoming)
        sent = [tensor.contiguous() for tensors, _ in outgoing for tensor in tensors]
        return Transfer([tensor for tensors, _ in incoming for tensor in tensors], sent, link=self.name)


def phantom_mesh(
    config: ParallelConfig,
    pools: SharedPools | None,
    listen: Callable[[str, str, int], None] | None = None,
) -> Mesh:
    """The mesh of one rank of a configuration, without the others: the first, which has no less than any other.

    Args:
        config: degrees.
        pools: shared memory of the ranks; None: they have none.
        listen: as of `PhantomLink`.
    """
    traffic = Traffic()
    sizes = {name: config.size_of(axes) for name, axes in LINKS.items()} | {"shard": config.shard}
    links = {name: PhantomLink(name, sizes[name], 0, traffic, pools, listen) for name in LINKS}
    return Mesh(config, "cpu", links=links)
