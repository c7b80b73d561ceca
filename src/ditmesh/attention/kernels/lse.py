"""Attention on one device that also returns the log-sum-exp of its scores, and the merge of two such results.

Parts of one softmax can be computed apart and merged when each part knows the log-sum-exp (LSE) of its
scores: Milakov & Gimelshein 2018, arXiv:1805.02867; used block-wise by ring attention, arXiv:2310.01889.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ConfigError

NEG_INF = float("-inf")
# Scores that `attend_backward_reference` holds at a time.
SCORES = 1 << 26


def attend_with_lse(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention and the log-sum-exp of its scores.

    Args:
        q_bhsd, k_bhsd, v_bhsd: (B, H, Sq, D), (B, H, Sk, D), (B, H, Sk, D). Sq and Sk may be 0.
        mask: None, boolean (True = attend) or additive; broadcastable to (B, H, Sq, Sk). 4-D.

    The output is (B, H, Sq, D) in q's dtype, the LSE (B, H, Sq) in float32 (float64 for float64). A query that may
    attend to nothing has output 0 and LSE -inf.
    """
    wide = torch.promote_types(q_bhsd.dtype, torch.float32)
    if 0 in (q_bhsd.shape[2], k_bhsd.shape[2]):
        # torch's kernel for CPUs divides by the number of queries.
        return torch.zeros_like(q_bhsd), q_bhsd.new_full(q_bhsd.shape[:3], NEG_INF, dtype=wide)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q_bhsd.dtype)
    result = None
    if q_bhsd.device.type == "cuda":
        result = _cuda(q_bhsd, k_bhsd, v_bhsd, mask, scale)
    if result is None:
        bias = None if mask is None else additive(mask, q_bhsd.dtype)
        kernel = fused("_scaled_dot_product_flash_attention_for_cpu") if q_bhsd.device.type == "cpu" else None
        if kernel is not None:
            result = kernel(q_bhsd, k_bhsd, v_bhsd, 0.0, False, attn_mask=bias, scale=scale)
        else:
            result = attend_with_lse_reference(q_bhsd, k_bhsd, v_bhsd, bias, scale)
    out, lse = result
    lse = lse[..., : q_bhsd.shape[2]].to(wide)
    return (out, lse) if mask is None else without_blind(out, lse, mask)


def unrounded(q_bhsd: Tensor) -> torch.dtype:
    """The dtype of copies from which `attend_with_lse` computes parts that are merged, so that none comes rounded.

    Kernels return a part in the dtype of its queries. A CPU without AMX computes as fast from float32 copies (with
    AVX512-BF16, too: docs/lab/gpus.md), and where there is no fused kernel scores are float32 anyway. GPUs and AMX
    multiply half precision several times as fast as float32: there parts are computed from the tensors themselves.
    """
    kind, dtype = q_bhsd.device.type, q_bhsd.dtype
    # torch's name for the question is private.
    amx: Callable[[], bool] = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    if kind == "cuda" or (kind == "cpu" and dtype == torch.bfloat16 and amx()):
        return dtype
    return torch.promote_types(dtype, torch.float32)


