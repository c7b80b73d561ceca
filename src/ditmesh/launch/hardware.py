"""Hardware and libraries of this machine, and the measured speed of transfers between its ranks."""

from __future__ import annotations

import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import library_versions
from ..errors import shortened
from ..requirements import not_installed, outdated
from . import Launcher, physical_cores

if TYPE_CHECKING:
    import torch

    from ..comm.mesh import Mesh

LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "peft", "safetensors")
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
# Sizes of one rank's tensor, in 10^6 bytes, and calls to time, of which the first two open connections.
MEGABYTES, REPEATS = (1, 16), 9


def describe_machine() -> dict[str, Any]:
    """Processor, memory, GPUs, versions and backends of this machine, as plain data (memory in 10^9 bytes)."""
    import psutil
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    numbers, reach = range(torch.cuda.device_count()), torch.cuda.can_device_access_peer
    gpus = map(torch.cuda.get_device_properties, numbers)
    return {
        "versions": library_versions(LIBRARIES),
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
        "attention": _attention_backends(),
        "torch_cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if torch.cuda.is_available() else None,
        "driver": _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0] or None,
        "topology": _nvidia_smi("topo", "-m") or None,
        # Whether each GPU reads each other one's memory directly.
        "peer_access": [[one == other or reach(one, other) for other in numbers] for one in numbers],
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        "shared_memory": _shared_memory(),
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


def _shared_memory() -> dict[str, float] | None:
    """Size and free space of the folder of shared memory, in 10^9 bytes; None where there is none."""
    try:
        room = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"size_gb": round(room.total / 1e9, 2), "free_gb": round(room.free / 1e9, 2)}


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
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        facts |= {
            **gpu_facts(device),
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
    # With the variable set, the tool numbers GPUs otherwise than torch does.
    chosen = "CUDA_VISIBLE_DEVICES" in machine.get("variables", ())
    order = None if chosen else fastest_order(machine.get("topology") or "")
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
    found = outdated()
    errors = machine.get("import_errors", {})
    # ditmesh's own error says which packages are too old.
    found += [f"{name} cannot be imported ({why})" for name, why in errors.items() if name != "ditmesh" or not found]
    found += [sentence for sentence, there in wanted.items() if not there]
    if order is not None:
        found.append(
            "the fastest links are not between neighbouring ranks: set CUDA_VISIBLE_DEVICES="
            f"{','.join(map(str, order))}, so that tensor=2 and ulysses=2 use them"
        )
    return found


def measure_links(pool: Launcher) -> list[dict[str, Any]]:
    """Time the collectives of the strategies between the ranks of ``pool``.

    Returns:
        A table of plain data, empty for a pool of one, with a row for each transport, collective and size: ``what``
        (``"all_to_all"``, ``"shift"``, ``"all_gather"``), ``through`` (``"shared memory"``, ``"gloo"``, ``"nccl"``),
        ``megabytes`` of one rank's tensor, in 10^6 bytes, ``milliseconds`` of a call (median, of the slowest rank), and
        ``gigabytes_per_second`` (10^9 bytes that one rank sends to others).
    """
    if pool.world_size < 2:
        return []
    # A collective is done when its slowest rank is.
    return [max(same, key=lambda row: row["milliseconds"]) for same in zip(*pool.run(_measure), strict=True)]


def _measure() -> list[dict[str, Any]]:
    import torch.distributed as dist

    from ..comm.mesh import Mesh
    from ..config import ParallelConfig

    rows: list[dict[str, Any]] = []
    for shared_memory in (True, False):
        mesh = Mesh(ParallelConfig(ring=dist.get_world_size(), shared_memory=shared_memory))
        if not rows or rows[0]["through"] != mesh.ring.transport:
            rows += [row for megabytes in MEGABYTES for row in _transfers(mesh, megabytes)]
        mesh.close()
    return rows


def _transfers(mesh: Mesh, megabytes: float) -> Iterator[dict[str, Any]]:
    """The collectives of a link, each with tensors of one size."""
    import torch
    import torch.distributed as dist

    link, size = mesh.ring, mesh.ring.size
    # float32, and the same number of elements for every rank.
    part = max(1, round(megabytes * 1e6 / 4 / size))
    mine = torch.ones(part * size, device=mesh.device)
    parts, everything = [[piece] for piece in mine.split(part)], [part * size] * size
    # With each the share of its tensor that a rank sends.
    collectives: dict[str, tuple[float, Callable[[], object]]] = {
        "all_to_all": ((size - 1) / size, lambda: link.all_to_all(parts, [[(part,)]] * size)),
        "shift": (1.0, lambda: link.shift([mine], [(part * size,)]).wait()),
        "all_gather": (float(size - 1), lambda: link.all_gather(mine, everything, 0)),
    }
    synchronize = torch.cuda.synchronize if mesh.device.type == "cuda" else lambda: None
    for name, (sent, call) in collectives.items():
        seconds = []
        for _ in range(REPEATS):
            dist.barrier()
            synchronize()
            started = time.perf_counter()
            call()
            synchronize()
            seconds.append(time.perf_counter() - started)
        median = statistics.median(seconds[2:])
        yield {
            "what": name,
            "through": link.transport,
            "megabytes": megabytes,
            "milliseconds": median * 1e3,
            "gigabytes_per_second": sent * mine.nbytes / median / 1e9,
        }


def _attention_backends() -> list[str]:
    """Kernels behind torch's scaled_dot_product_attention, and packages that bring others."""
    import torch

    kernels = ["math"]
    if torch.cuda.is_available():
        cuda = torch.backends.cuda
        kernels += ["flash (CUDA)"] if cuda.is_flash_attention_available() and cuda.flash_sdp_enabled() else []
        kernels += ["memory-efficient (CUDA)"] if cuda.mem_efficient_sdp_enabled() else []
        kernels += ["cuDNN (CUDA)"] if cuda.cudnn_sdp_enabled() else []
    else:
        kernels += ["flash (CPU)"]
    packages = ("flash-attn", "xformers", "sageattention")
    versions = library_versions(packages)
    return kernels + [f"{name} {versions[name]}" for name in packages if name in versions]


def _cpu_model() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


# The connection of two GPUs, as nvidia-smi topo -m writes it; NV with a number is that many NVLinks.
GPU_LINKS = ("SYS", "NODE", "PHB", "PXB", "PIX")


def fastest_order(topology: str) -> list[int] | None:
    """The order of GPUs in which neighbouring ranks are joined by the fastest links; None: the order that there is.

    Args:
        topology: what ``nvidia-smi topo -m`` says.
    """
    rows = {int(line.split()[0][3:]): line.split()[1:] for line in topology.splitlines() if re.match(r"GPU\d+\s", line)}
    count = len(rows)
    if count < 4 or sorted(rows) != list(range(count)):
        return None

    def speed(one: int, other: int) -> int:
        kind = rows[one][other]
        return (
            100 + int(kind[2:]) if re.fullmatch(r"NV\d+", kind) else GPU_LINKS.index(kind) if kind in GPU_LINKS else 0
        )

    def pairs(order: Sequence[int]) -> int:
        return sum(speed(*order[place : place + 2]) for place in range(0, count - 1, 2))

    order, left = [0], list(range(1, count))
    while left:
        last, whole = order[-1], order[len(order) // 4 * 4 :]
        # Groups of four next: of equals the one that is nearest to those beside it, and then the first.
        best = max(left, key=lambda gpu: (speed(last, gpu), sum(speed(one, gpu) for one in whole), -gpu))
        order.append(best)
        left.remove(best)
    return order if pairs(order) > pairs(range(count)) else None
