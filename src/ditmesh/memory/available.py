"""Memory that a device, or a host's ranks, have left. Imports torch where a GPU is asked only."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

CGROUPS = Path("/sys/fs/cgroup")


def free_memory(device: torch.device, ranks_here: int = 1) -> float:
    """Bytes that a rank may still take.

    Args:
        device: of the rank. On a CPU: equal parts of the free memory of the host or of the container's limit.
        ranks_here: that share the host.
    """
    from ..core.gpus import has_own_memory

    if has_own_memory(device):
        import torch

        # Freed tensors that torch's allocator keeps become the next ones.
        cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return float(torch.get_device_module(device).mem_get_info(device)[0] + cached)
    return min(float(psutil.virtual_memory().available), _left_by_limits()) / ranks_here


def _left_by_limits() -> float:
    """The free memory within the limits of this process's control group (version 2); infinite without limits."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return _left(CGROUPS, line.removeprefix("0::"))
    return float("inf")


def _left(root: Path, path: str) -> float:
    """Bytes left to a group, within all groups around it."""
    left, inner = float("inf"), root / path.lstrip("/")
    for folder in (inner, *inner.parents):
        with suppress(OSError, ValueError):
            # Files' pages go when memory is wanted.
            pages = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            taken = int((folder / "memory.current").read_text()) - int(pages.get("inactive_file", 0))
            left = min(left, float(max(0, int((folder / "memory.max").read_text()) - taken)))
        if folder == root:
            break
    return left
