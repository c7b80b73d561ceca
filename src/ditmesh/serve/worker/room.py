"""The number of open requests that fit into memory, for a model that keeps state of each from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import DitmeshError
from ...forecast.memory.available import free_memory
from ...forecast.memory.check import components_of
from ...forecast.memory.phases import needs
from ...forecast.workload import workload_of
from ...generate.job import PictureJob
from ...generate.model_info import ModelInfo

# While the kept state of all requests is less than this share of the free memory, a request's peak is not predicted.
_SMALL = 0.25


def open_requests(
    job: PictureJob,
    info: ModelInfo,
    device: torch.device,
    each: float,
    most: int,
    exchange: Callable[[Any], list[Any]],
    rank: int,
) -> int:
    """Requests of the model's default size that fit beside its weights; at least one. Collective, after loading.

    Args:
        job: as it was loaded; its configuration is known.
        each: bytes that this rank keeps of a request.
        most: as many are enough.
        exchange: gives every rank's value, in rank order.
    """
    every = exchange((each, free_memory(device, 1)))
    # Ranks on one host share its free memory.
    shared = len(every) if device.type == "cpu" else 1
    each, left = max(one for one, _ in every), min(free for _, free in every) / shared
    if job.memory_limit is None and each * most < _SMALL * left:
        return most
    answer = _fitting(job, info, device, each, left) if rank == 0 else None
    return max(1, min(most, next(one for one in exchange(answer) if one is not None)))


def _fitting(job: PictureJob, info: ModelInfo, device: torch.device, each: float, left: float) -> int:
    """Requests that fit into the free memory, from a prediction of one request's peak."""
    assert not isinstance(job.config, str)
    kind: Any = "cuda" if device.type == "cuda" else "cpu"
    try:
        phases = [
            phase
            for rank in needs(
                components_of(info), job.config, workload_of(info), getattr(torch, job.dtype), device=kind
            )
            for phase in rank.phases
        ]
    except (DitmeshError, OSError):
        # Half of it for what one request takes while it runs.
        return int(left / 2 // max(each, 1.0))
    if job.memory_limit is not None:
        left = min(left, job.memory_limit - max(phase.weights for phase in phases))
    # One request's own is in its peak.
    peak = max(phase.total - phase.weights for phase in phases)
    return 1 + int((left - peak) // max(each, 1.0))
