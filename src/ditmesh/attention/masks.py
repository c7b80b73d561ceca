"""Attention masks over sequences that lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Link
from ..errors import LayoutError
from .segments import Segment, cut, local_length, total_length


def everywhere(
    mask: Tensor, queries: Sequence[Segment], keys: Sequence[Segment], link: Link, ranks: Sequence[int]
) -> Tensor:
    """The mask of the queries of consecutive sequence ``ranks`` over all keys.

    Args:
        mask: what the block made of its arguments: broadcastable to (B, H, queries, keys), of this rank's
            tokens or of all.
        queries, keys: streams of either.
        link: the sequence link.
        ranks: whose queries.

    Returns:
        4-D; dimensions of 1 stay 1.

    Raises:
        LayoutError: the mask does not tell what other ranks' tokens may see.
    """
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    here = local_length(queries, link.rank)
    if list(queries) == list(keys) and tuple(mask.shape[-2:]) == (here, here) and here != total_length(keys):
        return _outer(mask, keys, link, ranks)
    return of_queries(whole_keys(mask, keys, link), queries, link, ranks)


def _outer(mask: Tensor, tokens: Sequence[Segment], link: Link, ranks: Sequence[int]) -> Tensor:
    """A mask that a block built as the outer product of this rank's entries of a per-token mask, built again whole."""
    whole = whole_keys(per_token(mask), tokens, link)
    return product(cut(whole, 3, tokens, ranks), whole)


def per_token(mask: Tensor) -> Tensor:
    """The per-token mask m of which (B, 1 or H, S, S) is the outer product m mᵀ, as (B, 1 or H, 1, S).

    For m of zeros and ones (or booleans) the diagonal of m mᵀ is m itself.

    Raises:
        LayoutError: it is no such product.
    """
    if mask.stride(1) == 0:
        mask = mask[:, :1]
    entries = mask.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    if not torch.equal(product(entries, entries), mask):
        raise LayoutError(
            f"an attention mask of shape {tuple(mask.shape)} was cut along queries and keys, and is no outer product "
            "of a mask per token, so other ranks' keys are missing; list its source as `whole` in the layout"
        )
    return entries


def product(queries: Tensor, keys: Tensor) -> Tensor:
    """The mask (B, 1 or H, Sq, Sk) of queries and keys from what each of them has per token, (B, 1 or H, 1, S)."""
    rows = queries.transpose(-1, -2)
    return rows & keys if rows.dtype == torch.bool else rows * keys


def whole_keys(mask: Tensor, keys: Sequence[Segment], link: Link) -> Tensor:
    """A mask over all keys, in the order one device has them.

    Args:
        mask: 4-D; its last dimension covers all keys, this rank's keys, or is 1.
        keys: streams of the keys.
        link: the sequence link.

    Returns:
        The mask with all keys in its last dimension (or 1).

    Raises:
        LayoutError: the last dimension fits neither, or the mask is cut along queries too.
    """
    here, everywhere = local_length(keys, link.rank), total_length(keys)
    width = mask.shape[-1]
    if width in (1, everywhere):
        return mask
    if width != here:
        raise LayoutError(
            f"an attention mask of shape {tuple(mask.shape)} covers neither this rank's {here} keys "
            f"nor all {everywhere}; list the mask among the layout's cuts"
        )
    if mask.shape[-2] > 1:
        raise LayoutError(
            f"an attention mask of shape {tuple(mask.shape)} was cut along queries and keys, so other ranks' keys "
            "are missing; list its source as `whole` in the layout"
        )
    mask = mask[:, :1] if mask.stride(1) == 0 else mask
    parts, start = [], 0
    for segment in keys:
        piece = mask.narrow(-1, start, segment.lengths[link.rank])
        start += piece.shape[-1]
        parts.append(piece if segment.replicated else link.gather(piece, segment.lengths, dim=3))
    return torch.cat(parts, dim=-1)


def of_queries(mask: Tensor, queries: Sequence[Segment], link: Link, ranks: Sequence[int]) -> Tensor:
    """The rows of a mask for the queries of consecutive sequence ``ranks``.

    Raises:
        LayoutError: the mask has a row for every query of this rank only, and more ranks are asked for.
    """
    rows = mask.shape[-2]
    if rows == 1 or rows == sum(local_length(queries, rank) for rank in ranks):
        return mask
    if rows == total_length(queries):
        return cut(mask, 2, queries, ranks)
    raise LayoutError(
        f"an attention mask of shape {tuple(mask.shape)} has neither one row nor {total_length(queries)}; "
        "list its source as `whole` in the layout"
    )


def of_heads(mask: Tensor, start: int, count: int) -> Tensor:
    """The heads ``start`` to ``start + count`` of a mask that may be the same for all heads."""
    return mask if mask.shape[1] == 1 else mask[:, start : start + count]


def of_own_keys(mask: Tensor, queries: Sequence[Segment], keys: Sequence[Segment], link: Link) -> Tensor:
    """The mask of this rank's queries over this rank's keys alone; nothing is exchanged.

    Args:
        mask: as in `everywhere`.

    Returns:
        4-D; dimensions of 1 stay 1.
    """
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = of_queries(mask, queries, link, (link.rank,))
    here = local_length(keys, link.rank)
    if mask.shape[-1] in (1, here):
        return mask
    if mask.shape[-1] == total_length(keys):
        return cut(mask, 3, keys, (link.rank,))
    raise LayoutError(
        f"an attention mask of shape {tuple(mask.shape)} covers neither this rank's {here} keys "
        f"nor all {total_length(keys)}; list the mask among the layout's cuts"
    )
