"""The kernels that are always there."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import intercept
from .lse import additive, attend_with_lse, attend_with_lse_reference, unrounded


class Native:
    """`torch.nn.functional.scaled_dot_product_attention`, or the function with which the program has replaced it."""

    name = "native"
    deterministic = True

    def replaced(self) -> str | None:
        """The function with which the program replaced torch's before the interception; None: none."""
        found = intercept.original_attention()
        if found is intercept.sdpa:
            return None
        name = getattr(found, "__qualname__", type(found).__qualname__)
        return f"{name}, which replaces torch's scaled_dot_product_attention,"

    def supports(self, q_bhsd: Tensor, mask: Tensor | None) -> bool:
        return True

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        return intercept.original_attention()(q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)

    def attend_with_lse(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        return attend_with_lse(q_bhsd, k_bhsd, v_bhsd, mask, scale)

    def unrounded(self, q_bhsd: Tensor) -> torch.dtype:
        return unrounded(q_bhsd)


class Math:
    """An explicit implementation in float32, on any device; scores take memory B·H·Sq·Sk."""

    name = "math"
    deterministic = True

    def supports(self, q_bhsd: Tensor, mask: Tensor | None) -> bool:
        return q_bhsd.dtype != torch.float64

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        return self.attend_with_lse(q_bhsd, k_bhsd, v_bhsd, mask, scale)[0]

    def attend_with_lse(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        bias = None if mask is None else additive(mask, torch.float32)
        return attend_with_lse_reference(q_bhsd, k_bhsd, v_bhsd, bias, scale)

    def unrounded(self, q_bhsd: Tensor) -> torch.dtype:
        """See `LocalAttention.unrounded`: it computes in float32 wherever it is."""
        return torch.promote_types(q_bhsd.dtype, torch.float32)
