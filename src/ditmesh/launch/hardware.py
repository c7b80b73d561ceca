"""Hardware and libraries of this machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import library_versions
from ..errors import shortened
from ..requirements import not_installed, outdated
from . import physical_cores

if TYPE_CHECKING:
    import torch


LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "peft", "safetensors")
# Packages with kernels of attention besides torch's.
KERNELS = ("flash-attn", "xformers", "sageattention")
# By package: what of it is imported first. diffusers' and transformers' own names import nothing.
IMPORTS = {name: name for name in LIBRARIES} | {
    "transformers": "transformers.modeling_utils",
    "diffusers": "diffusers.models.modeling_utils",
    "ditmesh": "ditmesh.generate.loading",
}
# Prefixes of environment variables that affect communication.
VARIABLES = ("NCCL_", "TORCH_", "GLOO_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "DITMESH_", "HF_HUB_OFFLINE")
# Below this, in 10^9 bytes, tensors between ranks on one host may find no room: containers have 64 MB.
SMALL_SHARED_MEMORY = 0.25


def describe_machine() -> dict[str, Any]:
    """Processor, memory, GPUs, versions and backends of this machine, as plain data (memory in 10^9 bytes)."""
    import psutil
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    shared_memory = None
    with suppress(OSError):
        room = shutil.disk_usage("/dev/shm")
        shared_memory = {"size_gb": round(room.total / 1e9, 2), "free_gb": round(room.free / 1e9, 2)}
    describe = getattr(torch.get_device_module(), "get_device_properties", None)
    gpus = map(describe, range(torch.accelerator.device_count())) if describe else ()
    return {
        "versions": library_versions((*LIBRARIES, *KERNELS)),
        "platform": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": physical_cores(),
            "threads": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        },
        "gpus": [{"name": gpu.name, "memory_gb": round(gpu.total_memory / 1e9, 1)} for gpu in gpus],
        "backends": {
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
        },
        "torch_cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if torch.cuda.is_available() else None,
        "driver": _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0] or None,
        "topology": _nvidia_smi("topo", "-m") or None,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        "shared_memory": shared_memory,
    }


def import_errors() -> dict[str, str]:
    """The reason why each of `IMPORTS` cannot be imported, by package; those that can be are left out."""
    errors: dict[str, str] = {}
    for name, module in IMPORTS.items():
        try:
            import_module(module)
        except Exception as error:
            # A package that is not installed is named for what it is needed for.
            if find_spec(name) is not None:
                cause: BaseException = error
                while cause.__cause__ is not None:
                    cause = cause.__cause__
                errors[name] = shortened(cause, 300, with_kind=True)
    return errors


def _nvidia_smi(*arguments: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return ""


def environment(device: torch.device) -> dict[str, str]:
    """Versions and settings of this process that decide the last bits of a result on ``device``, by name.

    Two processes with the same environment, weights, inputs and arithmetic order give the same bits.
    """
    import torch

    from ..core.gpus import CUBLAS, gpu_facts

    facts = {
        **library_versions(),
        "CPU": _cpu_model(),
        "CPU instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "BLAS": _blas(),
        "oneDNN": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "device": "cpu",
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    if device.type != "cpu":
        facts |= gpu_facts(device)
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        facts |= {
            "cuDNN settings": f"benchmark={cudnn.benchmark} deterministic={cudnn.deterministic}",
            "cuBLAS workspace": os.environ.get(CUBLAS, "default"),
            "cuBLASLt workspace": os.environ.get("CUBLASLT_WORKSPACE_SIZE", "default"),
        }
    return facts


def _blas() -> str:
    """The matrix libraries that torch was built with, such as ``"mkl, oneDNN v3.7.1"``."""
    import torch

    shown = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=(\w+)", shown)
    mkl = re.search(r"oneAPI Math Kernel Library Version ([\d.]+)", shown)
    dnn = re.search(r"Intel\(R\) MKL-DNN (v[\d.]+)", shown)
    return (blas[1] if blas else "unknown") + (f" {mkl[1]}" if mkl else "") + (f" oneDNN {dnn[1]}" if dnn else "")


def missing(machine: dict[str, Any]) -> list[str]:
    """The components that `describe_machine` did not find, with their purpose and installation."""
    gpus, versions, backends = machine["gpus"], machine["versions"], machine["backends"]
    shm = machine.get("shared_memory")
    driver = "torch was built without CUDA" if machine["torch_cuda"] is None else "the driver shows none"
    wanted = {
        not_installed("loading a LoRA adapter", "peft", "lora"): "peft" in versions,
        not_installed("the tokenizer of some T5 encoders", "sentencepiece", "t5"): (
            find_spec("sentencepiece") is not None
        ),
        f"no GPU ({driver}): ranks run on the CPU; on a machine with NVIDIA GPUs install torch for CUDA "
        "(https://pytorch.org/get-started/locally)": gpus,
        "this torch has no gloo: ranks on the CPU cannot talk; install torch from PyPI": backends["gloo"],
        "this torch has no NCCL: ranks on GPUs cannot talk; install torch for CUDA on Linux": (
            backends["nccl"] or not gpus
        ),
        "/dev/shm has {free_gb:g} of {size_gb:g} GB free: ranks on one host pass tensors through it; in a container "
        "start it with --shm-size=1g or --ipc=host".format(**(shm or {"free_gb": 0, "size_gb": 0})): (
            shm is None or shm["free_gb"] >= SMALL_SHARED_MEMORY
        ),
    }
    sentences = outdated()
    errors = machine.get("import_errors", {})
    # ditmesh's own error says which packages are too old.
    unreadable = {name: why for name, why in errors.items() if name != "ditmesh" or not sentences}
    sentences += [f"{name} cannot be imported ({why})" for name, why in unreadable.items()]
    sentences += [sentence for sentence, there in wanted.items() if not there]
    return sentences


def ranks_meet() -> bool:
    """On every rank: True if a tensor of all of them arrives here whole."""
    import torch
    import torch.distributed as dist

    from ..comm.backends import device_of_rank

    total = torch.ones(1, device=device_of_rank())
    dist.all_reduce(total)
    return total.item() == dist.get_world_size()


def _cpu_model() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
