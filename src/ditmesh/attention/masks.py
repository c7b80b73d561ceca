"""Attention masks over sequences that lie on several ranks, and masks that are made of a mask per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.group import Group
from ..core.partition import Partition
from ..errors import LayoutError


def everywhere(
    mask: Tensor,
    queries: Partition,
    keys: Partition,
    link: Group,
    ranks: range,
    steady: Callable[[], bool] = lambda: False,
) -> Tensor:
    """The mask of the queries of consecutive sequence ``ranks`` over all keys, 4-D; dimensions of 1 stay 1.

    Args:
        mask: what the block made of its arguments: broadcastable to (B, H, queries, keys), of this rank or all.
        queries, keys: the streams of either, by rank of ``link``.
        steady: whether the mask has the same origin as in the previous step, as in `per_token`.

    `LayoutError`: the mask does not say what other ranks' tokens may see.
    """
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    here = queries.lengths[link.rank]
    if tuple(mask.shape[-2:]) == (here, here) and here != keys.total and queries == keys:
        # The outer product of this rank's entries of a per-token mask, built again whole.
        entries = whole_keys(per_token(mask, steady()), keys, link)
        return product(keys.take(entries, 3, ranks), entries)
    return of_queries(whole_keys(mask, keys, link), queries, ranks)


def gathered_rows(mask: Tensor, queries: Partition, link: Group) -> Tensor:
    """A mask of this rank's queries (dimension 2 of 4) as one of all ranks' queries, in the order of one device."""
    lengths = queries.lengths
    return queries.join(link.all_gather(mask.contiguous(), lengths, 2).split(lengths, 2), 2)


def whole_keys(mask: Tensor, keys: Partition, link: Group) -> Tensor:
    """A 4-D mask over all keys, in the order one device has them, or with 1 for their dimension.

    Its last dimension covers all keys, this rank's of the streams ``keys``, or is 1. `LayoutError`: it fits neither, or
    the mask is cut along queries too.
    """
    length, everywhere = keys.lengths[link.rank], keys.total
    width = mask.shape[-1]
    if width == everywhere + length > everywhere:
        # diffusers' `prepare_attention_mask` lengthens a mask of all keys by as many as it sees.
        mask, width = mask[..., :everywhere], everywhere
    if width in (1, everywhere):
        return mask
    if width != length:
        raise LayoutError(
            f"an attention mask of shape {tuple(mask.shape)} covers neither this rank's {length} keys "
            f"nor all {everywhere}; list the mask among the layout's cuts"
        )
    if mask.shape[-2] > 1:
        raise LayoutError(
            f"an attention mask of shape {tuple(mask.shape)} was cut along queries and keys, so other ranks' keys "
            "are missing; list its source as `whole` in the layout"
        )
    mask = mask[:, :1] if mask.stride(1) == 0 else mask
    parts = [
        piece if block in keys.replicated else link.all_gather(piece, keys.blocks[block], dim=3)
        for block, piece in enumerate(keys.split(mask, -1, link.rank))
    ]
    return torch.cat(parts, dim=-1)


def of_queries(mask: Tensor, queries: Partition, ranks: range) -> Tensor:
    """The rows of a mask for the queries of consecutive ranks; `LayoutError`: it has those of this rank only."""
    rows = mask.shape[-2]
    if rows == 1 or rows == sum(queries.lengths[rank] for rank in ranks):
        return mask
    if rows == queries.total:
        return queries.take(mask, 2, ranks)
    raise LayoutError(
        f"an attention mask of shape {tuple(mask.shape)} has neither one row nor {queries.total}; "
        "list its source as `whole` in the layout"
    )


def of_heads(mask: Tensor, start: int, count: int) -> Tensor:
    """The heads ``start`` to ``start + count`` of a mask that may be the same for all heads."""
    return mask if mask.shape[1] == 1 else mask[:, start : start + count]


def of_own_keys(mask: Tensor, queries: Partition, keys: Partition, rank: int) -> Tensor:
    """The 4-D mask of a rank's queries over its own keys alone, of one as in `everywhere`; nothing is exchanged."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = of_queries(mask, queries, range(rank, rank + 1))
    if mask.shape[-1] in (1, keys.lengths[rank]):
        return mask
    if mask.shape[-1] == keys.total:
        return keys.take(mask, 3, rank)
    raise LayoutError(
        f"an attention mask of shape {tuple(mask.shape)} covers neither this rank's {keys.lengths[rank]} keys "
        f"nor all {keys.total}; list the mask among the layout's cuts"
    )


def per_token(mask: Tensor, steady: bool = False) -> Tensor:
    """The per-token mask m of which (B, 1 or H, S, S) is the outer product m mᵀ, as (B, 1 or H, 1, S).

    For m of zeros and ones (or booleans) the diagonal of m mᵀ is m itself. ``steady``: the block makes the mask of what
    it made it of in the step before, in which it was looked at: the host does not wait for the device to look again.
    `LayoutError`: it is no such product.
    """
    if mask.stride(1) == 0:
        mask = mask[:, :1]
    entries = mask.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    if not steady and not torch.equal(product(entries, entries), mask):
        raise LayoutError(
            f"an attention mask of shape {tuple(mask.shape)} was cut along queries and keys, and is no outer product "
            "of a mask per token, so other ranks' keys are missing; list its source as `whole` in the layout"
        )
    return entries


def product(queries: Tensor, keys: Tensor) -> Tensor:
    """The mask (B, 1 or H, Sq, Sk) of queries and keys from what each of them has per token, (B, 1 or H, 1, S)."""
    rows = queries.transpose(-1, -2)
    return rows & keys if rows.dtype == torch.bool else rows * keys
