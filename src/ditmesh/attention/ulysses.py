"""Ulysses: trade heads for tokens, attend, trade back.

Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509. Here with uneven heads and lengths, several streams
in one sequence, and streams that every rank holds whole. Keys are put in the order one device has before
attention: the softmax then sums in the same order, and the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Link
from ..comm.autograd import all_to_all
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

    def gather_tokens(self, tensors: Sequence[Tensor], streams: Sequence[Partition]) -> list[Tensor]:
        """From all heads of some tokens to some heads of all tokens.

        Args:
            tensors: q, k, v …: (B, H, s_local, D), streams one after the other.
            streams: for every tensor those along its sequence.

        Returns:
            For every tensor (B, h_mine, S_group, D): streams in the same order, each stream's tokens in rank
            order. Memory order is (B, S, h, D).
        """
        me, size = self.link.rank, self.link.size
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        shapes: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        # For every tensor and stream this rank's heads of what lies here; None: every rank sends some.
        here: list[list[Tensor | None]] = []
        for tensor, tokens in zip(tensors, streams, strict=True):
            here.append([])
            for block, part_bshd in enumerate(tokens.split(tensor.transpose(1, 2), 1, me)):
                by_rank = part_bshd.split(self.head_counts, 2)
                if block in tokens.replicated:
                    here[-1].append(by_rank[me])
                    continue
                here[-1].append(None)
                batch, _, heads, dim = by_rank[me].shape
                for peer, (sent, length) in enumerate(zip(by_rank, tokens.blocks[block], strict=True)):
                    outgoing[peer].append(sent)
                    shapes[peer].append((batch, length, heads, dim))
        received = zip(*all_to_all(self.link, outgoing, shapes), strict=True)
        whole_bshd = [
            torch.cat([part for own in blocks for part in (next(received) if own is None else (own,))], 1)
            for blocks in here
        ]
        return [one.transpose(1, 2) for one in whole_bshd]

    def gather_heads(self, out: Tensor, tokens: Partition) -> Tensor:
        """From some heads of all tokens back to all heads of this rank's tokens.

        Args:
            out: (B, h_mine, S_group, D), as `gather_tokens` orders it.

        Returns:
            (B, H, s_local, D); memory order (B, s, H, D).
        """
        me, size = self.link.rank, self.link.size
        o_bshd = out.transpose(1, 2)
        batch, _, _, dim = o_bshd.shape
        by_rank = [[o_bshd.narrow(1, *place) for place in tokens.places(peer)] for peer in range(size)]
        shapes = [
            [(batch, lengths[me], self.head_counts[peer], dim) for lengths in tokens.blocks] for peer in range(size)
        ]
        received = all_to_all(self.link, by_rank, shapes)
        rows = [torch.cat([received[peer][slot] for peer in range(size)], dim=2) for slot in range(len(shapes[me]))]
        return (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).transpose(1, 2)
