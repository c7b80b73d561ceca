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
        by_rank: list[list[Tensor]] = [[] for _ in range(size)]
        shapes: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        split = [tokens.split(tensor.transpose(1, 2), 1, me) for tensor, tokens in zip(tensors, streams, strict=True)]
        for pieces, tokens in zip(split, streams, strict=True):
            for block, mine in enumerate(pieces):
                if block in tokens.replicated:
                    continue
                batch, _, _, dim = mine.shape
                for peer in range(size):
                    by_rank[peer].append(self._heads(mine, peer))
                    shapes[peer].append((batch, tokens.blocks[block][peer], self.head_counts[me], dim))
        received = self.link.all_to_all(by_rank, shapes)

        whole: list[Tensor] = []
        slot = 0
        for pieces, tokens in zip(split, streams, strict=True):
            parts: list[Tensor] = []
            for block, mine in enumerate(pieces):
                if block in tokens.replicated:
                    parts.append(self._heads(mine, me))
                else:
                    parts.extend(received[peer][slot] for peer in range(size))
                    slot += 1
            whole.append(torch.cat(parts, dim=1).transpose(1, 2))
        return whole

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
        received = self.link.all_to_all(by_rank, shapes)
        rows = [torch.cat([received[peer][slot] for peer in range(size)], dim=2) for slot in range(len(shapes[me]))]
        return (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).transpose(1, 2)

    def _heads(self, t_bshd: Tensor, rank: int) -> Tensor:
        return t_bshd[:, :, self.head_starts[rank] : self.head_starts[rank] + self.head_counts[rank]]
