"""Kernels that are attention backends of diffusers: flash-attn, SageAttention, flex, xformers, those of torch.

A backend is a function of diffusers' registry (`diffusers.models.attention_dispatch`). What it takes and returns is
written down here for every one that is known, because it cannot be asked: whether masks, and how its log-sum-exp is
laid out. All of them return the natural logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...core import intercept
from ...errors import ConfigError, LayoutError
from .lse import NEG_INF, additive, attend_with_lse, attend_with_lse_reference, cudnn, unrounded, without_blind

Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "float | None"], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Traits:
    """The known properties of a backend.

    Attributes:
        masks: whether it takes masks.
        lse: how it lays its LSE out, ``"bhs"`` or ``"bsh"``; a function that computes as the backend does and returns
            it; None: it does not return it.
        flag: the argument that makes it return the LSE.
        cuda: whether it runs on CUDA only, where diffusers' checks do not say so.
        additive: masks are handed to it as what is added to the scores: diffusers' functions take boolean ones of these
            for something else.
        deterministic: see `Kernel`.
    """

    masks: bool = False
    lse: Literal["bhs", "bsh"] | Attend | None = None
    flag: str = "return_lse"
    cuda: bool = False
    additive: bool = False
    deterministic: bool = False


def _flex_with_lse(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Flex attention that returns its LSE, which diffusers' function of that name cannot return.

    The function is looked up at every call: a program may have put a compiled one in its place.
    """
    from torch.nn.attention import flex_attention

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[batch, head, query, key]

    bias = None if mask is None else mask.expand(*q_bhsd.shape[:3], k_bhsd.shape[2])
    given: dict[str, Any] = {"score_mod": None if bias is None else score_mod, "scale": scale}
    request = getattr(flex_attention, "AuxRequest", None)
    if request is None:
        found: Any = flex_attention.flex_attention(q_bhsd, k_bhsd, v_bhsd, **given, return_lse=True)
        return found
    out, more = flex_attention.flex_attention(q_bhsd, k_bhsd, v_bhsd, **given, return_aux=request(lse=True))
    return out, more.lse


_BHS = Traits(lse="bhs")
TRAITS: dict[str, Traits] = {
    "flash": _BHS,
    "flash_hub": _BHS,
    "flash_4_hub": Traits(),
    "_flash_3": Traits(lse="bsh"),
    "_flash_3_hub": Traits(lse="bhs", flag="return_attn_probs"),
    "aiter_fa2_hub": _BHS,
    "flex": Traits(True, _flex_with_lse, additive=True),
    "_native_cudnn": Traits(True, cudnn, cuda=True),
    "_native_efficient": Traits(True, attend_with_lse, cuda=True),
    "_native_flash": Traits(lse=attend_with_lse),
    "_native_math": Traits(True, attend_with_lse_reference, deterministic=True),
    "sage": _BHS,
    "sage_hub": _BHS,
    "_sage_qk_int8_pv_fp8_cuda": _BHS,
    "_sage_qk_int8_pv_fp8_cuda_sm90": _BHS,
    "_sage_qk_int8_pv_fp16_cuda": _BHS,
    "_sage_qk_int8_pv_fp16_triton": _BHS,
    "xformers": Traits(True, additive=True),
}


class DiffusersKernel:
    """An attention backend of diffusers, by its name there, as a kernel; see `Kernel`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.traits = TRAITS[name]
        self.deterministic = self.traits.deterministic
        self._supported: dict[tuple[Any, ...], bool] = {}

    def supports(self, q_bhsd: Tensor, mask: Tensor | None) -> bool:
        """True if diffusers' own checks of the backend let such queries pass, and it takes such a mask."""
        key = (q_bhsd.dtype, q_bhsd.device, q_bhsd.shape[-1])
        if key not in self._supported:
            self._supported[key] = self._passes(q_bhsd.transpose(1, 2))
        return self._supported[key] and (mask is None or self.traits.masks)

    def _passes(self, q_bshd: Tensor) -> bool:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        if self.traits.cuda and q_bshd.device.type != "cuda":
            return False
        try:
            for check in _AttentionBackendRegistry._constraints[AttentionBackendName(self.name)]:
                check(query=q_bshd, key=q_bshd, value=q_bshd, attn_mask=None, is_causal=False)
        except ValueError:
            return False
        return True

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        return intercept.call_backend(
            self.name, q_bhsd, k_bhsd, v_bhsd, attn_mask=self._mask(mask, q_bhsd, k_bhsd), scale=scale
        )

    def _mask(self, mask: Tensor | None, q_bhsd: Tensor, k_bhsd: Tensor) -> Tensor | None:
        if not isinstance(mask, Tensor):
            return mask
        mask = additive(mask, q_bhsd.dtype) if self.traits.additive else mask
        return mask.reshape((1,) * (4 - mask.dim()) + mask.shape).expand(-1, -1, -1, k_bhsd.shape[2])


