"""Attention masks that are made of a mask per token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import LayoutError


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
