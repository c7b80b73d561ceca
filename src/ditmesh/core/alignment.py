"""Alignment of tensors in memory: kernels look at it, and may add in another order elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# Torch's own allocations on a CPU begin at multiples of this, in bytes.
ALIGNMENT = 64


def rounded_up(size: int, multiple: int = ALIGNMENT) -> int:
    """The next multiple of a number, or the size itself if it is one."""
    return -(-size // multiple) * multiple


def offset_of(tensor: Tensor) -> int:
    """Bytes from the last multiple of `ALIGNMENT` to a tensor's first; a tensor mapped from a file may begin anywhere.

    One without values begins nowhere, and could with torch's own.
    """
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr() % ALIGNMENT


def memory(size: int, offset: int, device: torch.device) -> Tensor:
    """So many bytes that begin ``offset`` bytes behind a multiple of `ALIGNMENT`: (size,) uint8."""
    return torch.empty(offset + size, dtype=torch.uint8, device=device)[offset:]


def aligned(tensor: Tensor) -> Tensor:
    """The tensor contiguous, beginning where torch's own allocations do: kernels then always take the same path."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
