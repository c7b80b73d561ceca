"""The memory of every rank of a run: loading, encoding samples, the step's passes, the update of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch

from ...config import ParallelConfig
from ...errors import LayoutError, first_line
from ...forecast.costs.work import Workload
from ...forecast.memory.cache import Needs, kept
from ...forecast.memory.phases import Component, Components, RankNeeds
from ...forecast.memory.walk import FAILURES, WalkOptions, encoder_on_meta, fake_weights, walk_encoder, weight_bytes
from ...layout import known_models
from ...layout.conventions import Size
from ...layout.describe import meta_model
from ...strategies.pipefusion.stages import first_cut, kinds_of, stage_of
from ..config import SECOND, TrainConfig
from ..gradients.reduce import BUCKET
from ..model.frozen import encoders_to_freeze, layers_to_freeze
from ..optimizer.optimizers import optimizer_name, state_per_weight
from .walk import StepNeeds, StepSettings, bytes_of_parts, step_needs

TrainingPhaseName = Literal["load", "encode", "step", "update"]
# Tensors of a weight's size that an update makes beside the state, one weight at a time on a CPU.
TEMPORARIES = 2


@dataclass(frozen=True)
class TrainingPhase:
    """Bytes of a rank in a phase of a training step.

    Attributes:
        name: ``load``, ``encode`` (samples), ``step`` (forward and backward) or ``update``.
        trained, frozen: weights of the transformer, with and without a gradient; in ``load`` as they are read.
        others: weights of text encoders and autoencoder.
        gradients, optimizer, average: of the trained weights; gradients of ``step`` are among the activations.
        activations: tensors beside all these at the peak.
        shared: messages in shared memory.
        process: bytes of a process without a model.
    """

    name: TrainingPhaseName
    trained: float
    frozen: float
    others: float
    gradients: float = 0.0
    optimizer: float = 0.0
    average: float = 0.0
    activations: float = 0.0
    shared: float = 0.0
    process: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        held = self.trained + self.frozen + self.others + self.gradients + self.optimizer + self.average
        return held + self.activations + self.shared + self.process


def training_needs(
    components: Components,
    config: TrainConfig,
    workload: Workload,
    device: Literal["cpu", "cuda"] = "cpu",
    process: float = 0.0,
) -> list[RankNeeds[TrainingPhase]]:
    """Predict the memory of every rank of a run from configurations, without computing anything.

    Args:
        workload: tokens of a sample at the largest size of the run.
        device: what ranks compute on; on GPUs what kernels take besides results is not counted.
        process: bytes of a process without a model.

    Raises:
        LayoutError: a component cannot run without values, or the transformer has no reviewed layout.
        ConfigError: the run's memory is not predicted: text encoders, compiled blocks, reproducible mode.
    """
    refused = unpredicted(config)
    if refused is not None:
        raise LayoutError(refused)
    part, others = _denoisers(components, config)[0], _others(components, config, workload)
    encoding = _encoding(components, config, workload)
    found = []
    for stage, lengths in enumerate(_stages(part, config)):
        step = _step(part, config, workload, device, lengths, stage)
        found.append(
            RankNeeds(
                stage,
                config.parallel.world_size // config.parallel.pipe,
                _phases(step, part, config, others, encoding, device, process),
            )
        )
    return found


def unpredicted(config: TrainConfig) -> str | None:
    """The reason why the memory of a run is not predicted; None: it is."""
    if tuple(config.train_modules) not in (("transformer",), (SECOND,)):
        return f"train_modules={list(config.train_modules)}: the memory of training text encoders is not predicted"
    if config.compile:
        return f"compile={config.compile}: the memory of compiled blocks is not predicted"
    if config.in_order:
        return "reproducible: the memory of its tiles in training is not predicted"
    return None


def _others(components: Components, config: TrainConfig, workload: Workload) -> float:
    parts = [components.vae] if components.vae is not None else []
    beside = _denoisers(components, config)[1:]
    weights = sum(_weights(part.kind, part.settings) for part in [*parts, *beside])
    if config.base_precision is not None and not config.quantises_slices:
        less = (saved_bytes_of_transformer(part.kind, part.settings, config.base_precision) for part in beside)
        weights -= sum(one.weights for one in less)
    how, alone = WalkOptions(torch.float32), ParallelConfig()
    texts = components.encoders.values()
    weights += sum(walk_encoder(one.kind, one.settings, alone, workload.text, how).weights for one in texts)
    for name in encoders_to_freeze(components.encoders, config):
        part, precision = components.encoders[name], config.encoder_precision
        assert precision is not None
        weights -= saved_bytes(part.kind, part.settings, precision).weights
    return weights + components.other


def _denoisers(components: Components, config: TrainConfig) -> tuple[Component, ...]:
    return components.denoisers[:: -1 if config.denoiser == SECOND else 1]


@kept
def saved_bytes_of_transformer(kind: str, settings: Mapping[str, Any], precision: str) -> Needs:
    """Bytes that a transformer's linear layers take less in a precision than in float32; as `Needs.weights`."""
    return Needs(_less(meta_model(kind, dict(settings)), precision), 0.0)


