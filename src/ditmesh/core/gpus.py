"""GPUs: what their libraries read once, and what decides their bits."""

from __future__ import annotations

import os
import sys

import torch

from .._version import library_versions

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


def has_own_memory(device: torch.device) -> bool:
    """True if torch says how much memory of the device is free; Apple's GPUs use the host's."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "mem_get_info")


def gpu_facts(device: torch.device) -> dict[str, str]:
    """The GPU and the libraries that choose its algorithms, by name. GPUs alike in these give the same bits.

    Flash attention cuts the keys by the number of multiprocessors, of which one name may have several (H100 SXM has
    132, H100 PCIe 114).
    """
    properties = torch.get_device_module(device).get_device_properties(device)
    if device.type != "cuda":
        return {"device": str(properties)}
    # Of the packages that torch loads cuBLAS from; torch itself does not tell it.
    names = "nvidia-cublas", f"nvidia-cublas-cu{str(torch.version.cuda).partition('.')[0]}"
    versions = library_versions(names)
    return {
        "device": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        "compute capability": f"{properties.major}.{properties.minor}",
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "cuBLAS": next((versions[name] for name in names if name in versions), "of the system"),
    }
