"""Collectives and transfers between the ranks of one mesh axis: all_to_all, all_gather, all_reduce, shift, send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .backends import CARRIED
from .objects import broadcast_object, gather_objects
from .transports import Transfer, Transports

# For every rank of a link, tensors; for every rank, shapes.
TensorsByRank = Sequence[Sequence[Tensor]]
ShapesByRank = Sequence[Sequence[tuple[int, ...]]]

# Pieces of unlike sizes are filled up to the longest as long as so many times of their elements travel: in one
# all-gather, of which every rank sends its piece once.
_FILLED = 1.5
# Its name in this torch.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Link(Transports):
    """The ranks this rank shares one mesh axis with.

    Tensors travel through shared memory where the ranks have some, else over the process group; see `connect`.

    Attributes:
        name: the axis, under which bytes are counted.
        ranks: global ranks of the group, in axis order.
        rank, size: this rank's place in the group, and the group's size. A group of one never communicates.
        traffic: what counts the bytes sent.
    """

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order: anything that can be pickled. Not counted."""
        every: list[Any] = [value] * self.size
        if self.size > 1:
            self._enter("all_gather_object")
            every = self._together(gather_objects, value)
        return every

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """One rank's value, on every rank: anything that can be pickled. Not counted."""
        if self.size > 1:
            self._enter("broadcast_object")
            value = self._together(broadcast_object, value, self.ranks[source])
        return value

    def all_to_all_packed(
        self, packed: Tensor, outgoing: Sequence[int], incoming: Sequence[int]
    ) -> Callable[[], Tensor]:
        """All-to-all of one buffer, where the link `packs`; returns at once: a function that waits for the result.

        One kernel packs it, however many ranks there are; so does the part that a rank sends to itself.

        Args:
            packed: contiguous and 1-D: the elements for every rank, in rank order. Not written to before the wait.
            outgoing: how many of its elements go to every rank of the group.
            incoming: how many come from each.

        Returns the elements of all ranks, in rank order.
        """
        self._enter("all_to_all")
        self.traffic.add(self.name, sum(outgoing[peer] for peer in self._others) * packed.element_size())
        receive = packed.new_empty(sum(incoming))
        transfer = self._posted(packed, receive, dist.all_to_all_single, [*incoming], [*outgoing])
        return lambda: transfer.wait()[0]

    def all_to_all(self, outgoing: TensorsByRank, shapes: ShapesByRank) -> list[list[Tensor]]:
        """All-to-all with tensors of their own shapes for every pair of ranks.

        Args:
            outgoing: for every rank of the group the tensors it is to have, any strides; all of one dtype.
            shapes: shapes of the tensors that every rank sends here.

        Returns the tensors from every rank, contiguous; in this rank's own place its own tensors, untouched.
        """
        return self._exchange("all_to_all", outgoing, shapes)()

    def _exchange(self, kind: str, outgoing: TensorsByRank, shapes: ShapesByRank) -> Callable[[], list[list[Tensor]]]:
        if self.size == 1:
            return lambda: [list(outgoing[0])]
        if not any(outgoing) and not any(shapes):
            return lambda: [[] for _ in outgoing]
        self._enter(kind)
        return self._all_to_all(kind, outgoing, shapes)

    def _all_to_all(self, kind: str, outgoing: TensorsByRank, shapes: ShapesByRank) -> Callable[[], list[list[Tensor]]]:
        if self._way == "memory":
            return self._exchange_shared(kind, outgoing, shapes)
        return self._exchange_packed(kind, outgoing, shapes)

    def _exchange_shared(
        self, kind: str, outgoing: TensorsByRank, shapes: ShapesByRank
    ) -> Callable[[], list[list[Tensor]]]:
        shared, me, others, mine = self._channel, self.rank, self._others, list(outgoing[self.rank])
        assert shared is not None
        dtype = mine[0].dtype
        self.traffic.add(self.name, sum(t.nbytes for peer in others for t in outgoing[peer]))
        if kind == "all_gather":
            # One message for all.
            shared.send(kind, mine, others)
        else:
            for peer in others:
                shared.send(kind, outgoing[peer], [peer])
        receive = {
            peer: shared.expect(kind, [(tuple(shape), dtype) for shape in shapes[peer]], peer) for peer in others
        }

        def wait() -> list[list[Tensor]]:
            return [mine if peer == me else receive[peer](None) for peer in range(self.size)]

        return wait

    def _exchange_packed(
        self, kind: str, outgoing: TensorsByRank, shapes: ShapesByRank
    ) -> Callable[[], list[list[Tensor]]]:
        """Over the process group, one message per peer: the tensors for it lie one after the other."""
        me, others, mine = self.rank, self._others, list(outgoing[self.rank])
        assert mine[0].dtype in CARRIED, f"NCCL does not carry {mine[0].dtype}"
        in_splits = [0 if peer == me else sum(t.numel() for t in parts) for peer, parts in enumerate(outgoing)]
        out_splits = [0 if peer == me else sum(map(prod, wanted)) for peer, wanted in enumerate(shapes)]
        send = mine[0].new_empty(sum(in_splits))
        parts = [part for peer in others for part in outgoing[peer]]
        for place, part in zip(_views(send, [part.shape for part in parts]), parts, strict=True):
            place.copy_(part)
        receive = send.new_empty(sum(out_splits))
        self.traffic.add(self.name, send.nbytes)
        transfer = None
        way = self._way
        if way == "tags":
            # gloo takes a short message for a long one, and ends the process over the opposite: tags tell them apart.
            chunks, places = send.split(in_splits), receive.split(out_splits)
            transfer = self._start(kind, [([chunks[p]], [p]) for p in others], [([places[p]], p) for p in others])
        elif way == "graph":
            dist.all_to_all_single(receive, send, out_splits, in_splits, group=self.group)
        else:
            transfer = self._posted(send, receive, dist.all_to_all_single, out_splits, in_splits)

        def wait() -> list[list[Tensor]]:
            if transfer is not None:
                transfer.wait()
            return [
                mine if peer == me else _views(chunk, shapes[peer])
                for peer, chunk in enumerate(receive.split(out_splits))
            ]

        return wait

    def all_gather(self, piece: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        """Every rank's piece, in rank order, along ``dim``; on every rank.

        Args:
            lengths: sizes along ``dim`` of every rank's piece, which may differ.
            dim: dimension that was cut (not negative).
        """
        if self.size == 1:
            return piece
        shapes = [[(*piece.shape[:dim], length, *piece.shape[dim + 1 :])] for length in lengths]
        if self.packs and len(set(lengths)) == 1 and prod(piece.shape[:dim]) == 1 and piece.numel():
            # The received pieces lie one after the other.
            whole = self._gather_packed([piece], [piece.numel()] * self.size)
            return whole.view(*piece.shape[:dim], sum(lengths), *piece.shape[dim + 1 :])
        return torch.cat([part for (part,) in self._gather([piece], shapes)], dim=dim)

    def all_gather_list(self, tensors: Sequence[Tensor], shapes: ShapesByRank) -> list[list[Tensor]]:
        """Every rank's tensors, on every rank; the received ones are this rank's alone, to be written to.

        ``tensors``: this rank's, any strides; all of one dtype. ``shapes``: shapes of every rank's tensors.
        """
        parts = self._gather(tensors, shapes)
        if self._channel is None or self.size < 3:
            return parts
        # The other receivers of a message read the same memory.
        return [part if peer == self.rank else [tensor.clone() for tensor in part] for peer, part in enumerate(parts)]

    def _gather(self, tensors: Sequence[Tensor], shapes: ShapesByRank) -> list[list[Tensor]]:
        sizes = [sum(map(prod, of)) for of in shapes] if self.packs else []
        if any(sizes) and self.size * max(sizes) <= _FILLED * sum(sizes):
            parts = self._gather_packed(tensors, sizes).view(self.size, -1)
            return [
                list(tensors) if peer == self.rank else _views(part[:size], of)
                for peer, (part, size, of) in enumerate(zip(parts, sizes, shapes, strict=True))
            ]
        return self._exchange("all_gather", [tensors] * self.size, shapes)()

    def _gather_packed(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """All-gather of one buffer of every rank over the process group, sent once; shorter ones are filled up.

        Bytes are counted as if a tensor went to each rank by itself, whatever the backend does. ``sizes``: elements of
        every rank's tensors.
        """
        self._enter("all_gather")
        mine, longest = tensors[0], max(sizes)
        if len(tensors) == 1 and mine.is_contiguous() and mine.numel() == longest:
            packed = mine.view(-1)
        else:
            packed = mine.new_empty(longest)
            used = packed[: sizes[self.rank]]
            for place, tensor in zip(_views(used, [tensor.shape for tensor in tensors]), tensors, strict=True):
                place.copy_(tensor)
        self.traffic.add(self.name, len(self._others) * sizes[self.rank] * packed.element_size())
        receive = packed.new_empty(self.size * longest)
        return self._posted(packed, receive, getattr(dist, _ALL_GATHER)).wait()[0]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, the same bits on every rank.

        Counted as what a ring all-reduce sends from each rank, whatever the backend does: 2 (n - 1) / n of the tensor,
        rounded down to a byte. ``tensor``: of one shape and dtype on every rank; overwritten with the sum when it is
        contiguous.
        """
        if self.size == 1:
            return tensor
        self._enter("all_reduce")
        tensor = tensor.contiguous()
        sent = 2 * (self.size - 1) * tensor.nbytes // self.size
        if self._way != "memory":
            self._together(dist.all_reduce, tensor)
        else:
            self._sum(tensor.view(-1))
        self.traffic.add(self.name, sent)
        return tensor

    def all_reduce_async(self, tensor: Tensor) -> Callable[[timedelta | None], Tensor]:
        """The sum of all ranks' tensors, the same bits on every rank; returns at once. For small ones: all send to all.

        ``tensor``: of one shape and dtype on every rank; not to be written to any more.

        Returns:
            Waits for the other ranks', as `Transfer.wait` does, and returns the sum. Call it once, in order of posting.
        """
        transfer = self.all_gather_async([tensor], [[torch.empty_like(tensor)] for _ in range(self.size)])
        return lambda timeout: self._added_up(transfer.wait(timeout), tensor)

    def _added_up(self, received: Sequence[Tensor], own: Tensor) -> Tensor:
        """The sum of the other ranks' tensors, one each, and this rank's own: in rank order."""
        return reduce(torch.add, [*received[: self.rank], own, *received[self.rank :]])

    def _sum(self, flat: Tensor) -> None:
        """All-reduce as a reduce-scatter, of which every rank adds up its part, and an all-gather."""
        kind, others, parts = "all_reduce", self._others, flat.tensor_split(self.size)
        mine = parts[self.rank]
        scattered = self._start(kind, [([parts[p]], [p]) for p in others], [([mine], p) for p in others])
        mine.copy_(self._added_up(scattered.wait(), mine))
        gathered = self._start(kind, [([mine], others)], [([parts[p]], p) for p in others])
        for peer, part in zip(others, gathered.wait(), strict=True):
            parts[peer].copy_(part)

    def shift(self, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Transfer:
        """Send ``tensors`` to the next rank of the ring, receive as many from the previous one; returns at once.

        Args:
            tensors: any strides; they must not be written to before `Transfer.wait` returns.
            shapes: shapes of what the previous rank sends, in the same order; dtypes are those of ``tensors``.
        """
        self._enter("shift")
        received = [t.new_empty(shape) for t, shape in zip(tensors, shapes, strict=True)]
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.traffic.add(self.name, sum(t.nbytes for t in tensors))
        return self._start("shift", [(tensors, [following])], [(received, previous)])

    def send(self, tensors: Sequence[Tensor], to: int) -> Transfer:
        """Send tensors to one rank of the group; returns at once.

        Args:
            tensors: any strides, not to be written to before `Transfer.wait` returns. Empty ones are not sent.
            to: rank in the group. It calls `receive` with the same shapes, in the same order.
        """
        self._enter("send")
        self.traffic.add(self.name, sum(t.nbytes for t in tensors))
        return self._start("send", [(tensors, [to])], [])

    def receive(self, tensors: Sequence[Tensor], source: int) -> Transfer:
        """Receive tensors from a rank of the group; returns at once.

        Args:
            tensors: of the message's shapes and dtypes, which may be filled: use the result of `Transfer.wait`.
            source: rank in the group.
        """
        self._enter("receive")
        return self._start("send", [], [(tensors, source)])

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """One rank's tensor on every rank of the group. Counted on that rank, once per receiver.

        ``tensor``: contiguous; on other ranks it is overwritten. ``source``: rank in the group that has the values.
        """
        if self.size == 1:
            return tensor
        self._enter("broadcast")
        if self._way != "memory":
            self._together(dist.broadcast, tensor, self.ranks[source])
        elif self.rank == source:
            self._start("broadcast", [([tensor], self._others)], [])
        else:
            # Copied: all receivers read the same memory.
            tensor.copy_(self._start("broadcast", [], [([tensor], source)]).wait()[0])
        if self.rank == source:
            self.traffic.add(self.name, (self.size - 1) * tensor.nbytes)
        return tensor

    def all_gather_async(self, outgoing: Sequence[Tensor], incoming: TensorsByRank) -> Transfer:
        """Send the same tensors to every other rank, receive theirs, rank by rank; returns at once.

        Args:
            outgoing: any strides; they must not be written to before `Transfer.wait` returns.
            incoming: for every rank of the group contiguous tensors of the shapes and dtypes that it sends, which may
                take them; this rank's own entry is not used. What `Transfer.wait` returns is only to be read: others
                may read the same memory.
        """
        kind, others = "all_gather_async", self._others
        self._enter(kind)
        self.traffic.add(self.name, len(others) * sum(t.nbytes for t in outgoing))
        return self._start(kind, [(outgoing, others)], [(incoming[peer], peer) for peer in others])


def _views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
