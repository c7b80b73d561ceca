"""Devices and threads of the ranks of one machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from ..errors import ConfigError

DeviceChoice = Literal["auto", "cpu", "cuda"]


def resolve_device(device: DeviceChoice, world_size: int) -> Literal["cpu", "cuda"]:
    """``"auto"`` to what is there; refuse what is not.

    Args:
        device: ``"auto"`` takes CUDA when a GPU is there, else the CPU.
        world_size: number of ranks on this machine; each needs a GPU of its own when the device is CUDA.

    Raises:
        ConfigError: an unknown device, CUDA without a GPU, or fewer GPUs than ranks.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {device!r} is unknown; use auto, cpu or cuda")
    if device == "cpu":
        return "cpu"
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        if device == "cuda":
            reason = "this torch was built without CUDA" if torch.version.cuda is None else "the driver shows no GPU"
            raise ConfigError(f"device cuda: no GPU is there ({reason}); use --device cpu, or install torch for CUDA")
        return "cpu"
    if gpus < world_size:
        raise ConfigError(
            f"{world_size} ranks need {world_size} GPUs, but {gpus} {'is' if gpus == 1 else 'are'} there; "
            f"use at most {gpus} devices, or --device cpu"
        )
    return "cuda"


def physical_cores() -> int:
    """Cores this process may use, hyper-threads of one core counted once."""
    if sys.platform != "linux":
        import psutil

        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    # psutil counts those of the whole machine, whatever this process may use.
    logical = sorted(os.sched_getaffinity(0))
    cores = set()
    for cpu in logical:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def default_threads(world_size: int, device: Literal["cpu", "cuda"]) -> int:
    """Threads for each of ``world_size`` ranks: the cores shared out; at most 8 where a GPU does the work."""
    share = max(1, physical_cores() // world_size)
    return min(8, share) if device == "cuda" else share
