"""The subject of a plan: a model of the catalogue, or the pipeline in a folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ...config import ParallelConfig, TextEncoderPolicy
from ...errors import InputError, LayoutError
from ...generate.model_info import ModelInfo, find_model
from ..catalogue import Shape, shapes
from ..costs.hardware import Hardware
from ..costs.step import Term
from ..costs.work import Workload
from ..memory.check import components_of, components_of_shape
from ..memory.phases import Components, fullest
from ..search import Exactness, Model, SearchLimits
from ..shipped import derived, model_of
from ..workload import workload_of

Encoders = Literal["whole", "sharded", "rank0", "freed", "before"]
# Bytes of an element.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Denoising steps where only a folder is known.
STEPS = 28
# How far from a device's memory a video's prediction counts as near, as of `SearchLimits.near`.
VIDEOS = 0.4


@dataclass(frozen=True)
class PlanSubject:
    """A model and its request.

    Attributes:
        name: of the model.
        transformer, config: class and configuration of its transformer.
        model: on the meta device, with its layout and its work.
        workload: what is asked for.
        source: where the sizes are from.
        components: what takes memory.
        encoders: where text encoders are: a policy of `ParallelConfig`, or ``"before"``: a program of its own has
            encoded the texts, and they are not loaded.
        offloaded: text encoders and autoencoder are elsewhere while they do not work.
    """

    name: str
    transformer: str
    config: dict[str, Any]
    model: Model
    workload: Workload
    source: str
    components: Components
    encoders: Encoders = "whole"
    offloaded: bool = False

    def limits(
        self, hardware: Hardware, exactness: Exactness, memory: float | None, deadline: float | None
    ) -> SearchLimits:
        """The limits of configurations on some hardware."""
        part = hardware.device
        where: Literal["cpu", "cuda"] = "cpu" if part.name == "cpu" else "cuda"

        def needed(config: ParallelConfig) -> list[Term] | None:
            before = self.encoders == "before"
            try:
                phase = fullest(
                    self.components, config, self.workload, self.dtype, part.runtime, where, self.offloaded, before
                )
            except LayoutError:
                return None
            held = {name: value for name, value in vars(phase).items() if isinstance(value, float) and value}
            return [Term(f"{name} ({phase.name})", "memory", memory=value) for name, value in held.items()]

        moved = self.offloaded or self.encoders == "before"
        policy: TextEncoderPolicy = "whole" if self.encoders == "before" else self.encoders
        # Where encoders come and go the sum of what is held does not say what the fullest phase holds.
        # Of decoding videos the sum knows nothing.
        near = float("inf") if moved else VIDEOS if self.workload.frames > 1 else SearchLimits.near
        return SearchLimits(exactness, memory, deadline, text_encoder=policy, needed=needed, near=near)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return {4: torch.float32, 2: torch.bfloat16}[self.workload.element]


def subject(
    name: str,
    *,
    steps: int | None = None,
    dtype: str = "bfloat16",
    beside: float | None = None,
    encoders: Encoders = "whole",
    offloaded: bool = False,
    pictures: int = 1,
    **sizes: Any,
) -> PlanSubject:
    """The model of a name and its request; None: the default.

    Args:
        name: of the catalogue (`ditmesh.forecast.catalogue`), else a folder, a hub id or an embedded model.
        steps: of denoising.
        dtype: of the weights.
        beside: bytes of what every rank holds beside the transformer.
        encoders, offloaded: as of `PlanSubject`.
        pictures: made at once.
        sizes: what else `workload_of` takes.

    Raises:
        InputError: there is no such model, its class has no reviewed layout, or it cannot make that size.
        LayoutError: its work cannot be found out on the meta device.
    """
    key, known = name.lower(), shapes()
    shipped = key in known and not Path(name).exists()
    source = known[key] if shipped else _found(name, list(known))
    element = DTYPES[dtype]
    workload = workload_of(source, pictures=pictures, element=element, **sizes)
    if isinstance(source, Shape):
        transformer, config, said = source.transformer, source.config, source.source
        usual, held = source.steps, float(source.beside * element)
        decode = float(source.decode * workload.width * workload.height * element) * pictures
        model, components = model_of(source), components_of_shape(source)
    else:
        transformer, config, said = source.transformer_class, source.transformer, "the pipeline's folder"
        usual, held, decode = STEPS, _beside(source), 0.0
        model, components = derived(transformer, config), components_of(source)
    if offloaded or encoders == "before":
        # They are nowhere while the transformer runs.
        held = 0.0
    workload = replace(workload, steps=steps or usual, beside=held if beside is None else beside, decode=decode)
    return PlanSubject(name, transformer, config, model, workload, said, components, encoders, offloaded)


def _found(name: str, known: list[str]) -> ModelInfo:
    try:
        return find_model(name)
    except InputError as error:
        raise InputError(f"{error}; sizes that ship: {', '.join(known)}") from None


def _beside(info: ModelInfo) -> float:
    """Bytes of the weights of the other components in the folder."""
    parts = [path for path in info.files.iterdir() if path.is_dir() and not path.name.startswith("transformer")]
    return float(sum(path.stat().st_size for part in parts for path in part.glob("*.safetensors")))
