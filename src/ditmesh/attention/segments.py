"""Where the tokens of a joint sequence are: which rank has which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tiles import offsets


@dataclass(frozen=True)
class Segment:
    """The tokens of one stream inside a sequence.

    Attributes:
        name: the stream.
        lengths: tokens on each sequence rank, in rank order.
        replicated: every rank holds all tokens; then every entry of ``lengths`` is the total.
    """

    name: str
    lengths: tuple[int, ...]
    replicated: bool = False

    @property
    def total(self) -> int:
        """Tokens on one device."""
        return self.lengths[0] if self.replicated else sum(self.lengths)

    def take(self, whole: Tensor, dim: int, start: int, ranks: Sequence[int]) -> Tensor:
        """The entries of ``whole`` along ``dim`` that belong to consecutive ``ranks``.

        ``start`` is where the stream begins along ``dim``.
        """
        if self.replicated:
            return whole.narrow(dim, start, self.total)
        first = start + offsets(self.lengths)[ranks[0]]
        return whole.narrow(dim, first, sum(self.lengths[rank] for rank in ranks))


@dataclass(frozen=True)
class SpreadAttention:
    """One attention call over tokens that lie on several ranks, as one of them sees it.

    Attributes:
        q_bhsd: this rank's queries, (B, H, s_q, D).
        k_bhsd, v_bhsd: its keys and values, (B, H, s_k, D).
        queries, keys: the streams that these are of, in their order.
        mask: what the model hands to its attention here; see `AttentionHandler`.
        scale: as in `torch.nn.functional.scaled_dot_product_attention`.
    """

    q_bhsd: Tensor
    k_bhsd: Tensor
    v_bhsd: Tensor
    queries: list[Segment]
    keys: list[Segment]
    mask: Tensor | None
    scale: float | None


def local_length(segments: Sequence[Segment], rank: int) -> int:
    """Tokens of the joint sequence on one sequence rank."""
    return sum(segment.lengths[rank] for segment in segments)


def total_length(segments: Sequence[Segment]) -> int:
    """Tokens of the joint sequence on one device."""
    return sum(segment.total for segment in segments)


def cut(whole: Tensor, dim: int, segments: Sequence[Segment], ranks: Sequence[int]) -> Tensor:
    """The part of a per-token tensor that belongs to consecutive ``ranks``, streams in order.

    Args:
        whole: tensor with one entry per token of the joint sequence along ``dim``.
    """
    parts, start = [], 0
    for segment in segments:
        parts.append(segment.take(whole, dim, start, ranks))
        start += segment.total
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
