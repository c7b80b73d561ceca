"""What a plan is made for: a model of the catalogue, or the pipeline in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...costs.work import Job
from ...errors import InputError
from ...generate.model_info import ModelInfo, find_model
from ...generate.workload import request_of, request_of_shape
from ...planner.auto import batched
from ...planner.catalogue import shapes
from ...planner.search import Model
from ...planner.shipped import derived, model_of

# Bytes of an element.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Denoising steps where only a folder is known.
STEPS = 28


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
    wanted = (asked.size, asked.text, asked.pictures, asked.guidance, asked.frames)
    if key in known and not Path(name).exists():
        shape = known[key]
        transformer, config = shape.transformer, shape.config
        request = request_of_shape(shape, *wanted)
        steps, together, element, source = shape.steps, shape.batched, DTYPES[asked.dtype], shape.source
        beside = float(shape.beside * element)
        decode = float(shape.decode * request.width * request.height * element)
        model = model_of(shape)
    else:
        info = _found(name, list(known))
        transformer, config = info.transformer_class, info.transformer
        request = request_of(info, *wanted)
        steps, together = STEPS, batched(info.pipeline_class)
        beside, decode, source = _beside(info), 0.0, "the pipeline's folder"
        model = derived(transformer, config)
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
    return Subject(name, transformer, config, model, job, source)


def _found(name: str, known: list[str]) -> ModelInfo:
    try:
        return find_model(name)
    except InputError as error:
        raise InputError(f"{error}; sizes that ship: {', '.join(known)}") from None


def _beside(info: ModelInfo) -> float:
    """Bytes of the weights of what is beside the transformers, as they lie in the folder."""
    parts = [path for path in info.files.iterdir() if path.is_dir() and not path.name.startswith("transformer")]
    return float(sum(path.stat().st_size for part in parts for path in part.glob("*.safetensors")))
