"""Copies from the host to a device for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def onto(tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a device; ``dtype``: cast there.

    To a GPU it goes through pinned memory of torch's own allocator, which lends it again only after the copy is
    done. From ordinary memory CUDA would first wait for all that the device has to do.
    """
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype)
