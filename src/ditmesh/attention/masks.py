"""Attention masks over sequences that lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Link
from ..errors import LayoutError
from .segments import Segment, cut, local_length, total_length


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
