"""Ulysses: exchange heads for tokens, attend, exchange back.

Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509. Here with uneven heads and lengths, several streams
in one sequence, and streams that every rank holds whole. Keys are put in the order one device has before
attention: the softmax then sums in the same order, and the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..comm import Link
from ..comm.autograd import all_to_all, all_to_all_packed
from ..core.partition import Partition, offsets


class HeadExchange:
    """The two exchanges of one attention call between the ranks of a Ulysses group.

    The parts of partitions passed to its methods are this group's ranks, in group order.

    Args:
        link: the Ulysses link (size U).
        head_counts: heads that every rank of the group computes; they sum to the model's H.
    """

    def __init__(self, link: Link, head_counts: Sequence[int]) -> None:
        self.link = link
        self.head_counts = tuple(head_counts)
        self.head_starts = offsets(self.head_counts)
        # Neighbours with as many heads each: how many ranks, and the heads of each.
        self._runs = [(len([*ranks]), count) for count, ranks in groupby(self.head_counts)]

    def gather_tokens(self, tensors: Sequence[Tensor], streams: Sequence[Partition]) -> list[Tensor]:
        """From all heads of some tokens to some heads of all tokens.

        Takes q, k, v …, (B, H, s_local, D), with the streams along each sequence. Returns (B, h_mine, S_group, D)
        for every tensor, streams in the same order, each stream's tokens in rank order; in memory (B, S, h, D).
        """
        if self._packs(tensors, streams):
            sending = self._packed_heads(tensors, streams)
            return sending.whole(all_to_all_packed(self.link, *sending.message))
        outgoing, shapes, here = self._to_heads(tensors, streams)
        return _whole(here, all_to_all(self.link, outgoing, shapes))

    def gather_heads(self, out: Tensor, tokens: Partition) -> Tensor:
        """From (B, h_mine, S_group, D), as `gather_tokens` orders it, back to all heads of this rank's tokens.

        The result is (B, H, s_local, D); in memory (B, s, H, D).
        """
        if self.link.packs:
            message = self._packed_tokens(out, tokens)
            received = all_to_all_packed(self.link, *message)
            (batch, _, _, dim), length = out.shape, tokens.lengths[self.link.rank]
            parts = received.split([length * batch * count * dim for count in self.head_counts])
            heads = zip(parts, self.head_counts, strict=True)
            return torch.cat([part.view(length, batch, n, dim).transpose(0, 1) for part, n in heads], 2).transpose(1, 2)
        by_rank = all_to_all(self.link, *self._to_tokens(out, tokens))
        streams = [torch.cat(parts, dim=2) for parts in zip(*by_rank, strict=True)]
        return (streams[0] if len(streams) == 1 else torch.cat(streams, dim=1)).transpose(1, 2)

    def _to_heads(
        self, tensors: Sequence[Tensor], streams: Sequence[Partition]
    ) -> tuple[list[list[Tensor]], list[list[tuple[int, ...]]], list[list[Tensor | None]]]:
        """The tensors for every rank, the shapes of the received ones, and the local part.

        The last is for every tensor and stream this rank's heads of what lies here; None: every rank sends some.
        """
        me, size = self.link.rank, self.link.size
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        shapes: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        parts: list[list[Tensor | None]] = []
        for tensor, tokens in zip(tensors, streams, strict=True):
            parts.append([])
            for block, part_bshd in enumerate(tokens.split(tensor.transpose(1, 2), 1, me)):
                by_rank = [
                    part_bshd.narrow(2, *heads) for heads in zip(self.head_starts, self.head_counts, strict=True)
                ]
                if block in tokens.replicated:
                    parts[-1].append(by_rank[me])
                    continue
                parts[-1].append(None)
                batch, _, heads, dim = by_rank[me].shape
                for peer, (sent, length) in enumerate(zip(by_rank, tokens.blocks[block], strict=True)):
                    outgoing[peer].append(sent)
                    shapes[peer].append((batch, length, heads, dim))
        return outgoing, shapes, parts

    def _packs(self, tensors: Sequence[Tensor], streams: Sequence[Partition]) -> bool:
        """True if one buffer is sent; tensors (B, H, s, D) then differ in s alone, and some of their tokens travel."""
        alike = self.link.packs and len({(*tensor.shape[:2], tensor.shape[3]) for tensor in tensors}) == 1
        return alike and not all(tokens.all_replicated for tokens in streams)

    def _packed_heads(self, tensors: Sequence[Tensor], streams: Sequence[Partition]) -> _PackedHeads:
        """The heads for every rank as one buffer, (n, B, h, D): those of the n tokens that travel of all tensors.

        Packed by one kernel where all ranks have as many heads; else by one for each run of ranks that have.
        """
        me = self.link.rank
        parts: list[list[Tensor | None]] = []
        moving: list[Tensor] = []
        # For every rank tokens that it sends, in the order of ``moving``.
        lengths: list[list[int]] = [[] for _ in self.head_counts]
        for tensor, tokens in zip(tensors, streams, strict=True):
            parts.append([])
            for block, part_bshd in enumerate(tokens.split(tensor.transpose(1, 2), 1, me)):
                if block in tokens.replicated:
                    parts[-1].append(part_bshd.narrow(2, self.head_starts[me], self.head_counts[me]))
                    continue
                parts[-1].append(None)
                moving.append(part_bshd)
                for peer, length in enumerate(tokens.blocks[block]):
                    lengths[peer].append(length)
        batch, _, _, dim = moving[0].shape
        starts = offsets([ranks * count for ranks, count in self._runs])
        flat = [
            torch.cat([_heads_by_rank(part, start, *run) for part in moving], 1).view(-1)
            for start, run in zip(starts, self._runs, strict=True)
        ]
        packed = flat[0] if len(flat) == 1 else torch.cat(flat)
        rows, heads = [sum(of) for of in lengths], self.head_counts
        outgoing = [rows[me] * batch * count * dim for count in heads]
        incoming = [length * batch * heads[me] * dim for length in rows]
        return _PackedHeads((packed, outgoing, incoming), parts, lengths, (batch, heads[me], dim))

    def _packed_tokens(self, out: Tensor, tokens: Partition) -> tuple[Tensor, list[int], list[int]]:
        """The tokens that go to every rank as one buffer, (n, B, h, D), packed by one kernel."""
        o_sbhd, (batch, heads, _, dim) = out.permute(2, 0, 1, 3), out.shape
        packed = torch.cat(
            [o_sbhd.narrow(0, *place) for peer in range(self.link.size) for place in tokens.places(peer)]
        )
        outgoing = [length * batch * heads * dim for length in tokens.lengths]
        incoming = [tokens.lengths[self.link.rank] * batch * count * dim for count in self.head_counts]
        return packed.view(-1), outgoing, incoming

    def _to_tokens(self, out: Tensor, tokens: Partition) -> tuple[list[list[Tensor]], list[list[tuple[int, ...]]]]:
        """The tensors for every rank, and the shapes of the received ones."""
        me, size = self.link.rank, self.link.size
        o_bshd = out.transpose(1, 2)
        batch, _, _, dim = o_bshd.shape
        by_rank = [[o_bshd.narrow(1, *place) for place in tokens.places(peer)] for peer in range(size)]
        shapes = [
            [(batch, lengths[me], self.head_counts[peer], dim) for lengths in tokens.blocks] for peer in range(size)
        ]
        return by_rank, shapes


def _heads_by_rank(part_bshd: Tensor, start: int, ranks: int, count: int) -> Tensor:
    """For every rank its heads: (ranks, n, B, count * D) of (B, n, H, D), or (ranks, n, count, D) of one sample."""
    heads = part_bshd.narrow(2, start, ranks * count)
    by_rank = heads.unflatten(2, (ranks, count)).permute(2, 1, 0, 3, 4)
    # 4-D: CUDA's cat takes tensors of more dimensions one by one. One sample needs no copy for it, also where heads lie
    # apart in memory.
    return by_rank.flatten(2, 3) if by_rank.shape[2] == 1 else by_rank.flatten(3)


@dataclass(frozen=True)
class _PackedHeads:
    """The first exchange of an attention call as one message.

    Attributes:
        message: what `all_to_all_packed` takes.
        here: for every tensor and stream this rank's heads of what every rank has; None: it travels.
        lengths: for every rank how many tokens it sends of every stream that travels, of all tensors.
        shape: batch, heads and head size of the received tensor.
    """

    message: tuple[Tensor, list[int], list[int]]
    here: list[list[Tensor | None]]
    lengths: list[list[int]]
    shape: tuple[int, int, int]

    def whole(self, received: Tensor) -> list[Tensor]:
        """Every tensor, (B, h_mine, S_group, D)."""
        batch, heads, dim = self.shape
        parts = received.split(self.message[2])
        by_rank = [part.view(-1, batch, heads, dim).transpose(0, 1) for part in parts]
        return _whole(self.here, [list(one.split(of, 1)) for one, of in zip(by_rank, self.lengths, strict=True)])


def _whole(parts: list[list[Tensor | None]], received: list[list[Tensor]]) -> list[Tensor]:
    """Every tensor, (B, h_mine, S_group, D), from the local part and the received ones."""
    sent = zip(*received, strict=True)
    whole_bshd = [
        torch.cat([part for own in blocks for part in (next(sent) if own is None else (own,))], 1) for blocks in parts
    ]
    return [one.transpose(1, 2) for one in whole_bshd]