def _less(model: Any, precision: str) -> float:
    less = 0.0
    for name in layers_to_freeze(model):
        weight = model.get_submodule(name).weight
        less += 4.0 * weight.numel() - bytes_of_parts(weight.numel(), weight.shape[0], precision)
    return less


@kept
def saved_bytes(kind: str, settings: Mapping[str, Any], precision: str) -> Needs:
    """Bytes that a text encoder's linear layers take less in a precision than in float32; as `Needs.weights`."""
    return Needs(_less(encoder_on_meta(kind, settings), precision), 0.0)


def _weights(kind: str, settings: Mapping[str, Any]) -> float:
    model = meta_model(kind, dict(settings))
    return 4.0 * sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def _encoding(components: Components, config: TrainConfig, workload: Workload) -> float:
    """Tensors beside weights while a sample is encoded."""
    how, alone = WalkOptions(torch.float32, kernels=True), ParallelConfig()
    most = [walk_encoder(one.kind, one.settings, alone, workload.text, how) for one in components.encoders.values()]
    found = max((one.activations for one in most), default=0.0)
    if components.vae is not None:
        sizes = (1, config.num_frames or 0, workload.height, workload.width)
        found = max(found, encode_picture(components.vae.kind, components.vae.settings, sizes, how).activations)
    return found


@kept
def encode_picture(kind: str, settings: Mapping[str, Any], sizes: tuple[int, int, int, int], how: WalkOptions) -> Needs:
    """An autoencoder's run over images, or a video, whole.

    Args:
        kind, settings: class and configuration.
        sizes: images, frames (0: none), height and width in pixels.
        how: what else the walk is told.

    Raises:
        LayoutError: it cannot run without values.
    """
    vae: Any = meta_model(kind, dict(settings)).eval()
    video = any(parameter.dim() == 5 for parameter in getattr(vae, "encoder", vae).parameters())
    pictures, frames, *plane = sizes
    channels = vae.config.get("in_channels") or vae.config.get("input_channels") or 3
    with fake_weights(vae, how.dtype):
        alive, _ = how.meters(vae)
        try:
            with alive:
                vae.encode(torch.empty(pictures, channels, *((frames or 1,) if video else ()), *plane))
        except FAILURES as error:
            raise LayoutError(
                f"{kind} cannot run without values, so the memory of encoding is not known: {first_line(error)}"
            ) from None
        return Needs(weight_bytes(vae), alive.peak)


