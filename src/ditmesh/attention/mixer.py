"""Exact attention over tokens on several ranks, shared by all strategies.

Heads are traded for tokens inside a Ulysses group, keys and values go round the ring or are gathered over it, a local
kernel computes, and heads are traded back. USP: Fang & Zhao 2024, arXiv:2405.07719.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..comm import Link
from ..comm.autograd import all_to_all
from ..core.alignment import aligned
from ..core.partition import Partition, cut_by_cost, weighted_cut
from ..core.values import tracked
from ..errors import ConfigError, LayoutError
from . import masks
from .blocks import BlockRows, blocks_of_heads, part_of
from .kernels import LocalAttention
from .ring import ring_attention
from .ulysses import HeadExchange

# By id of a mask and what it is of: the mask, costs of its heads, this rank's part.
BlockParts = dict[Any, tuple[BlockMask, tuple[int, ...], BlockRows]]
# Computes attention of some tensors of queries, each (B, h, s, D), over k and v (B, h, S, D), each with its mask.
Compute = Callable[[list[Tensor], Tensor, Tensor, list[Tensor | None]], list[Tensor]]


@dataclass(frozen=True)
class AttentionCall:
    """One attention call over tokens that lie on several ranks, as one of them sees it.

    Attributes:
        q_bhsd: this rank's queries, (B, H, s_q, D).
        k_bhsd, v_bhsd: its keys and values, (B, H, s_k, D).
        queries, keys: the streams that these are of, in their order, by sequence rank.
        mask: what the model hands to its attention here; see `AttentionHandler`.
        scale: as in `torch.nn.functional.scaled_dot_product_attention`.
    """

    q_bhsd: Tensor
    k_bhsd: Tensor
    v_bhsd: Tensor
    queries: Partition
    keys: Partition
    mask: Tensor | None
    scale: float | None


@dataclass(frozen=True)
class Tiles:
    """Queries that are computed tile by tile.

    Attributes:
        here: the streams of the queries by tile of this rank.
        group: the same by tile of this rank's Ulysses group.
    """

    here: Partition
    group: Partition


class Mixer:
    """Attention over the ranks of one mesh.

    Args:
        ulysses, ring: the two sequence axes.
        kernel: computes where keys and queries have come together.
        travels: whether keys go round the ring while attention is computed. The merge order then differs by rank; else
            they are gathered first, in the order of one device. As many bytes travel.
    """

    def __init__(self, ulysses: Link, ring: Link, kernel: LocalAttention, travels: bool = True) -> None:
        self.ulysses, self.ring, self.kernel, self.travels = ulysses, ring, kernel, travels
        self._exchanges: dict[tuple[int, tuple[float, ...], tuple[int, ...]], HeadExchange] = {}

    def groups(self, first: int = 0) -> list[range]:
        """For every rank of the ring the sequence ranks of its Ulysses group, numbered from ``first``."""
        width = self.ulysses.size
        return [range(first + r * width, first + (r + 1) * width) for r in range(self.ring.size)]

    def exchange(self, heads: int, weights: tuple[float, ...], costs: tuple[int, ...] = ()) -> HeadExchange:
        """The split of heads over ranks.

        Heads follow the weights of the sequence ranks as tokens do, or their ``costs`` do where these differ; ranks of
        one ring share a cut, so theirs are added up.
        """
        exchange = self._exchanges.get((heads, weights, costs))
        if exchange is None:
            width = self.ulysses.size
            shares = [sum(weights[place::width]) for place in range(width)]
            counts = cut_by_cost(costs, shares) if len(costs) > 1 else weighted_cut(heads, shares)
            exchange = HeadExchange(self.ulysses, counts)
            self._exchanges[heads, weights, costs] = exchange
        return exchange

    def attend_distributed(
        self,
        q: list[Tensor],
        k: Tensor,
        v: Tensor,
        given: list[Tensor | None],
        queries: Partition,
        keys: Partition,
        groups: Sequence[range],
        weights: tuple[float, ...],
        scale: float | None,
        compute: Compute | None = None,
        tiles: Tiles | None = None,
        costs: tuple[int, ...] = (),
    ) -> list[Tensor]:
        """Attention of this rank's queries over all ranks' keys: (B, H, s, D) for every tensor of ``q``.

        Args:
            q: this rank's queries: one tensor, or one for each of its tiles, which ``tiles`` has.
            given: the masks of the queries that this rank computes, those of its Ulysses group, over all keys: one,
                or one for each tile of the group; 4-D, all heads.
            queries, keys: the streams by sequence rank; ``weights``: of these ranks.
            groups: for every rank of the ring the sequence ranks of its Ulysses group.
            compute: what computes once all keys are here; default: the kernel.
            costs: of the heads, see `exchange`.
        """
        ulysses, ring = self.ulysses, self.ring
        exchange = ours = None
        if ulysses.size > 1:
            exchange = self.exchange(k.shape[1], weights, costs)
            group = groups[ring.rank]
            ours, theirs = queries.of(group), keys.of(group)
            joint = q[0] if tiles is None else tiles.here.join(q, 2)
            joint, k, v = exchange.gather_tokens((joint, k, v), (ours, theirs, theirs))
            q = [joint] if tiles is None else [tiles.group.take(joint, 2, tile) for tile in range(tiles.group.parts)]
            start, count = exchange.head_starts[ulysses.rank], exchange.head_counts[ulysses.rank]
            given = [None if mask is None else masks.of_heads(mask, start, count) for mask in given]
        compute = compute or (lambda q, k, v, given: [self.kernel(q[0], k, v, given[0], scale)])
        if ring.size == 1 or keys.all_replicated:
            outs = compute(q, k, v, given)
        elif self.travels:
            outs = [self._round_the_ring(q[0], k, v, keys.regroup(groups), given[0], scale)]
        else:
            k, v = gather_keys(ring, (k, v), keys.regroup(groups))
            outs = compute(q, k, v, given)
        if exchange is None or ours is None:
            return outs
        if tiles is None:
            return [exchange.gather_heads(outs[0], ours)]
        out_bshd = exchange.gather_heads(tiles.group.join(outs, 2), ours).transpose(1, 2)
        return [aligned(tiles.here.take(out_bshd, 1, tile)).transpose(1, 2) for tile in range(tiles.here.parts)]

    def attend_blocks(
        self, a: AttentionCall, mask: BlockMask, groups: Sequence[range], weights: tuple[float, ...], parts: BlockParts
    ) -> Tensor:
        """The same with a block mask, of which ``parts`` gets this rank's heads and the rows of its queries."""
        ulysses, ring, lengths = self.ulysses, self.ring, (a.queries.total, a.keys.total)
        if len(mask.shape) != 4 or mask.shape[2:] != lengths:
            raise LayoutError(
                f"attention of {lengths[0]} queries over {lengths[1]} keys of all ranks is given a BlockMask of shape "
                f"{mask.shape}; build it of whole sequences, before the blocks run"
            )
        if self.travels and ring.size > 1 and not a.keys.all_replicated:
            raise ConfigError(
                f"ring={ring.size} cannot run attention with a BlockMask, of which a rank would see the blocks of some "
                "keys at a time; set exchange='gather', or use ulysses"
            )
        key = (id(mask), a.queries, groups[ring.rank])
        if key not in parts:
            by_head = blocks_of_heads(mask)
            costs = tuple(by_head.tolist()) if len(by_head) > 1 and ulysses.size > 1 else ()
            exchange = self.exchange(a.q_bhsd.shape[1], weights, costs)
            heads = exchange.head_starts[ulysses.rank], exchange.head_counts[ulysses.rank]
            places = [torch.arange(start, start + count) for start, count in a.queries.places(groups[ring.rank])]
            parts[key] = mask, costs, part_of(mask, *heads, torch.cat(places))
        _, costs, part = parts[key]

        def compute(q: list[Tensor], k: Tensor, v: Tensor, _: Any) -> list[Tensor]:
            samples, heads = part.mask.shape[:2]
            ulysses.traffic.blocks += blocks_of_heads(part.mask).sum() * (len(q[0]) // samples * q[0].shape[1] // heads)
            return [part.attend(self.kernel, q[0], k, v, a.scale)]

        q, k, v, more = [a.q_bhsd], a.k_bhsd, a.v_bhsd, (weights, a.scale, compute, None, costs)
        return self.attend_distributed(q, k, v, [None], a.queries, a.keys, groups, *more)[0]

    def _round_the_ring(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Partition, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Ring attention; ``keys`` by rank of the ring. Those of replicated streams stay: every rank has them."""
        ring, resident = self.ring, None
        travelling = [block for block in range(len(keys.blocks)) if block not in keys.replicated]
        lengths = [sum(keys.blocks[block][rank] for block in travelling) for rank in range(ring.size)]
        if keys.replicated:
            split = [keys.split(tensor, 2, ring.rank) for tensor in (k, v)]
            at_home, away = (
                [_joined([pieces[block] for block in blocks]) for pieces in split]
                for blocks in (sorted(keys.replicated), travelling)
            )
            resident, (k, v) = (at_home[0], at_home[1]), away

        def mask_of(rank: int) -> Tensor:
            assert mask is not None
            if mask.shape[-1] == 1:
                return mask
            blocks = ([*sorted(keys.replicated)] if rank == ring.rank else []) + travelling
            places = keys.places(rank)
            return torch.cat([mask.narrow(3, *places[block]) for block in blocks], dim=3)

        given = mask_of if mask is not None else None
        parts = self.kernel.unrounded(q)
        return ring_attention(ring, q, k, v, lengths, resident, given, scale, self.kernel.with_lse, parts)


def gather_keys(ring: Link, tensors: Sequence[Tensor], keys: Partition) -> list[Tensor]:
    """Whole tensors (B, H, S, D), tokens in the order of one device, of every rank's (B, H, s, D); differentiable.

    ``keys``: their streams, by rank of the ring.
    """
    split = [keys.split(tensor, 2, ring.rank) for tensor in tensors]
    travelling = [block for block in range(len(keys.blocks)) if block not in keys.replicated]
    shapes = [
        [(*tensor.shape[:2], keys.blocks[block][rank], tensor.shape[3]) for tensor in tensors for block in travelling]
        for rank in range(ring.size)
    ]
    outgoing = [pieces[block] for pieces in split for block in travelling]
    if tracked(*outgoing):
        received = all_to_all(ring, [outgoing] * ring.size, shapes)
    else:
        received = ring.all_gather_list(outgoing, shapes)
    slots = iter(zip(*received, strict=True))
    return [
        torch.cat(
            [part for n, own in enumerate(pieces) for part in ([own] if n in keys.replicated else next(slots))], 2
        )
        for pieces in split
    ]


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
