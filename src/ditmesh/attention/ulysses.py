"""Ulysses: exchange heads for tokens, attend, exchange back.

Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509. Here with uneven heads and lengths, several streams
in one sequence, and streams that every rank holds whole. Keys are put in the order one device has before
attention: the softmax then sums in the same order, and the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm import Link
from ..comm.autograd import all_to_all
from ..core.partition import Partition, even_cut, offsets


class HeadExchange:
    """The two exchanges of one attention call between the ranks of a Ulysses group.

    The parts of partitions passed to its methods are this group's ranks, in group order.

    Args:
        link: the Ulysses link (size U).
        head_counts: heads that every rank of the group computes; they sum to the model's H.
        head_starts: the first of them; default: one rank's after the other's.
    """

    def __init__(self, link: Link, head_counts: Sequence[int], head_starts: Sequence[int] | None = None) -> None:
        self.link = link
        self.head_counts = tuple(head_counts)
        self.head_starts = offsets(self.head_counts) if head_starts is None else tuple(head_starts)

    def chunk(self, number: int, chunks: int) -> HeadExchange:
        """The exchange of one of several chunks of every rank's heads; no rank has fewer heads than chunks."""
        counts = [even_cut(count, chunks)[number] for count in self.head_counts]
        before = [offsets(even_cut(count, chunks))[number] for count in self.head_counts]
        return HeadExchange(self.link, counts, [sum(two) for two in zip(self.head_starts, before, strict=True)])

    def gather_tokens(self, tensors: Sequence[Tensor], streams: Sequence[Partition]) -> list[Tensor]:
        """From all heads of some tokens to some heads of all tokens.

        Args:
            tensors: q, k, v …: (B, H, s_local, D), streams one after the other.
            streams: for every tensor those along its sequence.

        Returns:
            For every tensor (B, h_mine, S_group, D): streams in the same order, each stream's tokens in rank
            order. Memory order is (B, S, h, D).
        """
        outgoing, shapes, here = self._to_heads(tensors, streams)
        return _whole(here, all_to_all(self.link, outgoing, shapes))

    def gather_tokens_async(
        self, tensors: Sequence[Tensor], streams: Sequence[Partition]
    ) -> Callable[[], list[Tensor]]:
        """`gather_tokens` that returns at once: a function that waits. No gradients."""
        outgoing, shapes, here = self._to_heads(tensors, streams)
        wait = self.link.all_to_all_async(outgoing, shapes)
        return lambda: _whole(here, wait())

    def gather_heads(self, out: Tensor, tokens: Partition) -> Tensor:
        """From some heads of all tokens back to all heads of this rank's tokens.

        Args:
            out: (B, h_mine, S_group, D), as `gather_tokens` orders it.

        Returns:
            (B, H, s_local, D); memory order (B, s, H, D).
        """
        outgoing, shapes = self._to_tokens(out, tokens)
        return all_heads([all_to_all(self.link, outgoing, shapes)])

    def gather_heads_async(self, out: Tensor, tokens: Partition) -> Callable[[], list[list[Tensor]]]:
        """The exchange of `gather_heads`, which returns at once: a function that waits. No gradients.

        What it returns, of every chunk of heads in order, is for `all_heads`.
        """
        return self.link.all_to_all_async(*self._to_tokens(out, tokens))

    def _to_heads(
        self, tensors: Sequence[Tensor], streams: Sequence[Partition]
    ) -> tuple[list[list[Tensor]], list[list[tuple[int, ...]]], list[list[Tensor | None]]]:
        """The tensors for every rank, the shapes of the received ones, and the local part.

        The last is for every tensor and stream this rank's heads of what lies here; None: every rank sends some.
        """
        me, size = self.link.rank, self.link.size
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        shapes: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        here: list[list[Tensor | None]] = []
        for tensor, tokens in zip(tensors, streams, strict=True):
            here.append([])
            for block, part_bshd in enumerate(tokens.split(tensor.transpose(1, 2), 1, me)):
                by_rank = [
                    part_bshd.narrow(2, *heads) for heads in zip(self.head_starts, self.head_counts, strict=True)
                ]
                if block in tokens.replicated:
                    here[-1].append(by_rank[me])
                    continue
                here[-1].append(None)
                batch, _, heads, dim = by_rank[me].shape
                for peer, (sent, length) in enumerate(zip(by_rank, tokens.blocks[block], strict=True)):
                    outgoing[peer].append(sent)
                    shapes[peer].append((batch, length, heads, dim))
        return outgoing, shapes, here

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


def _whole(here: list[list[Tensor | None]], received: list[list[Tensor]]) -> list[Tensor]:
    """Every tensor, (B, h_mine, S_group, D), from what lies here and what every rank sent."""
    sent = zip(*received, strict=True)
    whole_bshd = [
        torch.cat([part for own in blocks for part in (next(sent) if own is None else (own,))], 1) for blocks in here
    ]
    return [one.transpose(1, 2) for one in whole_bshd]


def all_heads(chunks: Sequence[list[list[Tensor]]]) -> Tensor:
    """All heads of this rank's tokens, (B, H, s_local, D), from what every rank sent of every chunk of its heads."""
    ranks, streams = range(len(chunks[0])), range(len(chunks[0][0]))
    rows = [torch.cat([chunk[peer][slot] for peer in ranks for chunk in chunks], dim=2) for slot in streams]
    return (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).transpose(1, 2)
