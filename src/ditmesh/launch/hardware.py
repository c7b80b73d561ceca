"""What this machine has, and how fast its ranks reach one another: measured, not looked up."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import library_versions
from . import Launcher, physical_cores

if TYPE_CHECKING:
    import torch

    from ..comm.mesh import Mesh

LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "peft", "safetensors")
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Transfer:
    """One measured collective.

    Attributes:
        what: ``"all_to_all"``, ``"shift"`` or ``"all_gather"``.
        through: what the tensors travel through: ``"shared memory"``, ``"gloo"`` or ``"nccl"``.
        megabytes: size of one rank's tensor, in 10^6 bytes.
        milliseconds: median time of a call, of the slowest rank.
        gigabytes_per_second: 10^9 bytes that one rank sends to others, per second.
    """

    what: str
    through: str
    megabytes: float
    milliseconds: float
    gigabytes_per_second: float


def describe_machine() -> dict[str, Any]:
    """Processor, memory, GPUs, versions and backends of this machine, as plain data (memory in 10^9 bytes)."""
    import torch
    import torch.distributed as dist

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append({"name": properties.name, "memory_gb": round(properties.total_memory / 1e9, 1)})
    memory = _memory_bytes()
    return {
        "versions": library_versions(LIBRARIES),
        "platform": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": physical_cores(),
            "threads": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
            "memory_gb": None if memory is None else round(memory / 1e9, 1),
        },
        "gpus": gpus,
        "backends": {
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
        },
        "attention": _attention_backends(),
        "torch_cuda": torch.version.cuda,
    }


def environment(device: torch.device) -> dict[str, str]:
    """What decides the last bits of a result besides the program and its inputs, by name.

    Two processes with the same environment, weights, inputs and arithmetic order give the same bits. Reads the
    settings of the process that calls it.

    Args:
        device: where this process computes.
    """
    import torch

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
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        facts |= {
            "device": torch.cuda.get_device_name(device),
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(cudnn.version()),
            "cuDNN settings": f"benchmark={cudnn.benchmark} deterministic={cudnn.deterministic}",
            "cuBLAS workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "default"),
        }
    return facts


def _blas() -> str:
    """The matrix libraries that torch was built with, such as ``"mkl, oneDNN v3.7.1"``."""
    import re

    import torch

    shown = torch.__config__.show()
    found = re.search(r"BLAS_INFO=(\w+)", shown)
    dnn = re.search(r"Intel\(R\) MKL-DNN (v[\d.]+)", shown)
    mkl = re.search(r"oneAPI Math Kernel Library Version ([\d.]+)", shown)
    parts = [found[1] if found else "unknown"] + ([mkl[1]] if mkl else []) + ([f"oneDNN {dnn[1]}"] if dnn else [])
    return " ".join(parts)


def missing(machine: dict[str, Any]) -> list[str]:
    """What `describe_machine` did not find, each with what it is for and how to get it."""
    absent = []
    if "peft" not in machine["versions"]:
        absent.append("peft is not installed: LoRA adapters cannot be loaded; pip install 'ditmesh[lora]'")
    if find_spec("sentencepiece") is None:
        absent.append(
            "sentencepiece is not installed: tokenizers of some T5 text encoders need it; pip install 'ditmesh[t5]'"
        )
    if not machine["gpus"]:
        reason = "torch was built without CUDA" if machine["torch_cuda"] is None else "the driver shows none"
        absent.append(
            f"no GPU ({reason}): ranks run on the CPU; on a machine with NVIDIA GPUs install torch for CUDA "
            "(https://pytorch.org/get-started/locally)"
        )
    if not machine["backends"]["gloo"]:
        absent.append("this torch has no gloo: ranks on the CPU cannot talk; install torch from PyPI")
    if machine["gpus"] and not machine["backends"]["nccl"]:
        absent.append("this torch has no NCCL: ranks on GPUs cannot talk; install torch for CUDA on Linux")
    return absent


def measure_links(pool: Launcher, megabytes: Sequence[float] = (1, 16), repeats: int = 7) -> list[Transfer]:
    """Time the collectives of the strategies between the ranks of ``pool``.

    Args:
        pool: two ranks or more.
        megabytes: sizes of one rank's tensor, in 10^6 bytes.
        repeats: calls, of which the median counts.

    Returns:
        One entry for each way between the ranks, collective and size; empty for a pool of one.
    """
    if pool.world_size < 2:
        return []
    every: list[list[Transfer]] = pool.run(_measure, tuple(megabytes), repeats)
    # A collective is done when its slowest rank is.
    return [max(same, key=lambda transfer: transfer.milliseconds) for same in zip(*every, strict=True)]


def as_data(transfers: Sequence[Transfer]) -> list[dict[str, Any]]:
    """Transfers as JSON can hold them."""
    return [asdict(transfer) for transfer in transfers]


def _measure(megabytes: Sequence[float], repeats: int) -> list[Transfer]:
    """Runs on every rank."""
    import torch.distributed as dist

    from ..comm.mesh import Mesh
    from ..config import ParallelConfig

    transfers, ways = [], set()
    for shared_memory in (True, False):
        mesh = Mesh(ParallelConfig(ring=dist.get_world_size(), shared_memory=shared_memory))
        if mesh.ring.transport not in ways:
            ways.add(mesh.ring.transport)
            transfers += [one for amount in megabytes for one in _transfers(mesh, amount, repeats)]
        mesh.close()
    return transfers


def _transfers(mesh: Mesh, megabytes: float, repeats: int) -> Iterator[Transfer]:
    """The moves of a link, each with tensors of one size."""
    import torch
    import torch.distributed as dist

    link, size = mesh.ring, mesh.ring.size
    # float32, and the same number of elements for every rank.
    part = max(1, round(megabytes * MEGABYTE / 4 / size))
    mine = torch.ones(part * size, device=mesh.device)
    parts, everything = [[piece] for piece in mine.split(part)], [part * size] * size
    moves: dict[str, tuple[float, Callable[[], object]]] = {
        "all_to_all": ((size - 1) / size, lambda: link.all_to_all(parts, [[(part,)]] * size)),
        "shift": (1.0, lambda: link.shift([mine], [(part * size,)]).wait()),
        "all_gather": (float(size - 1), lambda: link.all_gather(mine, everything, 0)),
    }
    for name, (sent, move) in moves.items():
        seconds = []
        for number in range(repeats + 2):
            dist.barrier()
            if mesh.device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            move()
            if mesh.device.type == "cuda":
                torch.cuda.synchronize()
            # The first calls open connections.
            if number >= 2:
                seconds.append(time.perf_counter() - started)
        median = statistics.median(seconds)
        yield Transfer(name, link.transport, megabytes, median * 1e3, sent * mine.nbytes / median / 1e9)


def _attention_backends() -> list[str]:
    """Kernels behind torch's scaled_dot_product_attention, and packages that bring others."""
    import torch

    found = ["math", "flash (CPU)"]
    if torch.cuda.is_available():
        cuda = torch.backends.cuda
        found = ["math"]
        found += ["flash (CUDA)"] if cuda.is_flash_attention_available() and cuda.flash_sdp_enabled() else []
        found += ["memory-efficient (CUDA)"] if cuda.mem_efficient_sdp_enabled() else []
        found += ["cuDNN (CUDA)"] if cuda.cudnn_sdp_enabled() else []
    for package in ("flash-attn", "xformers", "sageattention"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
