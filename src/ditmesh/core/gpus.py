"""GPUs: what their libraries read once, what decides their bits, and which processors are near them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

# The setting that cuBLAS needs in its environment before it is first used, to add in one order.
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"

# Read once in a process: by cuBLAS with its first product, by torch's allocator with its first tensor on a GPU.
SETTINGS = {
    # Of 32 MiB, which is what each has by itself on Hopper. A product's algorithm depends on the room it has, so that
    # ranks have to have the same.
    CUBLAS: ":4096:8",
    "CUBLASLT_WORKSPACE_SIZE": "32768",
}
# Requests of changing sizes leave no holes in memory that grows in place.
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def settle_before_cuda() -> None:
    """Set for this process what CUDA's libraries read once, where the user has not and CUDA has not started yet.

    Once CUDA has started nothing is set: a variable would say what the libraries do not do.
    """
    if torch.cuda.is_initialized():
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # The name it has from torch 2.9 on.
    if "PYTORCH_ALLOC_CONF" not in os.environ and sys.platform == "linux":
        os.environ.setdefault(ALLOCATOR, "expandable_segments:True")


def gpu_facts(device: torch.device) -> dict[str, str]:
    """The GPU and the libraries that choose its algorithms, by name. GPUs alike in these give the same bits.

    Flash attention cuts the keys by the number of multiprocessors, of which one name may have several (H100 SXM has
    132, H100 PCIe 114).
    """
    found = torch.cuda.get_device_properties(device)
    return {
        "device": found.name,
        "multiprocessors": str(found.multi_processor_count),
        "compute capability": f"{found.major}.{found.minor}",
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "cuBLAS": _cublas(),
    }


def _cublas() -> str:
    """Version of the package that torch loads cuBLAS from; torch itself does not tell it."""
    major = str(torch.version.cuda).partition(".")[0]
    for name in ("nvidia-cublas", f"nvidia-cublas-cu{major}"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of the system"


def bind_near_gpu(device: torch.device, folder: Path = Path("/sys/bus/pci/devices")) -> None:
    """Let this thread, and threads it starts, run only on the processors beside a GPU, where the system knows them.

    What the other socket of a host launches, and memory that lies there, reach the GPU over the link between sockets.
    Within the processors this process may use; none are taken away where there is nothing to choose from.
    """
    found = torch.cuda.get_device_properties(device)
    places = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if sys.platform != "linux" or None in places:
        return
    try:
        text = (folder / "{:04x}:{:02x}:{:02x}.0".format(*places) / "local_cpulist").read_text()
    except OSError:
        return
    mine = os.sched_getaffinity(0)
    near = mine & set(_numbers(text))
    if near and near != mine:
        os.sched_setaffinity(0, near)


def _numbers(text: str) -> Iterator[int]:
    """The numbers of a list as the kernel writes it, such as ``0-3,8``."""
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)