class BackendWithLse(DiffusersKernel):
    """One that can also serve ring attention; see `KernelWithLse`."""

    def attend_with_lse(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        if k_bhsd.shape[2] == 0:
            return torch.zeros_like(q_bhsd), q_bhsd.new_full(q_bhsd.shape[:3], NEG_INF, dtype=torch.float32)
        mask, order = self._mask(mask, q_bhsd, k_bhsd), self.traits.lse
        if callable(order):
            out, lse = order(q_bhsd, k_bhsd, v_bhsd, None if mask is None else additive(mask, q_bhsd.dtype), scale)
        else:
            returned = intercept.call_backend(
                self.name, q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale, **{self.traits.flag: True}
            )
            out, lse = returned[0], self._in_order(returned[1], q_bhsd)
        # The merge writes into its arguments.
        out = out.clone() if out.data_ptr() in (q_bhsd.data_ptr(), v_bhsd.data_ptr()) else out
        return (out, lse.float()) if mask is None else without_blind(out, lse, mask)

    def unrounded(self, q_bhsd: Tensor) -> torch.dtype:
        if self.traits.lse is attend_with_lse_reference:
            return torch.promote_types(q_bhsd.dtype, torch.float32)
        return unrounded(q_bhsd) if self.traits.lse is attend_with_lse else q_bhsd.dtype

    def _in_order(self, lse: Tensor, q_bhsd: Tensor) -> Tensor:
        """The LSE as (B, H, Sq)."""
        batch, heads, length, _ = q_bhsd.shape
        heads_first = self.traits.lse == "bhs"
        shape = (batch, heads, length) if heads_first else (batch, length, heads)
        if tuple(lse.shape) != shape:
            raise LayoutError(
                f"the attention backend {self.name!r} returned its log-sum-exp as {tuple(lse.shape)} where {shape} was "
                "expected, so ring attention cannot merge it; use ulysses instead of ring, or attention='native'"
            )
        return lse if heads_first else lse.transpose(1, 2)


def known_backends() -> list[str]:
    """Names of diffusers' attention backends that can be kernels."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    return [str(name.value) for name in AttentionBackendName if name.value in TRAITS]


def backend_kernel(name: str) -> DiffusersKernel | None:
    """The kernel that is the backend of that name, or None; `ConfigError`: it cannot be used on this machine."""
    from diffusers.models import attention_dispatch as dispatch

    if name not in {member.value for member in dispatch.AttentionBackendName}:
        return None
    if name not in TRAITS:
        raise ConfigError(
            f"attention={name!r} is a backend of diffusers that ditmesh does not support; use attention='native'"
        )
    member = dispatch.AttentionBackendName(name)
    try:
        dispatch._check_attention_backend_requirements(member)
        dispatch._maybe_download_kernel_for_backend(member)
    except Exception as error:
        # A kernel from the hub may raise any exception.
        words = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"attention={name!r} cannot be used here: {words}; or use attention='native'") from error
    return (DiffusersKernel if TRAITS[name].lse is None else BackendWithLse)(name)


def backends_of(modules: Iterable[nn.Module]) -> set[str]:
    """Names of the attention backends that modules use; ``"native"`` is torch's `scaled_dot_product_attention`.

    A module on which none is set uses the process's: ``DIFFUSERS_ATTN_BACKEND``, or what was set last on any model.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    active = _AttentionBackendRegistry.get_active_backend()[0]
    processors = [getattr(module, "processor", None) for module in modules]
    missing = object()
    chosen = [getattr(one, "_attention_backend", missing) for one in processors]
    chosen = [active if name is None else name for name in chosen if name is not missing]
    return {str(AttentionBackendName(name).value) for name in chosen}
