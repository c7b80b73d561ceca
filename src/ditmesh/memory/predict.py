"""What every rank of a request needs, phase by phase: loading, encoding the text, denoising, decoding."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from ..config import ParallelConfig
from ..costs.hardware import machine
from ..costs.work import Job
from ..errors import InputError
from ..layout import known_models
from ..layout.describe import on_meta
from ..planner.model import work_of
from ..planner.predict import predict
from ..strategies.pipefusion.stages import first_cut, kinds_of, stage_of
from .walk import Call, Needs, Workspace, cpu_workspace, decode, denoise, encode

PhaseName = Literal["load", "encode", "denoise", "decode"]


@dataclass(frozen=True)
class Part:
    """A component: its class and its configuration."""

    kind: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Components:
    """What a pipeline consists of, as far as it takes memory.

    Attributes:
        name: of the model.
        pipeline: class of the pipeline; None: not known.
        denoisers: the transformers.
        encoders: of texts, by the component's name.
        vae: the autoencoder, if there is one.
        scale: pixels of a latent.
        other: bytes of weights of which nothing is known but their files.
    """

    name: str
    denoisers: tuple[Part, ...]
    pipeline: str | None = None
    encoders: Mapping[str, Part] = field(default_factory=dict)
    vae: Part | None = None
    scale: int = 8
    other: float = 0.0


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        width, height: in pixels.
        rows, cols, frames: image tokens of a sample.
        text: text tokens.
        pictures: of one call of the pipeline.
        branches: of guidance.
    """

    width: int
    height: int
    rows: int
    cols: int
    frames: int = 1
    text: int = 256
    pictures: int = 1
    branches: int = 2


@dataclass(frozen=True)
class Phase:
    """Bytes of a rank in a phase of a request.

    Attributes:
        name: of the phase.
        weights: of all components that are there.
        activations: of tensors beside weights at the peak, with what kernels take.
        kept: keys and values of earlier steps that are there besides.
        shared: messages in shared memory.
        process: what a process has without a model.
    """

    name: PhaseName
    weights: float
    activations: float = 0.0
    kept: float = 0.0
    shared: float = 0.0
    process: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.activations + self.kept + self.shared + self.process


@dataclass(frozen=True)
class RankNeeds:
    """What some ranks need, each of them.

    Attributes:
        stage: of the pipe axis, all of whose ranks need the same.
        ranks: how many they are.
        phases: in their order.
    """

    stage: int
    ranks: int
    phases: tuple[Phase, ...]

    @cached_property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


def batched(pipeline: str | None) -> bool:
    """Whether a pipeline puts both branches of guidance into one call of its transformer, as its code says.

    Of a class that is not known: it does, which needs more.
    """
    import diffusers

    kind = getattr(diffusers, pipeline or "", None)
    if kind is None:
        return True
    code = inspect.getsource(kind.__call__)
    return re.search(r"cat\(\s*\[\s*(latents|latent_model_input)\s*(\]\s*\*\s*2|,\s*\1\s*\])", code) is not None


