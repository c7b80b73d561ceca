"""The check before a run reads any weights: whether it can fit into the memory of its ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..comm.objects import broadcast_object, gather_objects
from ..errors import InputError
from ..generate.model_info import ModelInfo
from ..memory.available import free_memory
from .config import TrainConfig
from .memory import least_memory


def check_training_memory(
    config: TrainConfig, info: ModelInfo, device: torch.device, limit: float | None = None
) -> None:
    """Raise an error if not even weights, gradients and state of a run fit, before they are read. Collective.

    Args:
        info: the model; its files are here.
        limit: bytes that a rank may take; None: the device's free memory (on a CPU the host's, in equal parts).

    Raises:
        InputError: on all ranks alike; names what saves memory.
    """
    grouped = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size() if grouped else 1
    room = free_memory(device, ranks) if limit is None else limit
    room = min(gather_objects(room)) if ranks > 1 else room
    sentence = _refusal(config, info, room) if not grouped or dist.get_rank() == 0 else None
    if ranks > 1:
        sentence = broadcast_object(sentence)
    if sentence is not None:
        raise InputError(sentence)


def _refusal(config: TrainConfig, info: ModelInfo, room: float) -> str | None:
    needed = least_memory(config)
    if needed is None or needed <= room:
        return None
    return (
        f"training {info.name} with {config.parallel.describe()} takes {needed / 1e9:.3g} GB on a rank before "
        f"activations, and {room / 1e9:.3g} GB are free; use data.cache_dir, lora with model.base_precision: nf4, or "
        "model.sharding: fsdp, or switch the check off (--memory-limit none)"
    )
