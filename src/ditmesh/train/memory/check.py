"""The memory check before a run reads any weights, and the table of the run's memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...comm.objects import broadcast_object, gather_objects
from ...core.unexpected import MISTAKES, unexpected
from ...errors import DitmeshError, InputError
from ...forecast.catalogue import Shape, shapes
from ...forecast.costs.hardware import device
from ...forecast.costs.work import Workload
from ...forecast.memory.available import free_memory
from ...forecast.memory.check import MAX_PIXEL_BYTES, components_of, components_of_shape
from ...forecast.memory.phases import Components
from ...forecast.workload import workload_of
from ...generate.model_info import ModelInfo, find_model
from ...report.memory import memory_report
from ...report.report import Report
from ..config import TrainConfig
from ..data.order import bucket_sizes
from ..model.frozen import QUANTISATION_PACKAGES
from .needs import TrainingPhase, tokens_of, training_needs

log = logging.getLogger(__name__)

# More numbers of a token than blocks keep for the backward pass, by the width of a block; and weights of a block by the
# square of its width. Runs that are far from a limit by these are not predicted.
_KEPT, _SQUARES = 100, 10
# Weights, gradients, two moments and an average.
_COPIES = 5


def largest_workload(config: TrainConfig, model: ModelInfo | Shape) -> Workload:
    """The tokens of a sample at the largest size and length of a run.

    Raises:
        InputError: the model cannot have that size or that number of frames.
    """
    length = config.max_sequence_length
    text = max(length) if isinstance(length, tuple) else length
    height, width = max(bucket_sizes(config), key=lambda size: size[0] * size[1])
    return workload_of(model, (width, height), text, guidance=False, frames=config.num_frames)


def predicted_training(config: TrainConfig, hardware: str = "cpu") -> dict[str, Any]:
    """The memory of every rank of a run, as JSON data; nothing is read but configurations.

    Args:
        hardware: a device of `plan`'s table.

    Raises:
        InputError, ConfigError: the model is not there, or something cannot be predicted.
    """
    components, workload = _subject(config)
    part = device(hardware, "float32" if hardware == "cpu" else "bfloat16")
    where: Literal["cpu", "cuda"] = "cpu" if part.name == "cpu" else "cuda"
    ranks = training_needs(components, config, workload, where, part.runtime)
    return {
        "model": components.name,
        "config": config.parallel.describe(),
        "devices": config.parallel.world_size,
        "size": [workload.width, workload.height],
        "tokens": tokens_of(workload),
        "batch": config.train_batch_size,
        "predicted": True,
        "ranks": [one.as_data() for one in ranks],
    }


def most_memory(config: TrainConfig) -> dict[str, Any]:
    """The needs of the rank that needs most: ``bytes``, ``phase`` and ``why`` not predicted, each or None."""
    try:
        components, workload = _subject(config)
        worst = _worst(components, config, workload, "cuda" if torch.cuda.is_available() else "cpu")
    except (DitmeshError, OSError) as error:
        return {"bytes": None, "phase": None, "why": str(error)}
    return {"bytes": worst.total, "phase": worst.name, "why": None}


def _subject(config: TrainConfig) -> tuple[Components, Workload]:
    name = config.pretrained_model_name_or_path
    known = shapes().get(name.lower().rpartition("/")[2])
    if known is not None and not Path(name).exists():
        return components_of_shape(known), largest_workload(config, known)
    info = find_model(name)
    return components_of(info), largest_workload(config, info)


def check_training_memory(
    config: TrainConfig, info: ModelInfo, device: torch.device, limit: float | None = None
) -> None:
    """Raise an error if a run does not fit, before anything is read. Collective; rank 0 predicts for all.

    A run that cannot be predicted is not refused.

    Args:
        info: the model; its files are here.
        limit: bytes that a rank may take; None: the device's free memory (on a CPU the host's, in equal parts).

    Raises:
        InputError: on all ranks alike; names what would fit.
    """
    grouped = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size() if grouped else 1
    room = free_memory(device, ranks) if limit is None else limit
    if ranks > 1:
        room = min(gather_objects(room))
    sentence = None
    if not grouped or dist.get_rank() == 0:
        sentence = _refusal(config, info, "cuda" if device.type == "cuda" else "cpu", room)
    if ranks > 1:
        sentence = broadcast_object(sentence)
    if sentence is not None:
        raise InputError(sentence)


def _refusal(config: TrainConfig, info: ModelInfo, device: Literal["cpu", "cuda"], room: float) -> str | None:
    try:
        workload = largest_workload(config, info)
        if _bound(config, info, workload) < room:
            return None
        components = components_of(info)
        worst = _worst(components, config, workload, device)
        if worst.total <= room:
            return None
        way = "nothing that was tried would fit"
        for words, other in _others(config):
            needed = _worst(components, other, workload, device).total
            if needed <= room:
                way = f"with {words} it would need {needed / 1e9:.3g} GB"
                break
    except (DitmeshError, OSError) as error:
        log.debug("%s: the memory of its training is not known: %s", info.name, error)
        return None
    except MISTAKES as error:
        unexpected(log, error, f"{info.name} is trained without a check of its memory")
        return None
    return (
        f"training {info.name} with {config.parallel.describe()} needs {worst.total / 1e9:.3g} GB on a rank "
        f"({worst.name}), and {room / 1e9:.3g} GB are free; {way}. Use that, a smaller resolution or another "
        "configuration (ditmesh inspect --memory RUN.yaml predicts it), or switch the check off (--no-memory-check)"
    )


def _worst(
    components: Components, config: TrainConfig, workload: Workload, device: Literal["cpu", "cuda"]
) -> TrainingPhase:
    every = training_needs(components, config, workload, device)
    return max((one.peak for one in every), key=lambda phase: phase.total)


def _others(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Settings that save memory, in words: each beside those before it."""
    from importlib.util import find_spec

    said: list[str] = []
    changes: list[tuple[str, dict[str, Any]]] = []
    if not config.gradient_checkpointing:
        changes.append(("gradient_checkpointing: true", {"gradient_checkpointing": True}))
    if config.train_batch_size > 1:
        changes.append(("train_batch_size: 1", {"train_batch_size": 1, "global_batch_size": config.batch}))
    if config.lora is not None and config.base_precision is None:
        precision = "nf4" if find_spec(QUANTISATION_PACKAGES["nf4"]) is not None else "bf16"
        changes.append((f"base_precision: {precision}", {"base_precision": precision}))
    if config.lora is None and config.sharding == "auto" and config.parallel.world_size > 1:
        changes.append(("sharding: fsdp", {"sharding": "fsdp"}))
    for words, change in changes:
        said.append(words)
        config = config.model_copy(update=change)
        yield ", ".join(said), config


