"""Checks of a training run before any rank starts: settings, folders, modules."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import ParallelConfig, setting
from ..errors import ConfigError, InputError, did_you_mean, reason_of
from ..generate.job import check_config, check_folder
from ..generate.model_info import ModelInfo
from .config import TrainConfig


def check_settings(config: TrainConfig) -> None:
    """Reject errors in the settings. Raises `ConfigError`: naming the setting."""
    for name, field in ParallelConfig.model_fields.items():
        value, why = getattr(config.parallel, name), setting(name).untrained
        if why is not None and value != field.default:
            raise ConfigError(f"{name}={value} is not for training: {why}")
    lora, tensor = config.lora, config.parallel.tensor
    if lora is not None and lora.dropout and config.parallel.world_size > config.parallel.data:
        raise ConfigError(
            f"lora.dropout={lora.dropout:g}: ranks of ulysses, ring and tensor would draw masks of their own; use data "
            "ranks alone, or leave it out"
        )
    if lora is not None and lora.type != "lora" and tensor > 1:
        raise ConfigError(
            f"lora.type={lora.type!r}: tensor={tensor} cuts plain LoRA alone; use type: lora, or ulysses or data"
        )


def prompts_of(config: TrainConfig) -> tuple[str, ...]:
    """The prompts that a run draws. Raises `InputError`: their file cannot be read, or has none."""
    settings = config.reinforce or config.distill
    assert settings is not None
    if not isinstance(settings.prompts, str):
        return settings.prompts
    group, why = "distill" if config.reinforce is None else "reinforce", "it has no line"
    name = f"{group}.prompts={settings.prompts!r}"
    try:
        prompts = [line.strip() for line in Path(settings.prompts).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        prompts, why = [], reason_of(error)
    if not any(prompts):
        raise InputError(f"{name}: {why}; give a list, or a text file with a prompt in each line")
    return tuple(filter(None, prompts))


def check_folders(config: TrainConfig) -> None:
    """Reject folders of data sets, masks and reference images that are not there or empty, and what cannot be rewarded.

    Raises `InputError`: names the setting.
    """
    data = config.data
    if config.reinforce is not None:
        from .reinforce.rewards import Rewards

        Rewards(config.reinforce.rewards)
    if config.objective != "denoising":
        prompts_of(config)
        return
    names = [f"train_data.{number}.dir" for number in range(len(data.train_data))] or ["train_data_dir"]
    for one, name in zip(data.sets, names, strict=True):
        places = [(name, one.train_data_dir), ("mask_dir", one.mask_dir), ("conditioning_dir", one.conditioning_dir)]
        for setting_name, place in places:
            if place is None:
                continue
            folder = Path(place)
            if not folder.is_dir():
                what = "is a file" if folder.exists() else f"is no folder ({folder.absolute()} was tried)"
                raise InputError(f"{setting_name}={place!r} {what}; give the folder of the samples")
            with os.scandir(folder) as found:
                if next(found, None) is None:
                    raise InputError(f"{setting_name}={place!r} is empty; give the folder of the samples")


def check_run(config: TrainConfig, info: ModelInfo) -> None:
    """Reject errors in the settings, the model's JSON files and the folders.

    Raises `ConfigError`, `InputError`: naming the setting, its value and the way out.
    """
    check_settings(config)
    if config.model.encoder_precision is not None or config.lora is not None:
        from .model.frozen import check_precision

        check_precision(config.model.encoder_precision, "encoder_precision")
        check_precision(config.model.base_precision)
    check_folders(config)
    check_folder(config.output_dir, "output_dir")
    if config.data.cache_dir is not None:
        check_folder(config.data.cache_dir, "cache_dir")
    pairs = {name: value for name, value in info.index.items() if isinstance(value, list) and all(value)}
    parts = [name for name in pairs if not name.startswith("_")]
    for name in config.model.train_modules:
        if name not in parts:
            near = did_you_mean(name, parts) or f"; it has {', '.join(parts)}"
            raise ConfigError(f"train_modules: {info.pipeline_class} has no module {name!r}{near}")
    size = None if config.data.aspect_ratio_buckets is not None else (config.data.resolution, config.data.resolution)
    check_config(config.parallel, info, config.parallel.world_size, size, config.data.num_frames or 1)
    from .logs import check_trackers
    from .optimizer.optimizers import check_optimizer

    check_optimizer(config)
    check_trackers(config)
    if not info.transformer_class:
        raise ConfigError(f"{info.pipeline_class} has no transformer to train")
    import diffusers

    from .observed.family import check_observable

    kind = getattr(diffusers, info.pipeline_class, None)
    if isinstance(kind, type):
        check_observable(kind)
    if config.lora is None:
        return
    from ..layout.probe import meta_model
    from .model.adapters import check_modules, targets_of

    if kind is not None:
        check_modules(kind, config)
    settings = info.part(config.denoiser)
    transformer = str(settings.get("_class_name", "transformer"))
    if hasattr(diffusers, transformer):
        targets_of(meta_model(transformer, settings), config.lora)
