"""What a plan is made for: a model of the catalogue, or the pipeline in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...config import ParallelConfig, TextEncoderPolicy
from ...errors import InputError, LayoutError
from ...generate.model_info import ModelInfo, find_model
from ..auto import batched
from ..catalogue import shapes
from ..costs.hardware import Hardware
from ..costs.step import Term
from ..costs.work import Job
from ..memory.check import components_of, components_of_shape
from ..memory.phases import Components, Request, fullest
from ..search import Exactness, Limits, Model
from ..shipped import derived, model_of
from ..workload import request_of, request_of_shape

Encoders = Literal["whole", "sharded", "rank0", "freed", "before"]
# Bytes of an element.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Denoising steps where only a folder is known.
STEPS = 28
# How far from a device's memory a video's prediction counts as near, as of `Limits.near`.
VIDEOS = 0.4


@dataclass(frozen=True)
class Subject:
    """A model, and what is asked of it.

    Attributes:
        name: of the model.
        transformer, config: class and configuration of its transformer.
        model: on the meta device, with its layout and its work.
        job: what is asked for.
        source: where the sizes are from.
        components, request: what takes memory, and what is asked of it.
        encoders: where text encoders are: a policy of `ParallelConfig`, or ``"before"``: a program of its own has
            encoded the texts, and they are not loaded.
        offloaded: text encoders and autoencoder are elsewhere while they do not work.
    """

    name: str
    transformer: str
    config: dict[str, Any]
    model: Model
    job: Job
    source: str
    components: Components
    request: Request
    encoders: Encoders = "whole"
    offloaded: bool = False

    def limits(self, hardware: Hardware, exactness: Exactness, memory: float | None, deadline: float | None) -> Limits:
        """What configurations have to keep to, on some hardware."""
        part = hardware.device
        where: Literal["cpu", "cuda"] = "cpu" if part.name == "cpu" else "cuda"

        def needed(config: ParallelConfig) -> list[Term] | None:
            before = self.encoders == "before"
            try:
                phase = fullest(
                    self.components, config, self.request, self.dtype, part.runtime, where, self.offloaded, before
                )
            except LayoutError:
                return None
            held = {name: value for name, value in vars(phase).items() if isinstance(value, float) and value}
            return [Term(f"{name} ({phase.name})", "memory", memory=value) for name, value in held.items()]

        moved = self.offloaded or self.encoders == "before"
        policy: TextEncoderPolicy = "whole" if self.encoders == "before" else self.encoders
        # Where encoders come and go the sum of what is held does not say what the fullest phase holds.
        # Of decoding videos the sum knows nothing.
        near = float("inf") if moved else VIDEOS if self.request.frames > 1 else Limits.near
        return Limits(exactness, memory, deadline, text_encoder=policy, needed=needed, near=near)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return {4: torch.float32, 2: torch.bfloat16}[self.job.element]


@dataclass(frozen=True)
class Asked:
    """What the user has said of the job; None: the model's usual."""

    size: tuple[int, int] | None = None
    frames: int | None = None
    text: int | None = None
    pictures: int = 1
    guidance: bool | None = None
    steps: int | None = None
    dtype: str = "bfloat16"
    beside: float | None = None
    encoders: Encoders = "whole"
    offloaded: bool = False


def subject(name: str, asked: Asked) -> Subject:
    """The model of a name.

    Args:
        name: of the catalogue (`ditmesh.forecast.catalogue`), else a folder, a hub id or an embedded model.
        asked: what is asked of it.

    Raises:
        InputError: there is no such model, its class has no reviewed layout, or it cannot make that size.
        LayoutError: its work cannot be found out on the meta device.
    """
    key, known = name.lower(), shapes()
    wanted = (asked.size, asked.text, asked.pictures, asked.guidance, asked.frames)
    if key in known and not Path(name).exists():
        shape = known[key]
        transformer, config = shape.transformer, shape.config
        request = request_of_shape(shape, *wanted)
        steps, together, element, source = shape.steps, shape.batched, DTYPES[asked.dtype], shape.source
        beside = float(shape.beside * element)
        decode = float(shape.decode * request.width * request.height * element)
        model, components = model_of(shape), components_of_shape(shape)
    else:
        info = _found(name, list(known))
        transformer, config = info.transformer_class, info.transformer
        request = request_of(info, *wanted)
        steps, together = STEPS, batched(info.pipeline_class)
        beside, decode, source = _beside(info), 0.0, "the pipeline's folder"
        model, components = derived(transformer, config), components_of(info)
    if asked.offloaded or asked.encoders == "before":
        # They are nowhere while the transformer runs.
        beside = 0.0
    job = Job(
        request.image,
        request.text,
        pictures=asked.pictures,
        branches=request.branches,
        batched=together,
        steps=asked.steps or steps,
        element=DTYPES[asked.dtype],
        beside=beside if asked.beside is None else asked.beside,
        decode=decode * asked.pictures,
    )
    return Subject(
        name,
        transformer,
        config,
        model,
        job,
        source,
        components,
        request,
        asked.encoders,
        asked.offloaded,
    )


def _found(name: str, known: list[str]) -> ModelInfo:
    try:
        return find_model(name)
    except InputError as error:
        raise InputError(f"{error}; sizes that ship: {', '.join(known)}") from None


def _beside(info: ModelInfo) -> float:
    """Bytes of the weights of what is beside the transformers, as they lie in the folder."""
    parts = [path for path in info.files.iterdir() if path.is_dir() and not path.name.startswith("transformer")]
    return float(sum(path.stat().st_size for part in parts for path in part.glob("*.safetensors")))
