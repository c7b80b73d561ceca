"""The memory that a rank needs to train, from weights, gradients and the optimizer's state.

Activations depend on too much to be told before a run: the peak of a run's first step is measured.
"""

from __future__ import annotations

import logging
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.objects import broadcast_object, gather_objects
from ..core.gpus import has_own_memory
from ..errors import DitmeshError, InputError
from ..generate.model_info import ModelInfo, find_model
from ..layout.probe import meta_model
from ..memory.available import free_memory
from ..memory.cards import card
from ..memory.catalogue import shapes
from ..memory.check import components_of, components_of_shape
from ..memory.phases import Component, Components
from ..memory.walk import FAILURES, encoder_on_meta
from ..report.memory import memory_report
from ..report.report import Report
from .config import SECOND, TrainConfig
from .model.adapters import targets_of
from .model.frozen import encoders_to_freeze, layers_to_freeze
from .optimizer.optimizers import optimizer_name, state_per_weight

log = logging.getLogger(__name__)

# Bytes of a number in float32, and of a frozen one with its scales.
FLOAT_BYTES = 4.0
FROZEN_BYTES = {"bf16": 2.0, "fp16": 2.0, "int8": 1.01, "fp8": 1.01, "nf4": 0.52}
KINDS = ("trained", "frozen", "others", "gradients", "optimizer", "average", "process")


def estimated_memory(
    components: Components, config: TrainConfig, device: str = "cpu", process: float = 0.0
) -> dict[str, dict[str, float]]:
    """Bytes of a rank while it encodes samples and in a step, by kind, without activations.

    Args:
        device: ``cpu`` or another; encoders that a cache replaces leave the latter.
        process: bytes of a process without a model.

    Raises:
        LayoutError: a component has a class that is not known.
    """
    first, *others = components.denoisers[:: -1 if config.denoiser == SECOND else 1]
    model = meta_model(first.kind, dict(first.settings))
    trained, frozen = _numbers(model) * FLOAT_BYTES, 0.0
    if config.lora is not None:
        frozen = _bytes(model, config.model.base_precision)
        trained = FLOAT_BYTES * _adapter_numbers(model, config)
    encoders = {name: encoder_on_meta(part.kind, part.settings) for name, part in components.encoders.items()}
    beside = components.other + _bytes_beside(components, others, encoders, config)
    trained += sum(FLOAT_BYTES * _numbers(encoders[name]) for name in encoders if name in config.model.train_modules)
    ranks, shards = config.parallel, 1
    if config.model.sharding == "fsdp":
        shards = ranks.data * ranks.ulysses * ranks.ring
    trained, frozen = (whole / (shards * ranks.tensor) for whole in (trained, frozen))
    is_released = device != "cpu" and config.data.cache_dir is not None and config.keeps_text
    without_state = optimizer_name(config) == "SGD" and not config.optimizer.args
    step = {"gradients": trained, "optimizer": 0.0 if without_state else state_per_weight(config) * trained}
    step |= {
        "average": trained if config.optimizer.ema_decay is not None else 0.0,
        "others": 0.0 if is_released else beside,
    }
    held = {**dict.fromkeys(KINDS, 0.0), "trained": trained, "frozen": frozen, "others": beside, "process": process}
    phases = {"encode": held, "step": held | step}
    return {name: {**phase, "total": sum(phase.values())} for name, phase in phases.items()}


def _bytes_beside(
    components: Components, others: list[Component], encoders: dict[str, nn.Module], config: TrainConfig
) -> float:
    """Bytes of what is not trained beside the transformer: text encoders, autoencoder, another transformer."""
    quantised = encoders_to_freeze(encoders, config)
    texts = [
        _bytes(part, config.model.encoder_precision if name in quantised else None)
        for name, part in encoders.items()
        if name not in config.model.train_modules
    ]
    images = (
        0.0 if components.vae is None else _bytes(meta_model(components.vae.kind, dict(components.vae.settings)), None)
    )
    return (
        images
        + sum(texts)
        + sum(_bytes(meta_model(part.kind, dict(part.settings)), config.model.base_precision) for part in others)
    )


def _numbers(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def _bytes(model: Any, precision: str | None) -> float:
    """Bytes of frozen weights of which linear layers are in a precision."""
    if precision is None:
        return FLOAT_BYTES * _numbers(model)
    linear = sum(model.get_parameter(f"{name}.weight").numel() for name in layers_to_freeze(model))
    return FLOAT_BYTES * (_numbers(model) - linear) + FROZEN_BYTES[precision] * linear


def _adapter_numbers(model: nn.Module, config: TrainConfig) -> int:
    """Numbers of the adapters' pairs of matrices."""
    assert config.lora is not None
    targets = targets_of(model, config.lora)
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    if isinstance(targets, str):
        chosen = [layer for name, layer in linear.items() if re.fullmatch(targets, name)]
    else:
        chosen = [layer for name, layer in linear.items() if f".{name}".endswith(tuple(f".{t}" for t in targets))]
    return sum(config.lora.rank * (layer.in_features + layer.out_features) for layer in chosen)


def predicted_training(config: TrainConfig, hardware: str = "cpu") -> dict[str, Any]:
    """The memory of a run's ranks on a device of `plan`'s table, as JSON data; nothing is read but configurations."""
    part = card(hardware)
    components = _components(config)
    phases = estimated_memory(components, config, part.name, part.runtime)
    peak = max(phases, key=lambda name: phases[name]["total"])
    rank = {"stage": 0, "ranks": config.parallel.world_size, "phases": phases, "peak": peak}
    return {
        "model": components.name,
        "config": config.parallel.describe(),
        "predicted": True,
        "ranks": [{**rank, "peak_bytes": phases[peak]["total"]}],
    }


def training_report(result: dict[str, Any]) -> Report:
    """The report on the result of `predicted_training`, for a terminal."""
    lead = f"training {result['model']}, {result['config']}, without activations, which the first step measures"
    return memory_report(lead, result["ranks"], KINDS)


def _components(config: TrainConfig) -> Components:
    name = config.pretrained_model_name_or_path
    known = shapes().get(name.lower().rpartition("/")[2])
    return components_of(find_model(name)) if known is None or Path(name).exists() else components_of_shape(known)


def least_memory(config: TrainConfig) -> float | None:
    """Bytes of a rank without activations; None: they are not known."""
    try:
        phases = estimated_memory(_components(config), config, "gpu" if torch.accelerator.is_available() else "cpu")
    except (DitmeshError, OSError, *FAILURES) as error:
        log.debug("the memory of training is not known: %s", error)
        return None
    return max(phase["total"] for phase in phases.values())


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
    needed = least_memory(config) if not grouped or dist.get_rank() == 0 else None
    if ranks > 1:
        needed = broadcast_object(needed)
    if needed is not None and needed > room:
        raise InputError(
            f"training {info.name} with {config.parallel.describe()} takes {needed / 1e9:.3g} GB on a rank before "
            f"activations, and {room / 1e9:.3g} GB are free; use data.cache_dir, lora with model.base_precision: nf4, "
            "or model.sharding: fsdp, or switch the check off (--memory-limit none)"
        )


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has had: on a GPU of tensors there, else of all of it."""
    if has_own_memory(device):
        return torch.accelerator.max_memory_allocated(device)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024
