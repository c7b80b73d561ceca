"""What a plan is made for: a model of the catalogue, or the pipeline in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...costs.work import Job
from ...errors import DitmeshError, InputError
from ...generate.memory import components_of, components_of_shape
from ...generate.model_info import ModelInfo, find_model
from ...layout import known_models
from ...layout.describe import on_meta
from ...memory.predict import Components, Request, around
from ...planner.auto import TEXT
from ...planner.catalogue import shapes
from ...planner.model import work_of
from ...planner.search import Model

# Bytes of an element.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Subject:
    """A model, and what is asked of it.

    Attributes:
        name: of the model.
        transformer, config: class and configuration of its transformer.
        model: on the meta device, with its layout and its work.
        job: what is asked for.
        source: where the sizes are from.
    """

    name: str
    transformer: str
    config: dict[str, Any]
    model: Model
    job: Job
    source: str


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


def subject(name: str, asked: Asked) -> Subject:
    """The model of a name.

    Args:
        name: of the catalogue (`ditmesh.planner.catalogue`), else a folder, a hub id or an embedded model.
        asked: what is asked of it.

    Raises:
        InputError: there is no such model, its class has no reviewed layout, or it cannot make that size.
        LayoutError: its work cannot be found out on the meta device.
    """
    key, known = name.lower(), shapes()
    if key in known and not Path(name).exists():
        shape = known[key]
        transformer, config = shape.transformer, shape.config
        image = shape.tokens(*(asked.size or shape.size), asked.frames or shape.num_frames)
        usual = (shape.text, shape.branches, shape.steps)
        size, parts, source = asked.size or shape.size, components_of_shape(shape), shape.source
        frames = ((asked.frames or shape.num_frames) - 1) // shape.frames + 1
    else:
        info = _found(name, list(known))
        transformer, config = info.transformer_class, info.transformer
        size = asked.size or info.default_size or (1024, 1024)
        info.check_size(*size)
        image = info.image_tokens(*size) * (asked.frames or 1)
        usual = (TEXT, 1 if config.get("guidance_embeds") else 2, 28)
        frames, parts, source = asked.frames or 1, components_of(info), "the pipeline's folder"
    layout = known_models().get(transformer)
    if layout is None:
        raise InputError(
            f"{transformer} has no reviewed token layout, so its work is not known before it has run; plan knows "
            f"{', '.join(sorted(known_models()))}"
        )
    module = on_meta(transformer, config)
    text = usual[0] if asked.text is None else asked.text
    beside, encode, decode = _around(parts, size, frames, text, asked)
    job = Job(
        image,
        text,
        pictures=asked.pictures,
        branches=usual[1] if asked.guidance is None else 1 + asked.guidance,
        steps=asked.steps or usual[2],
        element=DTYPES[asked.dtype],
        beside=beside,
        encode=encode,
        decode=decode,
    )
    return Subject(name, transformer, config, Model(module, layout, work_of(module, layout)), job, source)


def _found(name: str, known: list[str]) -> ModelInfo:
    try:
        return find_model(name)
    except InputError as error:
        raise InputError(f"{error}; sizes that ship: {', '.join(known)}") from None


def _around(
    parts: Components, size: tuple[int, int], frames: int, text: int, asked: Asked
) -> tuple[float, float, float]:
    """Bytes of the weights beside the transformers, and what encoding and decoding take besides weights."""
    if asked.beside is not None:
        return asked.beside, 0.0, 0.0
    request = Request(*size, 1, 1, frames, text, asked.pictures)
    try:
        return around(parts, request, getattr(torch, asked.dtype))
    except DitmeshError:
        # A class that cannot be looked at without values.
        return parts.other, 0.0, 0.0