def _bound(config: TrainConfig, info: ModelInfo, workload: Workload) -> float:
    """More bytes than a rank needs, from the sizes of files, which may hold half of what float32 takes."""
    stored = 2.0 * sum(path.stat().st_size for path in info.files.glob("*/*.safetensors"))
    model = 2.0 * sum(path.stat().st_size for path in (info.files / "transformer").glob("*.safetensors"))
    heads, head = info.heads or 1, info.transformer.get("attention_head_dim")
    width = max(64, heads * head if isinstance(head, int) else 64)
    # Twice as many images where class images stand beside samples.
    tokens = 2 * config.train_batch_size * tokens_of(workload)
    activations = tokens * _KEPT * model / (_SQUARES * width)
    pixels = workload.width * workload.height * (config.num_frames or 1)
    return stored + _COPIES * model + activations * config.parallel.pipe + MAX_PIXEL_BYTES * pixels


def training_report(result: dict[str, Any]) -> Report:
    """The report on the result of `predicted_training`, for a terminal."""
    width, height = result["size"]
    lead = (
        f"training {result['model']}, {result['config']}, {width} x {height} ({result['tokens']} tokens), "
        f"{result['batch']} a forward"
    )
    kinds = ("trained", "frozen", "others", "gradients", "optimizer", "average", "activations", "shared", "process")
    return memory_report(lead, result["ranks"], kinds)
