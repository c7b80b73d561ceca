"""Ring attention: keys and values pass around the ring while every rank computes on its current block.

Liu et al. 2023, arXiv:2310.01889. Each rank keeps its queries; after N - 1 shifts it has met every block of
keys. Partial results merge by their log-sum-exp. In backward keys travel again, and the gradients of a block of keys
with it: the log-sum-exp over all keys gives every rank its queries' weights of any block (Dao 2023, arXiv:2307.08691).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm import Link, Transfer
from ..core.values import tracked
from .kernels import attend_backward, attend_with_lse, merge_, merge_out_, unrounded


class _Ring(NamedTuple):
    """The ranks and settings of one ring attention; see `ring_attention`."""

    link: Link
    lengths: Sequence[int]
    mask_of: Callable[[int], Tensor | None] | None
    scale: float | None
    attend: Callable[..., tuple[Tensor, Tensor]]
    parts: torch.dtype

    def arriving(self, tensors: Sequence[Tensor], block: int) -> Transfer:
        """Send tensors of rank ``block``'s keys to the next rank, and receive those of the previous block."""
        batch, heads, _, dim = tensors[0].shape
        incoming = self.lengths[(block - 1) % self.link.size]
        return self.link.shift(tensors, [(batch, heads, incoming, dim)] * len(tensors))

    def mask(self, block: int) -> Tensor | None:
        """The mask of this rank's queries over the keys of a rank."""
        return self.mask_of(block) if self.mask_of else None


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
    parts: torch.dtype | None = None,
) -> Tensor:
    """Softmax attention of this rank's queries over all ranks' keys, (B, H, Sq, D).

    Args:
        q_bhsd, k_bhsd, v_bhsd: this rank's queries, and its travelling keys and values, ``lengths[rank]`` of them.
        resident: keys and values that every rank has; they stay, and come before this rank's own travelling keys.
        mask_of: the mask (4-D) of this rank's queries over the keys of a ring rank; in its own resident ones first.
        attend: `attend_with_lse` of a kernel; default: torch's.
        parts: dtype of the copies that it gets, see `LocalAttention.unrounded`; default: that of torch's kernel, or
            with ``attend`` the tensors' own. Keys and values travel in theirs.

    The own block is computed first, then those of ranks - 1, - 2 …: the merge order differs by rank.
    """
    if parts is None:
        parts = q_bhsd.dtype if attend else unrounded(q_bhsd)
    ring = _Ring(link, lengths, mask_of, scale, attend or attend_with_lse, parts)
    if tracked(q_bhsd, k_bhsd, v_bhsd, *(resident or ())):
        return cast(Tensor, _RingAttention.apply(ring, q_bhsd, k_bhsd, v_bhsd, *(resident or ())))
    return _forward(ring, q_bhsd, k_bhsd, v_bhsd, resident, for_backward=False)[0]


def _forward(
    ring: _Ring,
    q_bhsd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    resident: Sequence[Tensor] | None,
    for_backward: bool,
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp over all ranks' keys; the latter is right for backward alone."""
    link = ring.link
    out: Tensor | None = None
    lse: Tensor | None = None
    wide = torch.float32 if link.size > 1 and q_bhsd.dtype.itemsize < 4 else q_bhsd.dtype
    blind = ring.mask_of is not None or 0 in ring.lengths
    # A part that its kernel has rounded adds a rounding to the sum's own, whatever merges it.
    parts = ring.parts if link.size > 1 else q_bhsd.dtype
    q, k, v = q_bhsd.to(parts), k_bhsd, v_bhsd
    for step in range(link.size):
        block = (link.rank - step) % link.size
        # Posted before the computation below, waited for after it: the transfer hides behind attention.
        arriving = ring.arriving((k, v), block) if step + 1 < link.size else None
        keys, values = k, v
        if step == 0 and resident:
            keys, values = _joined(resident[0], k), _joined(resident[1], v)
        part, part_lse = ring.attend(q, keys.to(parts), values.to(parts), ring.mask(block), ring.scale)
        if out is None or lse is None:
            # Parts are merged in float32 and rounded once: in half precision every merge would add an error.
            out, lse = part.to(wide), part_lse
        elif for_backward or arriving is not None:
            out, lse = merge_(out, lse, part, part_lse, blind)
        else:
            out = merge_out_(out, lse, part, part_lse, blind)
        if arriving is not None:
            k, v = arriving.wait()
    assert out is not None
    assert lse is not None
    return out.to(q_bhsd.dtype), lse


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, q: Tensor, k: Tensor, v: Tensor, *resident: Tensor) -> Tensor:
        out, lse = _forward(ring, q, k, v, resident, for_backward=True)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse, *resident)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse, *resident = ctx.saved_tensors
        ring: _Ring = ctx.ring
        link, stay = ring.link, resident[0].shape[2] if resident else 0
        at_home: list[Tensor] = []
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.zeros_like(q, dtype=wide)
        # The gradients of the block of keys that is here, so far.
        coming: Transfer | None = None
        for step in range(link.size):
            block = (link.rank - step) % link.size
            arriving = ring.arriving((k, v), block) if step + 1 < link.size else None
            keys, values = k, v
            if step == 0 and resident:
                keys, values = _joined(resident[0], k), _joined(resident[1], v)
            by_q, *gradients = attend_backward(grads[0], q, keys, values, out, lse, ring.mask(block), ring.scale)
            grad_q += by_q
            if step == 0 and resident:
                at_home = [grad[:, :, :stay] for grad in gradients]
                gradients = [grad[:, :, stay:] for grad in gradients]
            gradients = [grad.to(wide) for grad in gradients]
            if coming is not None:
                gradients = [grad + before for grad, before in zip(gradients, coming.wait(), strict=True)]
            coming = ring.arriving(gradients, block)
            if arriving is not None:
                k, v = arriving.wait()
        assert coming is not None
        # After as many shifts as there are ranks they are back where the keys are from.
        back = [grad.to(q.dtype) for grad in (grad_q, *coming.wait(), *at_home)]
        return None, *back


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second], dim=2) if first.shape[2] else second
