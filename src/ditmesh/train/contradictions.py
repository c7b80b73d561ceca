"""Settings of a training run that do not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from ..errors import did_you_mean
from .settings import SECOND

if TYPE_CHECKING:
    from .config import TrainConfig


def contradictions(config: TrainConfig) -> Iterator[str]:
    """A sentence for everything that does not fit.

    Raises:
        ConfigError: degrees are none of reproducible mode.
    """
    yield from chain(
        _problems_of_data(config), _problems_of_steps(config), _problems_of_ranks(config), _problems_of_weights(config)
    )


def _problems_of_data(config: TrainConfig) -> Iterator[str]:
    data = config.data
    if bool(data.train_data_dir) == bool(data.train_data):
        which = "are both there; leave one out" if data.train_data else "is missing; give the folder of the samples"
        yield f"data.train_data_dir{' and data.train_data' * bool(data.train_data)} {which}"
    if isinstance(data.max_sequence_length, tuple) and data.cache_dir is not None and config.keeps_text:
        yield (
            f"max_sequence_length={list(data.max_sequence_length)}: text embeddings in cache_dir have one length; "
            "give one number, or leave cache_dir out"
        )


def _problems_of_steps(config: TrainConfig) -> Iterator[str]:
    steps = config.optimizer
    share = steps.train_batch_size * config.parallel.data
    if steps.global_batch_size is not None and steps.global_batch_size % share:
        yield (
            f"global_batch_size={steps.global_batch_size} is no multiple of train_batch_size={steps.train_batch_size} "
            f"times data={config.parallel.data}; use {share * max(1, steps.global_batch_size // share)}"
        )
    if steps.learning_rate > 1:
        yield (
            f"learning_rate={steps.learning_rate:g}: {steps.name} changes each weight by about that in a step; use at "
            "most 1 (1e-4 is usual)"
        )
    known = [*config.flat_names(), "data"]
    if unknown := [name for name in config.output.resume_allow_changed if name not in known]:
        yield f"resume_allow_changed: {unknown[0]!r} is no training setting{did_you_mean(unknown[0], known)}"
    if (steps.lr_decay_steps is not None) != (steps.lr_scheduler == "warmup_stable_decay"):
        yield (
            f"lr_scheduler={steps.lr_scheduler!r} with lr_decay_steps={steps.lr_decay_steps}: "
            "warmup_stable_decay needs lr_decay_steps, and no other has them"
        )


def _problems_of_ranks(config: TrainConfig) -> Iterator[str]:
    sharding, speeds = config.model.sharding, config.optimizer.data_speeds
    if config.in_order and sharding not in ("auto", "none"):
        yield f"sharding={sharding!r} adds gradients up as ranks have them; reproducible needs 'none'"
    if config.in_order:
        # Raises where the degrees are none of reproducible mode.
        _ = config.placement
    if speeds is not None and sharding == "fsdp":
        yield (
            "data_speeds: each forward of sharding: fsdp is a collective of all data ranks, which have as many; "
            "use sharding: ddp or none"
        )
    if isinstance(speeds, tuple) and len(speeds) != config.parallel.data:
        yield f"data_speeds has {len(speeds)} numbers for data={config.parallel.data}; give one for each"


def _problems_of_weights(config: TrainConfig) -> Iterator[str]:
    model = config.model
    if config.lora is not None and model.from_scratch:
        yield "lora adapts weights that are there, and from_scratch has none; leave one out"
    if model.base_precision and config.lora is None:
        yield (f"base_precision={model.base_precision!r}: whole weights are trained in float32 on the device; add lora")
    if {"transformer", SECOND} <= set(model.train_modules):
        yield (
            f"train_modules={list(model.train_modules)}: a run trains one of two transformers, each on noise levels "
            f"of its own; leave transformer or {SECOND} out, and train the other one in another run"
        )
    if config.lora is not None and config.denoiser not in model.train_modules:
        yield f"train_modules={list(model.train_modules)}: lora adapts the transformer as well; add it"
