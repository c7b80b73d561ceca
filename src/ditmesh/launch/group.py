"""A rank joins its process group."""

from __future__ import annotations

import math
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

# Seconds: more than anybody waits, and less than what clocks overflow at.
LONGEST = 1e9


def check_timeout(seconds: float) -> None:
    """Refuse a deadline that is none.

    Raises:
        ConfigError: it is not positive, not a number, or endless.
    """
    if not (math.isfinite(seconds) and 0 < seconds <= LONGEST):
        raise ConfigError(
            f"a timeout of {seconds:g} seconds is not possible; use more than 0 and at most {LONGEST:g}, such as 600"
        )


def stay_on_loopback() -> None:
    """Keep the ranks of one machine off the network: no firewall, VPN or second interface gets in the way."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def join(
    kind: Literal["cpu", "cuda"], rank: int, world_size: int, local_rank: int, timeout: float, rendezvous: str
) -> torch.device:
    """Join the default process group, unless this process is in one; the device of this rank.

    Args:
        kind: ``"cuda"``: NCCL and GPU ``local_rank``; ``"cpu"``: gloo.
        rank, world_size: place in the group, and its size.
        local_rank: number of the GPU.
        timeout: deadline of every collective, in seconds.
        rendezvous: URL by which ranks find one another, as `torch.distributed` takes it.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            backend="nccl" if kind == "cuda" else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if kind == "cuda" else None,
        )
    return device
