"""What a benchmark ran on."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch


def give_freed_memory_back() -> None:
    """Have the C library return what is freed to the system at once, from 1 MiB on (glibc's M_MMAP_THRESHOLD).

    Else its heap keeps chunks below 32 MB that were freed, as it happens to find them useful.
    """
    # M_MMAP_THRESHOLD: a quantised matrix is smaller than a megabyte.
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)


def resident(name: str) -> int:
    """Bytes of this process: now (VmRSS), at most (VmHWM), private (RssAnon)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, GPU and versions; ``text`` holds them in a sentence."""
    import diffusers

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    machine: dict[str, Any] = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": gpu,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
    machine["text"] = (
        f"{cpu}, {machine['cores']} cores, {gpu or 'no GPU'}; Python {machine['python']}, "
        f"torch {machine['torch']}, diffusers {machine['diffusers']}; {machine['date']}"
    )
    return machine


@contextmanager
def counted(alive: Any) -> Iterator[None]:
    """Messages in shared memory are no tensors."""
    from ditmesh.comm.shared import SharedMemory

    take, slot = SharedMemory.take, SharedMemory._slot

    def taken(self: Any, *args: Any) -> Any:
        tensors = take(self, *args)
        for tensor in tensors:
            alive.hold(tensor)
        return tensors

    def slotted(self: Any, size: int) -> Any:
        made = slot(self, size)
        alive.hold(made.contents)
        return made

    SharedMemory.take, SharedMemory._slot = taken, slotted  # type: ignore[method-assign]
    try:
        with alive:
            yield
    finally:
        SharedMemory.take, SharedMemory._slot = take, slot  # type: ignore[method-assign]
