"""Settings of a training run that do not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from ..errors import did_you_mean

if TYPE_CHECKING:
    from .config import TrainConfig

# The transformer of a pipeline for other noise levels than those of the first.
_SECOND = "transformer_2"


def contradictions(config: TrainConfig) -> Iterator[str]:
    """A sentence for everything that does not fit.

    Raises:
        ConfigError: degrees are none of reproducible mode.
    """
    yield from chain(
        _problems_of_data(config), _problems_of_steps(config), _problems_of_ranks(config), _problems_of_weights(config)
    )


def _problems_of_data(config: TrainConfig) -> Iterator[str]:
    if bool(config.train_data_dir) == bool(config.train_data):
        which = "are both there; leave one out" if config.train_data else "is missing; give the folder of the samples"
        yield f"train_data_dir{' and train_data' * bool(config.train_data)} {which}"
    sets = config.data_sets
    if config.class_data_dir is None and (config.class_prompt is not None or config.prior_loss_weight != 1):
        yield "class_prompt and prior_loss_weight are for class images; give class_data_dir"
    if config.class_data_dir is not None and any(one.has_references for one in sets):
        yield "class_data_dir: class images have no reference images, which this run trains with; leave one out"
    for one in sets:
        if one.keep_tokens and not one.varies_tags:
            yield f"keep_tokens={one.keep_tokens} is for shuffle_tags and tag_dropout; set one of them"


def _problems_of_steps(config: TrainConfig) -> Iterator[str]:
    share = config.train_batch_size * config.parallel.data
    if config.global_batch_size is not None and config.global_batch_size % share:
        yield (
            f"global_batch_size={config.global_batch_size} is no multiple of train_batch_size="
            f"{config.train_batch_size} times data={config.parallel.data}; use "
            f"{share * max(1, config.global_batch_size // share)}"
        )
    if config.peak_rate > 1:
        scaled = f" with scale_lr={config.scale_lr!r}" if config.scale_lr != "no" else ""
        yield (
            f"learning_rate={config.learning_rate:g}{scaled}: {config.optimizer} changes each weight by about that in "
            f"a step; use at most {config.learning_rate / config.peak_rate:g} (1e-4 is usual)"
        )
    unknown = [name for name in config.resume_allow_changed if name != "data" and name not in type(config).model_fields]
    if unknown:
        near = did_you_mean(unknown[0], [*type(config).model_fields, "data"])
        yield f"resume_allow_changed: {unknown[0]!r} is no training setting{near}"
    if (config.lr_decay_steps is not None) != (config.lr_scheduler == "warmup_stable_decay"):
        yield (
            f"lr_scheduler={config.lr_scheduler!r} with lr_decay_steps={config.lr_decay_steps}: "
            "warmup_stable_decay needs lr_decay_steps, and no other has them"
        )
    if isinstance(config.max_sequence_length, tuple) and config.cache_dir is not None and config.keeps_text:
        yield (
            f"max_sequence_length={list(config.max_sequence_length)}: text embeddings in cache_dir have one length; "
            "give one number, or leave cache_dir out"
        )


def _problems_of_ranks(config: TrainConfig) -> Iterator[str]:
    if config.in_order and config.sharding not in ("auto", "none"):
        yield f"sharding={config.sharding!r} adds gradients up as ranks have them; reproducible needs 'none'"
    if config.in_order:
        # Raises where the degrees are none of reproducible mode.
        _ = config.placement
    if config.compile and (config.parallel.world_size > config.parallel.data or config.in_order):
        yield (
            f"compile={config.compile}: compiled blocks have no gradient of attention across ranks and choose "
            "kernels by themselves; of parallel use data alone, and leave reproducible out, or leave compile out"
        )
    if config.data_speeds is not None and config.sharding == "fsdp":
        yield (
            "data_speeds: each forward of sharding: fsdp is a collective of all data ranks, which have as many; "
            "use sharding: ddp or none"
        )
    if isinstance(config.data_speeds, tuple) and len(config.data_speeds) != config.parallel.data:
        yield f"data_speeds has {len(config.data_speeds)} numbers for data={config.parallel.data}; give one for each"

    if config.validation_data_dir is not None and config.validation_split:
        yield "validation_data_dir and validation_split both say which samples are held out; leave one out"


def _problems_of_weights(config: TrainConfig) -> Iterator[str]:
    if config.lora is not None and config.from_scratch:
        yield "lora adapts weights that are there, and from_scratch has none; leave one out"
    base = (
        f"base_precision={config.base_precision!r}"
        if config.base_precision
        else f"base_offload={config.base_offload:g}"
    )
    if (config.base_precision or config.base_offload) and config.lora is None:
        yield f"{base}: whole weights are trained in float32 on the device; add lora"
    if {"transformer", _SECOND} <= set(config.train_modules):
        yield (
            f"train_modules={list(config.train_modules)}: a run trains one of two transformers, each on noise levels "
            f"of its own; leave transformer or {_SECOND} out, and train the other one in another run"
        )
    if config.lora is not None and config.denoiser not in config.train_modules:
        yield f"train_modules={list(config.train_modules)}: lora adapts the transformer as well; add it"
