"""Attention on CUDA without a GPU: which kernel a call gets, what it returns, and its backward by blocks of keys."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ditmesh.attention.kernels import attend_backward, attend_with_lse, lse
from rules.fake_cuda import KIND, STAND_INS, fake_device, has_kernels, unavailable

needs_guard = pytest.mark.skipif(unavailable() is not None or KIND != "cuda", reason="no fake CUDA device")
AMPERE, TURING = (8, 0), (7, 5)
BACKWARD = {
    kernel: STAND_INS[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")]
    for kernel in ("flash", "efficient")
}


class Kernels(TorchDispatchMode):
    """The attention kernels that are called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::_scaled_dot_product_")
        if name != func._schema.name:
            self.names.append(name.replace("_attention", ""))
        return func(*args, **(kwargs or {}))


@needs_guard
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [64, 60, 256, 320])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("capability", [AMPERE, TURING])
def test_every_call_gets_a_kernel_that_the_gpu_has(capability, dtype, width, masked):
    """Flash from Ampere on, bfloat16 as well; float64 has none; shapes and dtypes are those of the reference."""
    with FakeTensorMode(), has_kernels(capability), Kernels() as called:
        q = torch.empty(2, 9, 3, width, device="cuda", dtype=dtype).transpose(1, 2)
        k = torch.empty(2, 21, 3, width, device="cuda", dtype=dtype).transpose(1, 2)
        mask = torch.ones(2, 1, 1, 21, dtype=torch.bool, device="cuda") if masked else None
        out, found = attend_with_lse(q, k, k, mask)
        gradients = attend_backward(out, q, k, k, out, found, mask)
    half = dtype in (torch.float16, torch.bfloat16)
    if dtype == torch.float64 or (dtype == torch.bfloat16 and capability == TURING):
        kernel = None
    else:
        kernel = "flash" if half and capability == AMPERE and width <= 256 and not masked else "efficient"
    assert called.names == ([] if kernel is None else [kernel, f"{kernel}_backward"])
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (found.shape, found.dtype) == (q.shape[:3], torch.promote_types(dtype, torch.float32))
    assert [one.shape for one in gradients] == [q.shape, k.shape, k.shape]


@needs_guard
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_costs_six_kernels_more(dtype):
    """Two make the kernel's bias of it, aligned, and four leave out queries that see no key."""
    launched = []
    for masked in (False, True):
        with fake_device() as device:
            q, k = (torch.ones(1, 2, length, 64, device="cuda") for length in (16, 21))
            mask = torch.ones(1, 1, 1, 21, device="cuda").to(dtype) if masked else None
            device.launches.clear()
            attend_with_lse(q, k, k, mask)
            launched.append(device.launches.total())
    assert launched == [1, 7]


@pytest.mark.parametrize("width", [64, 60])
@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_backward_by_blocks_of_keys_is_that_of_all_keys(kernel, width):
    """What is padded for a kernel is cut off again, and the blocks' gradients of q add up."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 37, width, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 1, 37, 37) > 0.3 if kernel == "efficient" else None
    if mask is not None:
        mask[..., 0] = True
    truth = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    grad = torch.randn_like(truth)
    truth.backward(grad)
    out, found = lse.attend_with_lse_reference(q, k, v, None if mask is None else lse.additive(mask, q.dtype), None)
    blocks = []
    with (
        torch.no_grad(),
        mock.patch.object(lse, "_cuda_kernel", return_value=kernel),
        mock.patch.object(lse, "fused", return_value=BACKWARD[kernel]),
    ):
        for part in (slice(0, 16), slice(16, 37)):
            bias = None if mask is None else lse.additive(mask[..., part], q.dtype)
            given = grad, q, k[:, :, part], v[:, :, part], out.detach(), found.detach()
            blocks.append(lse._cuda_backward(*given, bias, None))
    by_q = sum(block[0] for block in blocks)
    by_k, by_v = (torch.cat([block[place] for block in blocks], 2) for place in (1, 2))
    for value, leaf in ((by_q, q), (by_k, k), (by_v, v)):
        assert leaf.grad is not None
        assert torch.allclose(value, leaf.grad, atol=1e-12)