def needs(
    components: Components,
    config: ParallelConfig,
    request: Request,
    dtype: torch.dtype,
    process: float = 0.0,
    device: Literal["cpu", "cuda"] = "cpu",
    offloaded: bool = False,
    workspace: Workspace | None = cpu_workspace,
) -> list[RankNeeds]:
    """What every rank needs: nothing is read but configurations, and nothing computed.

    Weights of a rank are its slices and stages; there is no other copy of them in any phase.

    Args:
        components: of the pipeline.
        config: of the ranks.
        request: what is asked for.
        dtype: of the weights.
        process: bytes of a process without a model.
        device: what ranks compute on. GPUs pass no tensors through shared memory; what their kernels take besides
            results (cuDNN, cuBLAS) is not known and not counted.
        offloaded: text encoders and autoencoder are elsewhere while they do not work.
        workspace: what a CPU's kernels take.

    Raises:
        LayoutError: a component cannot run without values, or has no reviewed layout.
    """
    kernels = workspace if device == "cpu" else None
    how = _How(dtype, config.shared_memory and device == "cpu", kernels)
    texts = components.encoders.values()
    encoders = [encode(part.kind, part.settings, request.text, dtype, kernels) for part in texts]
    vae = _decoding(components, config, request, how)
    around = sum(one.weights for one in (*encoders, vae)) + components.other
    found: list[RankNeeds] = []
    for stage, one in enumerate(_denoising(components, config, request, how)):
        everything = one.weights + (0.0 if offloaded else around)
        most = max(encoders, key=lambda each: each.activations + offloaded * each.weights, default=Needs(0, 0))
        phases = [Phase("load", everything, process=process)]
        if encoders:
            text = everything + offloaded * most.weights
            phases.append(Phase("encode", text, most.activations, process=process))
        phases.append(Phase("denoise", everything, one.activations, shared=one.shared, process=process))
        if components.vae is not None:
            pixels = everything + offloaded * vae.weights
            # Memory that messages have been written to stays with the process.
            messages = one.shared + vae.shared
            phases.append(Phase("decode", pixels, vae.activations, one.kept, messages, process))
        found.append(RankNeeds(stage, config.world_size // config.pipe, tuple(phases)))
    return found


def around(components: Components, request: Request, dtype: torch.dtype) -> tuple[float, float, float]:
    """What is beside the transformers on a GPU: bytes of weights, and of tensors of encoding and of a whole decode.

    Raises:
        LayoutError: as for `needs`.
    """
    encoders = [encode(part.kind, part.settings, request.text, dtype) for part in components.encoders.values()]
    vae = _decoding(components, ParallelConfig(), request, _How(dtype, False, None))
    weights = sum(one.weights for one in (*encoders, vae)) + components.other
    return weights, max((one.activations for one in encoders), default=0.0), vae.activations


class _How(NamedTuple):
    """What all walks are told."""

    dtype: torch.dtype
    shared_memory: bool
    workspace: Workspace | None


def _decoding(components: Components, config: ParallelConfig, request: Request, how: _How) -> Needs:
    vae = components.vae
    if vae is None:
        return Needs(0.0, 0.0)
    plane = (request.height // components.scale, request.width // components.scale)
    model: Any = on_meta(vae.kind, dict(vae.settings))
    # With what the class has by default.
    channels = model.config.get("latent_channels") or model.config.get("z_dim") or 4
    decoder = getattr(model, "decoder", model)
    video = any(parameter.dim() == 5 for parameter in decoder.parameters())
    frames = (request.frames,) if video else ()
    return decode(vae.kind, vae.settings, config, (request.pictures, channels, *frames, *plane), *how)


def _denoising(components: Components, config: ParallelConfig, request: Request, how: _How) -> list[Needs]:
    """For every stage what its ranks need, of all transformers."""
    call = Call(
        request.rows,
        request.cols,
        request.frames,
        request.text,
        request.pictures,
        request.branches,
        batched(components.pipeline),
    )
    stages = [[*_stages(part, config, call, how)] for part in components.denoisers]
    return [
        Needs(
            # One of several transformers runs at a time.
            sum(one.weights for one in parts),
            max(one.activations for one in parts),
            sum(one.kept for one in parts),
            max(one.shared for one in parts),
        )
        for parts in zip(*stages, strict=True)
    ]


def _stages(part: Part, config: ParallelConfig, call: Call, how: _How) -> list[Needs]:
    """What the ranks of every stage need of one transformer."""
    layout = known_models().get(part.kind)
    if layout is None:
        raise InputError(
            f"{part.kind} has no reviewed token layout, so what it needs is not known before it has run; known are "
            f"{', '.join(sorted(known_models()))}"
        )
    if not config.stages_or_patches:
        return [denoise(part.kind, part.settings, layout, config, call, *how)]
    # In synchronous steps every stage has the whole picture, and nothing needs more. Keys of a stage's blocks stay.
    whole = ParallelConfig(
        **config.model_dump(include={"data", "cfg", "ring", "ulysses", "tensor", "text", "shared_memory", "vae"})
    )
    one = denoise(part.kind, part.settings, layout, whole, call, *how)
    model = on_meta(part.kind, dict(part.settings))
    order, lengths = kinds_of(model, layout), first_cut(model, layout, config)
    work, element = work_of(model, layout), how.dtype.itemsize
    image = call.rows * call.cols * call.frames
    job = Job(image, call.text, call.pictures, call.branches, element=element)
    terms = predict(config, work, job, machine("cpu", config.world_size)).kept
    keys = sum(term.memory for term in terms if term.name == "keys kept")
    found = []
    for stage in range(config.pipe):
        here = [kind for kind, place in zip(order, stage_of(lengths), strict=True) if place == stage]
        absent = sum(one.blocks[kind] for kind in order) - sum(one.blocks[kind] for kind in here)
        own = keys * len(here) / max(lengths)
        found.append(Needs(one.weights - absent, one.activations + own, own, one.shared))
    return found
