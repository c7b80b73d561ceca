"""torch's block masks (`BlockMask` of flex attention), of which a rank computes some heads and some rows of blocks.

A block mask is of whole sequences: a table lists which blocks of keys a block of queries attends to, and a function
tells pairs of tokens apart inside of them. Compiled flex attention goes by both, the eager one by the function alone. A
rank therefore computes whole blocks, with the function at the indices of the whole sequences: either way it is given
what one device is given. Queries of other ranks in its first and last block are zeros, and their rows are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


class BlockRows(NamedTuple):
    """A rank's heads of a block mask, and the rows of blocks with its queries; ``slots``: where these lie there."""

    mask: Any
    slots: Tensor

    def attend(self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        rows = q.new_zeros(*q.shape[:2], self.mask.seq_lengths[0], q.shape[3]).index_copy(2, self.slots, q)
        return attend(rows, k, v, self.mask, scale).index_select(2, self.slots)


def blocks_of_heads(mask: BlockMask) -> Tensor:
    """Blocks of every head, over all samples of the mask; a single number where all heads have the same."""
    full = 0 if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks
    return (mask.kv_num_blocks + full).sum((0, 2))


def part_of(mask: BlockMask, first: int, count: int, places: Tensor) -> BlockRows:
    """The part for the heads from ``first`` on, and for the queries at these places of the whole sequence."""
    size, function, device = mask.BLOCK_SIZE[0], mask.mask_mod, mask.kv_num_blocks.device
    blocks = (places // size).unique()
    rows = (blocks[:, None] * size + torch.arange(size)).flatten()
    # The last block of a sequence may be shorter.
    rows = rows[rows < mask.seq_lengths[0]]
    slots, blocks, rows = torch.searchsorted(rows, places).to(device), blocks.to(device), rows.to(device)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return function(batch, head + first, rows[query], key)

    def part(table: Tensor | None) -> Any:
        shared = table is None or table.shape[1] == 1
        return None if table is None else (table if shared else table[:, first : first + count])[:, :, blocks]

    tables = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    given: Any = (*map(part, tables), mask.BLOCK_SIZE, mask_mod, (len(rows), mask.seq_lengths[1]))
    return BlockRows(BlockMask.from_kv_blocks(*given), slots)
