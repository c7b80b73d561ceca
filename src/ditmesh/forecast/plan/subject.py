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
from ..memory.phases import Components, largest_phase
from ..search import Exactness, Model, SearchLimits
from ..shipped import derived, shipped_model
from ..workload import workload_of

Encoders = Literal["whole", "sharded", "rank0", "freed", "before"]
# Bytes of an element.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Denoising steps where only a folder is known.
FOLDER_STEPS = 28


@dataclass(frozen=True)
class PlanSubject:
    """A model and its request.

    Attributes:
        transformer, config: class and configuration of its transformer.
        model: on the meta device, with its layout and its work.
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
        before = self.encoders == "before"

        def memory_of(config: ParallelConfig) -> list[Term] | None:
            try:
                phase = largest_phase(
                    self.components, config, self.workload, self.dtype, part.runtime, where, self.offloaded, before
                )
            except LayoutError:
                return None
            held = {what: size for what, size in vars(phase).items() if what != "name" and size}
            return [Term(f"{what} ({phase.name})", "memory", memory=float(size)) for what, size in held.items()]

        policy: TextEncoderPolicy = "whole" if self.encoders == "before" else self.encoders
        return SearchLimits(exactness, memory, deadline, text_encoder=policy, memory_of=memory_of)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return {4: torch.float32, 2: torch.bfloat16}[self.workload.element]


def subject(
    name: str,
    *,
    steps: int | None = None,
    dtype: str = "bfloat16",
    encoders: Encoders = "whole",
    offloaded: bool = False,
    pictures: int = 1,
    **sizes: Any,
) -> PlanSubject:
    """The model of a name and its request; None: the default.

    Args:
        name: of the catalogue (`ditmesh.forecast.catalogue`), else a folder, a hub id or an embedded model.
        steps: of denoising.
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
    workload = workload_of(source, pictures=pictures, element=DTYPE_BYTES[dtype], **sizes)
    if isinstance(source, Shape):
        transformer, config, usual, said = source.transformer, source.config, source.steps, source.source
        model, components = shipped_model(source), components_of_shape(source)
    else:
        transformer, config, usual, said = (
            source.transformer_class,
            source.transformer,
            FOLDER_STEPS,
            "the pipeline's folder",
        )
        model, components = derived(transformer, config), components_of(source)
    workload = replace(workload, steps=steps or usual)
    return PlanSubject(name, transformer, config, model, workload, said, components, encoders, offloaded)


def _found(name: str, known: list[str]) -> ModelInfo:
    try:
        return find_model(name)
    except InputError as error:
        raise InputError(f"{error}; sizes that ship: {', '.join(known)}") from None
