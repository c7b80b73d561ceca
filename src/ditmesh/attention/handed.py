"""Attention functions that an application hands to its model with every call, as ComfyUI does.

Such a function takes ``(q, k, v, heads, mask, ...)`` and stands where the model calls attention. `HandedAttention`
takes its place: it calls torch's `scaled_dot_product_attention`, where the strategies are, and the kernel `"handed"`
calls the function for attention on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..core import intercept
from .kernels import register

HANDED = "handed"

# The function that computes attention in the call at hand; None: torch's own.
_function: ContextVar[Callable[..., Tensor] | None] = ContextVar("ditmesh_handed_attention", default=None)


class HandedKernel:
    """The function of the call at hand, as a kernel (`kernels.Kernel`)."""

    name = HANDED
    deterministic = False

    def supports(self, q_bhsd: Tensor, mask: Tensor | None) -> bool:
        """Whatever the model's own call supports."""
        return True

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """The attention output (B, H, Sq, D)."""
        function = _function.get()
        if function is None or scale not in (None, q_bhsd.shape[-1] ** -0.5):
            return intercept.original_attention()(q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)
        with intercept.unhandled():
            return function(q_bhsd, k_bhsd, v_bhsd, mask)


_KERNEL = HandedKernel()


def allow_handed() -> None:
    """Register the kernel; on every rank, before a model is parallelised with it."""
    register(_KERNEL)


class HandedAttention:
    """Stands where a model calls its attention: ``override(function, q, k, v, heads, mask=..., ...)``.

    ``inner``: what stood there before, called in the same way; None: the function alone.
    """

    def __init__(self, inner: Callable[..., Any] | None = None) -> None:
        self._inner = inner

    def __call__(
        self,
        function: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **more: Any,
    ) -> Tensor:
        """Attention of q (B, S, H·D), or (B, H, S, D) with ``skip_reshape``.

        The output is (B, S, H·D), or (B, H, S, D) with ``skip_output_reshape``.
        """
        if not intercept.is_handled():
            # This rank has all tokens: the application's own call, as it is.
            given = {**more, "attn_precision": attn_precision, "skip_reshape": skip_reshape}
            given |= {"mask": mask, "skip_output_reshape": skip_output_reshape}
            return (
                function(q, k, v, heads, **given)
                if self._inner is None
                else self._inner(function, q, k, v, heads, **given)
            )
        if not skip_reshape:
            q, k, v = (one.reshape(one.shape[0], one.shape[1], heads, -1).transpose(1, 2) for one in (q, k, v))
        if mask is not None:
            # (Sq, Sk) or (B, Sq, Sk): one of all heads.
            mask = mask[None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask

        def computed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            given = {**more, "attn_precision": attn_precision, "skip_reshape": True, "skip_output_reshape": True}
            if self._inner is None:
                return function(q, k, v, q.shape[1], mask=mask, **given)
            return self._inner(function, q, k, v, q.shape[1], mask=mask, **given)

        token = _function.set(computed)
        try:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        finally:
            _function.reset(token)
        return out if skip_output_reshape else out.transpose(1, 2).reshape(out.shape[0], -1, heads * out.shape[-1])
