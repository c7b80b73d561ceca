"""The memory of every rank of a request in each phase: loading, text encoding, denoising, decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch

from ..config import ParallelConfig
from ..errors import InputError
from ..layout import known_models
from ..layout.conventions import Size
from ..layout.probe import meta_model
from ..layout.without_values import model_on_meta
from ..request import Offload
from ..strategies.ahead import found_ahead_of, usually_ahead
from ..strategies.pipefusion.stages import first_cut, kinds_of, stage_of
from .cache import Needs, kept
from .sizes import Workload
from .walk import decode, denoise, key_bytes, largest_layer, walk_encoder

PicturePhase = Literal["load", "encode", "denoise", "decode"]


@dataclass(frozen=True)
class Component:
    """A component: its class and its configuration."""

    kind: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Components:
    """The components of a pipeline that need memory; ``scale``: pixels of a latent.

    ``other``: bytes of weights of which nothing is known but their files.
    """

    name: str
    denoisers: tuple[Component, ...]
    encoders: Mapping[str, Component] = field(default_factory=dict)
    vae: Component | None = None
    scale: int = 8
    other: float = 0.0


@dataclass(frozen=True)
class Phase:
    """Bytes of a rank in a phase: weights of all components that are there, tensors beside them at the peak, keys and
    values of earlier steps that are there besides, and a process without a model.
    """

    name: PicturePhase
    weights: float
    activations: float = 0.0
    kept: float = 0.0
    process: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.activations + self.kept + self.process


@dataclass(frozen=True)
class RankNeeds:
    """The memory of each of several equal ``ranks`` of a stage of the pipe axis, phase by phase."""

    stage: int
    ranks: int
    phases: tuple[Phase, ...]

    @cached_property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    def as_data(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "stage": self.stage,
            "ranks": self.ranks,
            "phases": {phase.name: {**vars(phase), "total": phase.total} for phase in self.phases},
            "peak": self.peak.name,
            "peak_bytes": self.peak.total,
        }


def needs(
    components: Components,
    config: ParallelConfig,
    workload: Workload,
    dtype: torch.dtype,
    process: float = 0.0,
    offload: Offload = "none",
    gpu: bool = False,
) -> list[RankNeeds]:
    """Predict the memory of every rank from configurations, without computing anything.

    Weights of a rank are its slices, stages and pieces; there is no other copy of them in any phase. Text encoders are
    whole on every rank while it loads (slices of them never on a GPU), and then where ``text_encoder`` says. What
    kernels take besides their results is not known and not counted. `LayoutError`: a component cannot run without
    values, or has no reviewed layout.

    Args:
        process: bytes of a process without a model.
        offload: text encoders and autoencoder are elsewhere while they do not work (``"model"``), or each of their
            layers is (``"group"``, ``"sequential"``).
        gpu: weights of what `precompute` computes ahead are not on the device, nor are encoders before they are cut.
    """
    away = _ahead(components, config, workload, dtype) if config.precompute and gpu else Needs(0.0, 0.0)
    vae = _decoding(components, config, workload, dtype)
    first, encoders = _encoding(components, config, workload, dtype, gpu)
    offloaded, layers = offload != "none", offload in ("group", "sequential")
    # Offloaded encoders are there one by one, while they encode.
    largest = max(encoders, key=lambda each: each.activations + offloaded * each.weights, default=Needs(0.0, 0.0))
    loaded, encoding = (0.0 if offloaded else sum(each.weights for each in every) for every in (first, encoders))
    later = away.kept + (0.0 if config.text_encoder == "freed" else encoding)
    stages: list[RankNeeds] = []
    for stage, dit in enumerate(_denoising(components, config, workload, dtype)):
        around = dit.weights - away.weights + (0.0 if offloaded else vae.weights + components.other)
        phases = [Phase("load", around + loaded, process=process)]
        if encoders:
            parts = components.encoders.values()
            layer = max(largest_layer(part.kind, part.settings, dtype) for part in parts) if layers else 0.0
            weights = around + (layer if layers else largest.weights if offloaded else encoding)
            phases.append(Phase("encode", weights, largest.activations, process=process))
        phases.append(Phase("denoise", around + later, dit.activations, process=process))
        if components.vae is not None:
            pixels = around + later + (vae.weights if offload == "model" else 0.0)
            phases.append(Phase("decode", pixels, vae.activations, dit.kept, process))
        stages.append(RankNeeds(stage, config.world_size // config.pipe, tuple(phases)))
    return stages


@kept
def computed_ahead(
    transformer: str,
    settings: Mapping[str, Any],
    tensor: int,
    workload: Workload,
    dtype: torch.dtype,
    in_pieces: bool = False,
) -> Needs:
    """Bytes of one of ``tensor`` ranks: `weights` of modules that are computed ahead, and `kept` for their values.

    Args:
        workload: of a rank; values are kept for all of its steps.
        in_pieces: ranks share the other weights in pieces, also those of modules that go ahead in this request alone.

    Raises: as `denoise`.
    """
    model = model_on_meta(transformer, json.dumps(settings, default=str))
    batch, calls = workload.calls(workload.pictures, workload.branches)
    size = Size(workload.rows, workload.cols, workload.text, batch, workload.frames)
    ahead = found_ahead_of(model, size, workload.steps, dtype)
    most = usually_ahead(transformer, settings, dtype).weights if in_pieces else ahead.weights
    return Needs(min(ahead.weights, most) / tensor, 0.0, calls * ahead.values)


def _ahead(components: Components, config: ParallelConfig, workload: Workload, dtype: torch.dtype) -> Needs:
    """Weights that are away while transformers run, and the values that are there instead."""
    share = replace(
        workload,
        pictures=-(-workload.pictures // config.data),
        branches=-(-workload.branches // config.cfg),
        element=dtype.itemsize,
    )
    every = [
        computed_ahead(part.kind, part.settings, config.tensor, share, dtype, config.shard > 1)
        for part in components.denoisers
    ]
    # Stages have about as many blocks each.
    stages = config.pipe
    return Needs(sum(each.weights for each in every) / stages, 0.0, sum(each.kept for each in every) / stages)


def _decoding(components: Components, config: ParallelConfig, workload: Workload, dtype: torch.dtype) -> Needs:
    vae = components.vae
    if vae is None:
        return Needs(0.0, 0.0)
    # The choice of axes that share the rows makes no difference; reproducible images are decoded whole.
    rest = 1 if config.reproducible else config.world_size // (config.data * config.cfg)
    among = _settings(config, "data", "cfg", "vae", "reproducible", ring=rest)
    height, width = workload.height // components.scale, workload.width // components.scale
    sizes = workload.pictures, workload.latent_frames or workload.frames, height, width
    return decode(vae.kind, vae.settings, among, sizes, dtype)


def _encoding(
    components: Components, config: ParallelConfig, workload: Workload, dtype: torch.dtype, gpu: bool
) -> Iterator[list[Needs]]:
    """Text encoders while a rank loads, and as they are from then on."""
    alone, among = ParallelConfig(), _settings(config, "text_encoder", ring=config.world_size)
    for cut in (("tensor",) if gpu else (), ("tensor", "sharded")):
        chosen = among if config.text_encoder in cut else alone
        parts = components.encoders.values()
        yield [walk_encoder(part.kind, part.settings, chosen, workload.text, dtype) for part in parts]


def _denoising(components: Components, config: ParallelConfig, workload: Workload, dtype: torch.dtype) -> list[Needs]:
    """For every stage what its ranks need, of all transformers, of which one runs at a time."""
    # Neither where the other components are nor how many steps follow changes a step, nor what goes ahead but of what
    # is in pieces.
    ahead = config.precompute and config.shard > 1
    among = config.model_copy(update={"text_encoder": "whole", "vae": "auto", "precompute": ahead})
    workload = replace(workload, steps=1, element=dtype.itemsize)
    stages = [_stages(part, among, workload, dtype) for part in components.denoisers]
    return [
        Needs(sum(p.weights for p in parts), max(p.activations for p in parts), sum(p.kept for p in parts))
        for parts in zip(*stages, strict=True)
    ]


def _settings(config: ParallelConfig, *names: str, **others: Any) -> ParallelConfig:
    return ParallelConfig(**config.model_dump(include={*names}), **others)


def keys_of_chunks(settings: Mapping[str, Any], workload: Workload, dtype: torch.dtype) -> float:
    """Bytes of keys and values that a pipeline allocates to draw a video chunk by chunk; 0: it draws none so.

    Whole on every rank, which keeps its heads of them from the first call on. Of earlier chunks tokens are coarser.
    """
    if not (chunks := settings.get("chunk_partition")):
        return 0.0
    whole, width = settings["full_chunk_limit"], settings["num_attention_heads"] * settings["attention_head_dim"]
    coarse = prod(settings["patch_size"]) / prod(settings["compressed_patch_size"])
    tokens = max(chunks) * workload.rows * workload.cols * (whole + (len(chunks) - whole + 1) * coarse)
    return 2 * settings["num_layers"] * width * tokens * workload.pictures * workload.branches * dtype.itemsize


@kept
def _stages(part: Component, config: ParallelConfig, workload: Workload, dtype: torch.dtype) -> list[Needs]:
    """The memory that the ranks of every stage need for one transformer."""
    layout = known_models().get(part.kind)
    if layout is None:
        keys = keys_of_chunks(part.settings, workload, dtype) / 1e9
        beside = f", beside {keys:.3g} GB of keys and values that every rank allocates" if keys else ""
        raise InputError(
            f"{part.kind} has no reviewed token layout, so what it needs is not known before it has run{beside}; known "
            f"are {', '.join(sorted(known_models()))}"
        )
    if not config.stages_or_patches:
        return [denoise(part.kind, part.settings, layout, config, workload, dtype)]
    # In synchronous steps every stage has the whole image, and nothing needs more. Keys of a stage's blocks stay.
    whole = _settings(config, "data", "cfg", "ring", "ulysses", "tensor", "shard", "precompute", "text", "vae")
    total = denoise(part.kind, part.settings, layout, whole, workload, dtype)
    model = meta_model(part.kind, dict(part.settings))
    order, lengths = kinds_of(model, layout), first_cut(model, layout, config)
    keys = key_bytes(part.kind, part.settings, layout, config, workload, dtype)
    stages = []
    for stage in range(config.pipe):
        here = [kind for kind, place in zip(order, stage_of(lengths), strict=True) if place == stage]
        absent = sum(total.blocks[kind] for kind in order) - sum(total.blocks[kind] for kind in here)
        # Keys that are moved on are kept of two steps.
        own = sum(keys[kind] for kind in here) * (1 + config.predicts_keys)
        stages.append(Needs(total.weights - absent, total.activations + own, own))
    return stages
