"""The backend of a process group for the tensors of a device: a group may have one for each kind of device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# What NCCL carries; gloo takes others, too, which would fail on the first GPU.
CARRIED = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}


def collectives_of(kind: str) -> str:
    """The backend that torch names for a kind of device, such as ``"nccl"``; empty: it names none."""
    return dist.Backend.default_device_backend_map.get(kind, "")


def group_backends(kind: str) -> str:
    """The ``backend`` of a process group of ranks on a kind of device: for its tensors its own, beside gloo.

    torch pickles objects through the device where a group has NCCL alone, and each of them makes the host wait for it.
    """
    own = collectives_of(kind)
    return f"cpu:gloo,{kind}:{own}" if own and kind != "cpu" else "gloo"


def bound_device(device: torch.device, world_size: int) -> torch.device | None:
    """The ``device_id`` of the default process group of ranks that compute on such a device.

    Every other group is then split from it at once. A single rank sends nothing: it gets no communicator, which would
    take 580 MiB of an H200's memory.
    """
    return device if device.type != "cpu" and world_size > 1 else None


def group_options(device: torch.device) -> dict[str, Any]:
    """Arguments of ``torch.distributed.new_group`` for a group that carries a device's tensors, and objects.

    A group of a job that was set up with NCCL alone has a half for objects, too.
    """
    own = device.type != "cpu" and backend_of(None, device) == collectives_of(device.type)
    return {"backend": group_backends(device.type)} if own else {}


def backend_of(group: dist.ProcessGroup | None, device: torch.device | str) -> str:
    """Name of the backend that carries a device's tensors, such as ``"gloo"``; empty where the group has none for it.

    ``torch.distributed.get_backend`` names how a group was asked for instead: ``"undefined"`` after an
    ``init_process_group()`` without a backend, for a group that sends CPU tensors over gloo.

    ``group``: None: the default group, which has to be there.
    """
    # The typed stub leaves out that WORLD is there once the default group is.
    world = dist.group.WORLD if group is None else group
    assert world is not None
    try:
        return world._get_backend(torch.device(device)).name()
    except RuntimeError:
        return ""


def carries_none(kind: str) -> str:
    """The error message for a process group without a backend for tensors of this kind of device."""
    return (
        f"the process group carries no {kind} tensors, and the model is on the {kind}; move the pipeline to its rank's "
        f'device before ditmesh.parallelize, or call torch.distributed.init_process_group("{group_backends(kind)}")'
    )


def device_of_rank() -> torch.device:
    """The device of this rank: the accelerator's current one where the ranks have its backend, else the CPU."""
    kind = here.type if (here := torch.accelerator.current_accelerator()) else ""
    if kind and dist.is_available() and dist.is_initialized() and backend_of(None, kind) == collectives_of(kind) != "":
        return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device("cpu")