def _stages(part: Component, config: TrainConfig) -> list[list[int] | None]:
    """For every stage how many blocks of each kind it has; None: all."""
    if config.parallel.pipe == 1:
        return [None]
    layout = known_models().get(part.kind)
    if layout is None:
        raise LayoutError(f"{part.kind} has no reviewed token layout, so its memory is not known before it has run")
    model = meta_model(part.kind, dict(part.settings))
    order, lengths = kinds_of(model, layout), first_cut(model, layout, config.parallel)
    places = [*zip(order, stage_of(lengths), strict=True)]
    kinds = range(max(order) + 1)
    return [[sum(one == (kind, stage) for one in places) for kind in kinds] for stage in range(config.parallel.pipe)]


def _step(
    part: Component,
    config: TrainConfig,
    workload: Workload,
    device: Literal["cpu", "cuda"],
    lengths: list[int] | None,
    stage: int,
) -> StepNeeds:
    ranks = config.parallel
    names = {"ring", "ulysses", "tensor", "text", "shared_memory"}
    among = ParallelConfig(**{**ranks.model_dump(include=names), "inputs": "trust"})
    exchanged = ranks.data * ranks.ulysses * ranks.ring > 1
    sharding = config.sharding if exchanged and ranks.pipe == 1 else "none"
    given = StepSettings(
        lora=None if config.lora is None else config.lora.model_dump_json(exclude_unset=True),
        precision=config.base_precision,
        offload=config.base_offload if device == "cuda" else 0.0,
        checkpointing=config.gradient_checkpointing,
        autocast=config.mixed_precision,
        sharding=sharding,
        accumulates=config.accumulation > 1,
        device=device,
    )
    images = config.train_batch_size * (2 if config.class_data_dir is not None else 1)
    size = Size(workload.rows, workload.cols, workload.text, images, workload.frames)
    found = step_needs(part.kind, part.settings, among, size, given, lengths)
    # A stage has as many micro-batches under way as stages follow, and its own.
    more = min(config.accumulation, ranks.pipe - stage) - 1
    return replace(found, peak=found.peak + more * found.forward)


def _phases(
    step: StepNeeds,
    part: Component,
    config: TrainConfig,
    others: float,
    encoding: float,
    device: str,
    process: float,
) -> tuple[TrainingPhase, ...]:
    ranks = config.parallel
    shards = ranks.data * ranks.ulysses * ranks.ring if config.sharding == "fsdp" and ranks.pipe == 1 else 1
    trained, frozen = step.trained / shards, step.frozen / shards
    # Two blocks are whole at a time: one computes, and the next one is gathered.
    gathered = 2 * step.block if shards > 1 else 0.0
    state = 0.0 if optimizer_name(config) == "SGD" and not config.optimizer_args else state_per_weight(config)
    optimizer, average = state * trained, trained if config.use_ema else 0.0
    # Gradients of shards are no part of the walk; of others they are, and are there from step to step only in it.
    shard = trained if shards > 1 else 0.0
    exchanged = ranks.data * ranks.ulysses * ranks.ring > 1
    buckets = trained if config.sharding == "ddp" and exchanged else 0.0
    beside = trained if device == "cuda" else TEMPORARIES * step.largest / shards
    if exchanged and (config.sharding == "none" or ranks.pipe > 1):
        # Gradients are copied into messages after the backward pass, some at a time.
        beside = max(beside, min(trained, BUCKET + step.largest))
    loaded = _weights(part.kind, part.settings) if config.base_precision is None else step.frozen + step.trained
    held = {"trained": trained, "frozen": frozen, "others": others, "process": process}
    kept = {"optimizer": optimizer, "average": average, "shared": step.shared}
    return (
        TrainingPhase("load", 0.0, loaded, others, process=process),
        TrainingPhase("encode", activations=encoding, **held),
        TrainingPhase("step", activations=step.peak + gathered + buckets, gradients=shard, **held, **kept),
        TrainingPhase("update", activations=beside + buckets, gradients=trained, **held, **kept),
    )


def tokens_of(workload: Workload) -> int:
    """Tokens of a sample, images and text."""
    return prod((workload.rows, workload.cols, max(1, workload.frames))) + workload.text
