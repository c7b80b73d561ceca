"""Where tensors begin in memory: kernels look at it, and may add in another order elsewhere."""

from __future__ import annotations

from torch import Tensor

# Torch's own allocations on a CPU begin at multiples of this, in bytes.
ALIGNMENT = 64


def aligned(tensor: Tensor) -> Tensor:
    """The tensor contiguous, beginning where torch's own allocations do: kernels then always take the same path."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
