"""Which backend of a process group carries the tensors of a device: a group may have one for each kind of device."""

from __future__ import annotations

import torch
import torch.distributed as dist

# Tensors of GPUs over NCCL; Python objects, and tensors on the host, over gloo. torch pickles objects through the
# device where a group has NCCL alone, and each of them makes the host wait for it.
ON_GPUS = "cpu:gloo,cuda:nccl"

# What NCCL carries; gloo takes others, too, which would fail on the first GPU.
CARRIED = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}


def backend_of(group: dist.ProcessGroup | None, device: torch.device | str) -> str:
    """Name of the backend that carries a device's tensors, such as ``"gloo"``; empty where the group has none for it.

    ``torch.distributed.get_backend`` names how a group was asked for instead: ``"undefined"`` after an
    ``init_process_group()`` without a backend, for a group that sends CPU tensors over gloo.

    Args:
        group: None: the default group, which has to be there.
        device: of the tensors.
    """
    # The typed stub leaves out that WORLD is there once the default group is.
    world = dist.group.WORLD if group is None else group
    assert world is not None
    try:
        return world._get_backend(torch.device(device)).name()
    except RuntimeError:
        return ""


def device_of_rank() -> torch.device:
    """Where this rank computes: the current GPU when the ranks talk over NCCL, else the CPU."""
    on_nccl = dist.is_available() and dist.is_initialized() and backend_of(None, "cuda") == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_nccl else torch.device("cpu")
