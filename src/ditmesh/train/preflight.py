"""Checks of a training run before any rank starts: settings, folders, modules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..config import ParallelConfig, setting
from ..errors import ConfigError, InputError, did_you_mean
from ..generate.job import check_config, check_folder
from ..generate.model_info import ModelInfo
from .config import LoraConfig, TrainConfig


def check_settings(config: TrainConfig) -> None:
    """Reject errors in the settings.

    Raises:
        ConfigError: naming the setting.
    """
    for name, field in ParallelConfig.model_fields.items():
        value, why = getattr(config.parallel, name), setting(name).untrained
        if why is not None and value != field.default:
            raise ConfigError(f"{name}={value} is not for training: {why}")
    if config.lora is not None and config.parallel.tensor > 1:
        raise ConfigError(
            f"tensor={config.parallel.tensor} cuts weights, and not the adapters of lora; use ulysses, ring or data"
        )


def check_run(config: TrainConfig, info: ModelInfo) -> None:
    """Reject errors in the settings, the model's JSON files and the folders.

    Imports torch, and diffusers where there is a LoRA.

    Args:
        config: the run.
        info: the model's files.

    Raises:
        ConfigError, InputError: naming the setting, its value and the way out.
    """
    check_settings(config)
    data = Path(config.train_data_dir)
    if not data.is_dir():
        what = "is a file" if data.exists() else f"is no folder ({data.absolute()} was tried)"
        raise InputError(f"train_data_dir={config.train_data_dir!r} {what}; give the folder of the samples")
    with os.scandir(data) as found:
        if next(found, None) is None:
            raise InputError(f"train_data_dir={config.train_data_dir!r} is empty; give the folder of the samples")
    check_folder(config.output_dir, "output_dir")
    if config.cache_dir is not None:
        check_folder(config.cache_dir, "cache_dir")
    parts = [name for name, value in info.index.items() if isinstance(value, list) and not name.startswith("_")]
    for name in config.train_modules:
        if name not in parts:
            near = did_you_mean(name, parts) or f"; it has {', '.join(parts)}"
            raise ConfigError(f"train_modules: {info.pipeline_class} has no module {name!r}{near}")
    size = None if config.aspect_ratio_buckets is not None else (config.resolution, config.resolution)
    check_config(config.parallel, info, config.parallel.world_size, size, config.num_frames or 1)
    from .objective import check_objective

    check_objective(config.objective)
    if not info.transformer_class:
        raise ConfigError(f"{info.pipeline_class} has no transformer to train")
    from .families import FAMILIES

    if info.transformer_class not in [kind if isinstance(kind, str) else kind.__name__ for kind in FAMILIES]:
        import diffusers

        from .observed.family import check_observable

        kind = getattr(diffusers, info.pipeline_class, None)
        if isinstance(kind, type):
            check_observable(kind, "transformer_2" in parts and info.index["transformer_2"][0] is not None, config)
    if config.lora is not None:
        _check_lora(config.lora, info)


def _check_lora(lora: LoraConfig, info: ModelInfo) -> None:
    """Reject LoRA for pipelines without it, and for modules that do not exist."""
    import diffusers
    from torch import nn

    from ..layout.describe import on_meta

    pipeline: Any = getattr(diffusers, info.pipeline_class, None)
    if pipeline is not None and not hasattr(pipeline, "save_lora_weights"):
        raise ConfigError(f"{info.pipeline_class} has no LoRA in diffusers; leave lora out to train its weights")
    if "target_modules" not in lora.model_fields_set:
        return
    model = on_meta(info.transformer_class, info.transformer)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in lora.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            # As they are called inside of a block, without its number.
            ends = list(dict.fromkeys(_without_block(name) for name in names))
            near = did_you_mean(target, {".".join(end.split(".")[-target.count(".") - 1 :]) for end in ends})
            raise ConfigError(
                f"lora.target_modules: {info.transformer_class} has no linear layer {target!r}{near}; "
                f"it has {', '.join(ends)}"
            )


def _without_block(name: str) -> str:
    """What follows the number of a block: ``attn.to_q`` of ``transformer_blocks.3.attn.to_q``."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), -1)
    inner = parts[number + 1 :] if number + 1 < len(parts) else parts
    return ".".join(inner)
