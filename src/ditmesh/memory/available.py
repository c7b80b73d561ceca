"""Memory that a device, or a host's ranks, have left. Imports torch where a GPU is asked only."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ..generate.model_info import ModelInfo
from .cards import parts

if TYPE_CHECKING:
    import torch

CGROUPS = Path("/sys/fs/cgroup")
# Seconds for the driver's tool to answer.
QUERY_LIMIT = 10.0
# More than an image's activations take, in bytes a pixel and sample: sizes far from the limit are not predicted.
MAX_PIXEL_BYTES = 16e3


def free_memory(device: torch.device, ranks_here: int = 1) -> float:
    """Bytes that a rank may still take.

    Args:
        device: of the rank. On a CPU: equal parts of the free memory of the host or of the container's limit.
        ranks_here: that share the host.
    """
    if device.type == "cuda":
        import torch

        # Freed tensors that torch's allocator keeps become the next ones.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    return _free_on_host() / ranks_here


def free_memory_before_ranks(kind: str, ranks: int) -> float | None:
    """Bytes that a rank of this machine may take once it has started; None: not known.

    Asks the driver's tool about GPUs: a process that owns ranks makes no CUDA context of its own.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
        ranks: that will share the host.
    """
    if kind == "cpu":
        return _free_on_host() / ranks
    which = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(
            command + (["-i", which] if which else []), capture_output=True, text=True, timeout=QUERY_LIMIT, check=True
        )
        mebibytes = [float(line) for line in asked.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    # Ranks have a CUDA context each.
    return min(mebibytes) * 2**20 - float(parts()["shares"]["runtime"]) if mebibytes else None


def far_from(room: float, stored: float, float32: bool, pixels: float) -> bool:
    """True if a model is so small beside ``room`` bytes of a rank that nothing needs to be predicted.

    Args:
        stored: bytes of its files.
        float32: whether it computes in float32, of which files may hold half.
        pixels: of a call; 0: not known.
    """
    return stored * (2 if float32 else 1) + 2 * MAX_PIXEL_BYTES * pixels < room


def stored_bytes(info: ModelInfo) -> float:
    """Bytes of a pipeline's weight files."""
    return float(sum(path.stat().st_size for path in info.files.glob("*/*.safetensors")))


def _free_on_host() -> float:
    return min(float(psutil.virtual_memory().available), _left_by_limits(Path("/proc/self/cgroup")))


def _left_by_limits(groups: Path) -> float:
    """The free memory within this process's control group limits; infinite without limits."""
    left = float("inf")
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                left = min(left, _left(CGROUPS, path, "memory.max", "memory.current", "inactive_file"))
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                left = min(left, _left(CGROUPS / "memory", path, *names))
    return left


def _left(root: Path, path: str, limit: str, used: str, cache: str) -> float:
    """Bytes left to a group, within all groups around it."""
    left, folder = float("inf"), root / path.lstrip("/")
    while True:
        with suppress(OSError, ValueError):
            # Files' pages go when memory is wanted.
            pages = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            taken = int((folder / used).read_text()) - int(pages.get(cache, 0))
            left = min(left, float(max(0, int((folder / limit).read_text()) - taken)))
        if folder == root or root not in folder.parents:
            return left
        folder = folder.parent
