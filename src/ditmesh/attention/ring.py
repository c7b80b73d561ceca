"""Ring attention: keys and values travel round the ring while every rank computes on what it has.

Liu et al. 2023, arXiv:2310.01889. Each rank keeps its queries; after N - 1 shifts it has met every block of
keys. Partial results merge by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm import Link
from .kernels import attend_with_lse, merge_


def ring_attention(
    link: Link,
    q_bhsd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    lengths: Sequence[int],
    resident: tuple[Tensor, Tensor] | None = None,
    mask_of: Callable[[int], Tensor | None] | None = None,
    scale: float | None = None,
    attend: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Softmax attention of this rank's queries over all ranks' keys.

    Args:
        link: the ring (size N).
        q_bhsd: this rank's queries (B, H, Sq, D).
        k_bhsd, v_bhsd: this rank's travelling keys and values (B, H, lengths[rank], D).
        lengths: number of travelling keys of every rank of the ring.
        resident: keys and values (B, H, Sr, D) that every rank has and that do not travel; they come before
            this rank's own travelling keys.
        mask_of: the mask (4-D, broadcastable) of this rank's queries over the keys of a ring rank; for this
            rank's own block the resident keys come first. None: no mask.
        scale: factor of the scores.
        attend: `attend_with_lse` of a kernel; default: torch's.

    Returns:
        (B, H, Sq, D). The own block is computed first, then those of ranks - 1, - 2 …: the merge order is
        that of the ring and differs by rank.
    """
    attend = attend or attend_with_lse
    batch, heads, _, dim = k_bhsd.shape
    out: Tensor | None = None
    lse: Tensor | None = None
    k, v = k_bhsd, v_bhsd
    for step in range(link.size):
        block = (link.rank - step) % link.size
        arriving = None
        if step + 1 < link.size:
            incoming = lengths[(block - 1) % link.size]
            # Posted before the computation below, waited for after it: the transfer hides behind attention.
            arriving = link.shift((k, v), [(batch, heads, incoming, dim)] * 2)
        keys, values = k, v
        if step == 0 and resident is not None:
            keys, values = _joined(resident[0], k), _joined(resident[1], v)
        part, part_lse = attend(q_bhsd, keys, values, mask_of(block) if mask_of else None, scale)
        if out is None or lse is None:
            out, lse = part, part_lse
        else:
            out, lse = merge_(out, lse, part, part_lse)
        if arriving is not None:
            k, v = arriving.wait()
    assert out is not None
    return out


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second], dim=2) if first.shape[2] else second
