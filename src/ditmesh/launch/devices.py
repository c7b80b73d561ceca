"""Devices and threads of the ranks of one machine, and their process group."""

from __future__ import annotations

import math
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

# Seconds: more than any caller waits, and less than what clocks overflow at.
ENDLESS_SECONDS = 1e9
# Seconds: torch's own for a watchdog that hangs itself, in a call of CUDA or NCCL that does not return.
HEARTBEAT = 480
# Collectives that the flight recorder remembers of every rank.
RECORDED = 2000


def resolve_device(device: str, world_size: int) -> str:
    """The type of the device of all ranks of this machine: ``"cpu"``, or that of the accelerator that torch has here.

    ``"auto"`` is the accelerator if torch names a backend for it that leaves tensors on the device, else the CPU.

    `ConfigError`: a device that is not there or has no backend, or fewer of them than ranks.
    """
    if device == "cpu":
        return "cpu"
    if device == "auto" and "torch" not in sys.modules and not may_have_gpus():
        # torch would find none, and importing it takes seconds.
        return "cpu"
    import torch

    from ..comm.backends import collectives_of

    kind = here.type if (here := torch.accelerator.current_accelerator(check_available=True)) else ""
    backend = collectives_of(kind)
    if device != "auto" and (device != kind or not backend):
        raise ConfigError(
            f"device {device}: torch {torch.__version__} has none here, or no backend to connect them; use "
            f"{f'{kind} or ' if backend else ''}cpu, or install torch and a driver for it"
        )
    if not backend or (device == "auto" and backend == "gloo"):
        return "cpu"
    if (gpus := torch.accelerator.device_count()) < world_size:
        raise ConfigError(
            f"{world_size} ranks need {world_size} GPUs, but {gpus} {'is' if gpus == 1 else 'are'} there; "
            f"use at most {gpus} devices, or --device cpu"
        )
    return kind


def may_have_gpus() -> bool:
    """True if a GPU driver's files exist; True outside Linux, where this is unknown."""
    if sys.platform != "linux":
        return True
    # Of NVIDIA's drivers, also on Jetson, of WSL, AMD's, Intel's and Ascend's.
    drivers = "nvidia", "nvhost", "nvmap", "nvgpu", "dxg", "kfd", "dri", "davinci"
    return any(name.startswith(drivers) for name in os.listdir("/dev"))


def physical_cores() -> int:
    """Physical cores that this process may use."""
    if sys.platform != "linux":
        import psutil

        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    # psutil counts those of the whole machine, whatever this process may use.
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def default_threads(world_size: int, device: str, cores: int | None = None) -> int:
    """Threads for each of ``world_size`` ranks: an equal share of the cores (default: of here); at most 8 with GPUs."""
    share = max(1, (physical_cores() if cores is None else cores) // world_size)
    return share if device == "cpu" else min(8, share)


def check_timeout(seconds: float) -> None:
    """Reject a deadline that is not a positive finite number: `ConfigError`."""
    if not (math.isfinite(seconds) and 0 < seconds <= ENDLESS_SECONDS):
        raise ConfigError(
            f"a timeout of {seconds:g} seconds is not possible; use more than 0 and at most "
            f"{ENDLESS_SECONDS:g}, such as 600"
        )


def use_loopback() -> None:
    """Keep the ranks of one machine on the loopback, so that no firewall, VPN or other interface interferes."""
    if loopback := {"linux": "lo", "darwin": "lo0"}.get(sys.platform):
        use_interface(loopback)


def use_interface(name: str, nccl: bool = True) -> None:
    """Make gloo and NCCL use this network interface, unless the user has set one.

    gloo takes the one that the host's name leads to, and that is the loopback on many systems; NCCL looks for itself.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")[: 1 + nccl]:
        os.environ.setdefault(variable, name)


def interface_of(address: str) -> str | None:
    """The network interface of this host that has an address; None where there is none."""
    import psutil

    every = psutil.net_if_addrs().items()
    return next((name for name, those in every if any(one.address == address for one in those)), None)


def nccl_settings(timeout: float) -> dict[str, str]:
    """Variables for ranks with a deadline of ``timeout`` seconds: torch's watchdog over NCCL, and NCCL's order.

    torch and NCCL read them before the first NCCL group of a process; deadlines themselves are the group's ``timeout``.
    """
    return {
        # A collective that fails or is late ends the process: NCCL cannot go on, and its launcher names the rank.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        # A thread ends the process when its watchdog has said nothing for this long: it hangs itself.
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(60, min(HEARTBEAT, round(timeout)))),
        # The last collectives of every rank are written to a file when one is late; see docs/hosts.md.
        # Later torch calls it TORCH_FR_BUFFER_SIZE too, and looks at that first, which the user may have set.
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(RECORDED),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # Kernels of several groups wait for one another's on the GPU: NCCL (2.26) starts them in the host's order.
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    }


def join_default_group(
    kind: str, rank: int, world_size: int, gpu: int, timeout: float, rendezvous: str | Store
) -> torch.device:
    """Join the default process group, unless this process is in one; the device of this rank.

    Args:
        kind, gpu: the rank's device.
        rank, world_size: which it is, and of how many.
        timeout: deadline of every collective, in seconds.
        rendezvous: ``init_method`` or ``store`` of `torch.distributed`.
    """
    import torch
    import torch.distributed as dist

    from ..comm.backends import bound_device, group_backends
    from ..core.gpus import settle_before_cuda

    device = torch.device("cpu")
    if kind == "cuda":
        settle_before_cuda()
    if kind != "cpu":
        device = torch.device(kind, gpu)
        torch.accelerator.set_device_index(device)
    if not dist.is_initialized():
        for name, value in nccl_settings(timeout).items() if kind == "cuda" else ():
            os.environ.setdefault(name, value)
        dist.init_process_group(
            backend=group_backends(kind),
            init_method=rendezvous if isinstance(rendezvous, str) else None,
            store=None if isinstance(rendezvous, str) else rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            device_id=bound_device(device, world_size),
        )
    return device