def attend_each_alone(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor | None:
    """Attention in one call that gives a head, a sample and a query the bits that they have in a call of their own.

    By torch's memory-efficient kernel on a GPU: a thread block adds up all keys of some queries of one head in their
    order, however many others there are. Flash attention cuts the keys of few heads into parts, to have work for all
    multiprocessors, and so adds in another order for other numbers of heads.

    Args and result: as of `attend_with_lse`, with at least one query and key, contiguous; without the LSE. None: there
    is no such kernel for the call.
    """
    found = _cuda(q_bhsd, k_bhsd, v_bhsd, mask, scale, flash=False)
    return None if found is None else found[0]


def without_blind(out: Tensor, lse: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, H, Sq, D) and LSE, with output 0 and LSE -inf for queries that see no key by the mask.

    Fused kernels report LSE 0 or +inf for such a query: it must not weigh in a merge.
    """
    lse = lse[..., : out.shape[2]]
    dead = ~mask.any(dim=-1) if mask.dtype == torch.bool else (mask == NEG_INF).all(dim=-1)
    dead = dead.expand(lse.shape)
    return out.masked_fill(dead.unsqueeze(-1), 0), lse.masked_fill(dead, NEG_INF)


def attend_with_lse_reference(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """`attend_with_lse` spelt out in float32 or float64; where torch has no fused kernel that returns its LSE."""
    wide = torch.promote_types(q_bhsd.dtype, torch.float32)
    scores = _scores(q_bhsd.to(wide), k_bhsd.to(wide), bias, scale)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == NEG_INF, 0).unsqueeze(-1))
    return (weights @ v_bhsd.to(wide)).to(q_bhsd.dtype), lse


def _scores(q_bhsd: Tensor, k_bhsd: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    scores = (q_bhsd @ k_bhsd.transpose(-1, -2)) * (1 / math.sqrt(q_bhsd.shape[-1]) if scale is None else scale)
    return scores if bias is None else scores + bias.to(scores.dtype)


def attend_backward(
    grad_bhsd: Tensor,
    q_bhsd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    out_bhsd: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of softmax attention from one block of its keys: of q, k and v, in q's dtype or a wider one.

    With the LSE of *all* keys the weights of a block are P = exp(S - LSE), and with the output over all keys
    delta = rowsum(dO * O); then dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale * dS K, dK = scale * dS^T Q:
    Dao 2023, arXiv:2307.08691 (FlashAttention-2), algorithm 2. What the blocks give for q adds up to its gradient.

    ``out_bhsd`` and ``lse`` are over all keys; the mask, the keys and the values are the block's.
    """
    if 0 in (q_bhsd.shape[2], k_bhsd.shape[2]):
        return torch.zeros_like(q_bhsd), torch.zeros_like(k_bhsd), torch.zeros_like(v_bhsd)
    # A query that sees nothing: exp(S - inf) = 0.
    lse = lse.masked_fill(lse == NEG_INF, math.inf)
    tensors = grad_bhsd, q_bhsd, k_bhsd, v_bhsd, out_bhsd, lse
    if q_bhsd.device.type == "cuda" and (found := _cuda_backward(*tensors, mask, scale)) is not None:
        return found
    bias = None if mask is None else additive(mask, q_bhsd.dtype)
    kernel = fused("_scaled_dot_product_flash_attention_for_cpu_backward")
    if q_bhsd.device.type == "cpu" and kernel is not None:
        return kernel(*tensors, 0.0, False, attn_mask=bias, scale=scale)
    return attend_backward_reference(*tensors, bias, scale)


def attend_backward_reference(
    grad_bhsd: Tensor,
    q_bhsd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    out_bhsd: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` spelt out in float32 or float64, for so many queries at a time that scores stay small."""
    wide = torch.promote_types(q_bhsd.dtype, torch.float32)
    grad, q, k, v, out = (tensor.to(wide) for tensor in (grad_bhsd, q_bhsd, k_bhsd, v_bhsd, out_bhsd))
    delta = (grad * out).sum(-1, keepdim=True)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    queries = q.shape[2]
    rows = max(1, SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for first in range(0, queries, rows):
        part = slice(first, first + rows)
        own = bias if bias is None or bias.shape[2] == 1 else bias[:, :, part]
        weights = torch.exp(_scores(q[:, :, part], k, own, scale) - lse[:, :, part].unsqueeze(-1))
        grad_v += weights.transpose(-1, -2) @ grad[:, :, part]
        slopes = weights * (grad[:, :, part] @ v.transpose(-1, -2) - delta[:, :, part]) * factor
        grad_q[:, :, part] = slopes @ k
        grad_k += slopes.transpose(-1, -2) @ q[:, :, part]
    return grad_q, grad_k, grad_v


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, blind: bool = True) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys; ``out`` is overwritten, and exact to its dtype only in float32.

    With a = LSE and b = the other's LSE the merged output is out + sigmoid(b - a) * (other - out), and its
    LSE is log(exp a + exp b). ``blind``: whether a query may see no key of either set.
    """
    return merge_out_(out, lse, other_out, other_lse, blind), torch.logaddexp(lse, other_lse)


def merge_out_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, blind: bool = True) -> Tensor:
    """The output of `merge_` alone, where no other part is merged into it."""
    weight = torch.sigmoid(other_lse - lse)
    if blind:
        # Both -inf: neither set has a key for the query; the difference is NaN, and any weight keeps the zeros.
        weight.nan_to_num_(0.0)
    return out.lerp_(other_out.to(out.dtype), weight.unsqueeze(-1).to(out.dtype))


def fused(name: str) -> Callable[..., Any] | None:
    """A fused kernel of torch that returns its LSE; None in a torch that has none of this name.

    Their names are private to torch, and no promise.
    """
    return getattr(torch.ops.aten, name, None)


def cudnn(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """`attend_with_lse` by the kernel of cuDNN that torch has."""
    kernel = fused("_scaled_dot_product_cudnn_attention")
    if kernel is None:
        raise ConfigError(
            "this torch has no cuDNN kernel that returns its log-sum-exp; use ulysses, or attention='native'"
        )
    q, k, v = (tensor.contiguous() for tensor in (q_bhsd, k_bhsd, v_bhsd))
    # Of a torch from 2.9 on the LSE is (B, H, S, 1).
    out, lse, *_ = kernel(q, k, v, mask, True, 0.0, False, False, scale=scale)
    return out, lse.reshape(q.shape[:3])


def _cuda_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, flash: bool = True) -> str:
    """The fused kernel that this GPU has for a call: ``"flash"``, ``"efficient"`` or ``""``.

    torch knows which architectures, dtypes and head sizes each takes (flash needs Ampere, neither takes float64), and
    which ones the program has turned off. Where q requires a gradient, the kernel has a backward for it, too.
    """
    cuda = torch.backends.cuda
    call = cuda.SDPAParams(q, k, v, bias, 0.0, False, False)
    if flash and bias is None and cuda.can_use_flash_attention(call):
        return "flash"
    return "efficient" if cuda.can_use_efficient_attention(call) else ""


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors (B, H, S, D) with D filled up with zeros to a multiple of 8, as kernels want it: the scores stay."""
    return [F.pad(t, (0, -t.shape[-1] % 8)) if t.shape[-1] % 8 else t for t in tensors]


def _aligned(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask as a bias (B, H, Sq, Sk), its rows aligned to 16 elements: the storage is padded, not the shape.

    Two kernels, whatever the mask is: ring attention does this for every block of keys.
    """
    keys = k.shape[2]
    padded = torch.full((*mask.shape[:-1], (keys + 15) // 16 * 16), NEG_INF, dtype=q.dtype, device=q.device)
    bias = padded[..., :keys]
    if mask.dtype == torch.bool:
        bias.masked_fill_(mask, 0)
    else:
        bias.copy_(mask)
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], keys)


def _cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, flash: bool = True
) -> tuple[Tensor, Tensor] | None:
    """By a fused kernel; None: there is none for the call. ``flash``: it may be flash attention."""
    width = q.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    q, k, v = _padded((q, k, v))
    bias = None if mask is None else _aligned(mask, q, k)
    kind = _cuda_kernel(q, k, v, bias, flash)
    kernel = fused(f"_scaled_dot_product_{kind}_attention")
    if kernel is None:
        return None
    given = (0.0, False, False) if kind == "flash" else (bias, True, 0.0, False)
    out, lse, *_ = kernel(q, k, v, *given, scale=scale)
    return out[..., :width], lse


def _cuda_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`attend_backward` by a fused kernel; None: there is none for the call."""
    width, queries, keys = q.shape[-1], q.shape[2], k.shape[2]
    scale = 1 / math.sqrt(width) if scale is None else scale
    # Their kernels take one dtype.
    grad, q, k, v, out = _padded([t.to(q.dtype) for t in (grad, q, k, v, out)])
    bias = None if mask is None else _aligned(mask, q, k)
    kind = _cuda_kernel(q.detach().requires_grad_(), k, v, bias)
    kernel = fused(f"_scaled_dot_product_{kind}_attention_backward")
    if kernel is None:
        return None
    # The state of a dropout that is not there: as the forward kernels return it, never read.
    wide = torch.uint64 if kind == "flash" else torch.int64
    seed, offset = torch.empty(2, dtype=wide, device=q.device), torch.empty((), dtype=wide, device=q.device)
    if kind == "flash":
        # One sequence a row: no cumulated lengths.
        given = (None, None, queries, keys, 0.0, False, seed, offset)
        gradients = kernel(grad, q, k, v, out, lse.contiguous(), *given, scale=scale)
    else:
        # It reads the LSE in blocks of 32 queries; and in half precision an output in which a token's heads lie side by
        # side, whatever its strides say: other layouts give gradients of whatever lies there.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        lse = F.pad(lse, (0, -queries % 32), value=math.inf)
        seed = offset
        given = (seed, offset, 0.0, [True, True, True, False], False)
        gradients = kernel(grad, q, k, v, bias, out, lse, *given, scale=scale)
    by_q, by_k, by_v = (gradient[..., :width] for gradient in gradients[:3])
    return by_q, by_k, by_v


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask in its additive form."""
    if mask.dtype == torch.bool:
        return torch.full_like(mask, NEG_INF, dtype=dtype).masked_fill_(mask, 0)
    return mask.to(dtype)
