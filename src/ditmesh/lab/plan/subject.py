"""The subject of a plan: a model of the catalogue, or the pipeline in a folder; its configurations, predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...config import ParallelConfig
from ...errors import ConfigError, DitmeshError, InputError, LayoutError
from ...generate.arguments import unwritten
from ...generate.model_info import find_model, parameters_of
from ...memory.catalogue import Shape, shapes
from ...memory.check import Choice, Demand, components_of, components_of_shape, gigabytes
from ...memory.sizes import Workload, workload_of
from ...recipe import promise_of
from ...request import Offload
from ...staleness.policy import few_steps
from .hardware import Hardware
from .roofline import Prediction, predict

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Denoising steps where only a folder is known.
FOLDER_STEPS = 28


@dataclass(frozen=True)
class PlanSubject:
    """A model and its request.

    Attributes:
        transformer, settings: class and configuration of its transformer.
        repository: what ``ditmesh generate --model`` takes.
        demand: what it asks of the memory.
        refused: the sentence with which that command refuses the pipeline; None: it does not.
    """

    name: str
    transformer: str
    settings: dict[str, Any]
    workload: Workload
    repository: str
    demand: Demand
    refused: str | None = None

    def predict(self, config: ParallelConfig, hardware: Hardware) -> Prediction:
        """The seconds of a configuration; raises as `roofline.predict`."""
        return predict(self.transformer, self.settings, config, self.workload, hardware, self.demand.dtype)


def subject(
    name: str,
    hardware: Hardware,
    *,
    steps: int | None = None,
    dtype: str = "bfloat16",
    pictures: int = 1,
    offload: Offload = "none",
    **sizes: Any,
) -> PlanSubject:
    """The model of a name and its request on some hardware; None: the default.

    Args:
        name: of the catalogue (`ditmesh.memory.catalogue`), else a folder, a hub id or an embedded model.
        steps: of denoising.
        pictures: made at once.
        offload: what text encoders and autoencoder are elsewhere; as of `needs`.
        sizes: what else `workload_of` takes.

    Raises:
        InputError: there is no such model, or it cannot make that size.
    """
    catalogue = shapes()
    try:
        is_known = name.lower() in catalogue and not Path(name).exists()
        source: Any = catalogue[name.lower()] if is_known else find_model(name)
    except InputError as error:
        raise InputError(f"{error}; sizes that ship: {', '.join(catalogue)}") from None
    element = DTYPES[dtype].itemsize
    workload = workload_of(source, pictures=pictures, element=element, **sizes)
    if isinstance(source, Shape):
        transformer, settings, usual = source.transformer, source.config, source.steps
        components, repository, pipeline = components_of_shape(source), source.repository, source.pipeline or ""
    else:
        transformer, settings, usual = source.transformer_class, source.transformer, FOLDER_STEPS
        components, repository, pipeline = components_of(source), name, source.pipeline_class
    workload = replace(workload, steps=steps or usual)
    demand = Demand(
        components,
        workload,
        workload,
        DTYPES[dtype],
        hardware.device.name,
        offload,
        images=pictures,
        branches=workload.branches,
        runtime=hardware.device.runtime,
    )
    refusal = unwritten(pipeline, parameters_of(pipeline))
    return PlanSubject(name, transformer, settings, workload, repository, demand, refusal)


@dataclass(frozen=True)
class PlanRow:
    """A configuration of a plan.

    Attributes:
        prediction: its seconds; None: it does not fit.
        memory: bytes of the rank that needs most; None: not known.
        fits: whether it fits, as far as that is known.
    """

    config: ParallelConfig
    prediction: Prediction | None
    memory: float | None
    fits: bool


@dataclass(frozen=True)
class Plan:
    """A plan.

    Attributes:
        rows: by seconds, those that do not fit last.
        choice: what ``"auto"`` takes.
        refused: configurations that the model cannot run with, and why.
    """

    subject: PlanSubject
    hardware: Hardware
    rows: tuple[PlanRow, ...]
    choice: Choice
    refused: dict[str, str]

    @property
    def best(self) -> PlanRow | None:
        """The fastest one that fits; None: none does."""
        return next((row for row in self.rows if row.fits), None)

    def verdict(self) -> str:
        """What ``"auto"`` takes, and why that is another configuration than the fastest, where it is."""
        best, choice = self.best, self.choice
        taken = next((row.prediction for row in self.rows if row.config == choice.config), None)
        if best is None or best.prediction is None:
            way_out = self.subject.demand.fitting(self.hardware.devices, self.hardware.device.memory, limited=True)
            return f"none of these fits: {way_out.sentence}"
        if best.config == choice.config or taken is None:
            return f'"auto" {choice.describe()}'
        ratio = taken.latency / best.prediction.latency
        return (
            f'"auto" {choice.describe()}: predicted to take {ratio:.2f} of the fastest row\'s time; its rule looks at '
            "memory and at no link"
        )

    def command(self) -> str | None:
        """The line to type for the fastest row that fits; or why there is none for this pipeline."""
        if self.best is None or self.subject.refused is not None:
            return self.subject.refused
        model = f" --model {self.subject.repository}" if self.subject.repository else ""
        return f'ditmesh generate "..."{model} {self.best.config.options()}'


def plan(about: PlanSubject, hardware: Hardware, stale: bool = False) -> Plan:
    """Predict the usual configurations of all devices, and of one."""
    room, demand = hardware.device.memory, about.demand
    choice = demand.choose(hardware.devices, room)
    rows, refused = list[PlanRow](), dict[str, str]()
    few = few_steps(about.workload.steps)
    for config in dict.fromkeys((choice.config, *offers(about, hardware, stale))):
        try:
            if few and promise_of(config) == "none":
                raise ConfigError(few)
            memory = None
            with suppress(LayoutError):
                memory = demand.largest(config)[0]
            fits = memory is None or memory <= room
            rows.append(PlanRow(config, about.predict(config, hardware) if fits else None, memory, fits))
        except DitmeshError as error:
            refused[config.describe()] = str(error)
    rows.sort(key=lambda row: (not row.fits, row.prediction.latency if row.prediction else row.memory or 0.0))
    return Plan(about, hardware, tuple(rows), choice, refused)


def offers(about: PlanSubject, hardware: Hardware, stale: bool) -> Iterator[ParallelConfig]:
    """One device; all devices on one axis; for whole weights and every way to cut them what the rule prefers."""
    devices, workload = hardware.devices, about.workload
    yield ParallelConfig()
    if devices == 1:
        return
    heads, seen = about.demand.heads(), set[tuple[int, int, int]]()
    for config in ParallelConfig.preferred(devices, heads, images=workload.pictures, branches=workload.branches):
        weights = config.tensor, config.shard, config.cfg
        if weights not in seen or (config.ring == devices and not config.cuts_weights):
            seen.add(weights)
            yield config
    settings: list[dict[str, Any]] = []
    for cfg in (1, 2) if stale and workload.branches > 1 and devices % 2 == 0 else (1,) if stale else ():
        ranks = devices // cfg
        settings.append({"cfg": cfg, "ring": ranks, "exchange": "displaced"})
        settings += [{"cfg": cfg, "pipe": ranks, "patches": ranks * times} for times in (1, 2)]
    for setting in settings:
        with suppress(ConfigError):
            yield ParallelConfig(**setting)


def row_data(row: PlanRow) -> dict[str, Any]:
    """A row as plain data."""
    data: dict[str, Any] = {
        "config": row.config.model_dump(exclude_defaults=True),
        "words": row.config.describe(),
        "devices": row.config.world_size,
        "fits": row.fits,
        "memory_bytes": row.memory,
    }
    if (prediction := row.prediction) is None:
        return data | {"why": f"does not fit: {gigabytes(row.memory or 0.0)} GB on a rank"}
    return data | {
        "step_seconds": prediction.step,
        "synchronous_step_seconds": prediction.first_step,
        "synchronous_steps": prediction.exact_steps,
        "denoising_seconds": prediction.latency,
        "terms": dict(prediction.steady),
        "sent_bytes": prediction.sent,
        "why": prediction.reason(),
    }
