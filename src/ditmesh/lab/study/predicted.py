"""Predicted costs of a study's requests on other hardware: seconds, and the memory of a rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...config import ParallelConfig
from ...errors import ConfigError, InputError, LayoutError
from ...lab.plan.hardware import machine
from ...lab.plan.roofline import enlarged
from ...lab.plan.subject import subject
from .analysis import Row
from .plan import Cell, Setup

# Sides of an image, in those of the study's, over which time and memory are predicted.
SIDE_FACTORS = (1, 2, 4, 8)


@dataclass(frozen=True)
class PredictedCost:
    """Seconds of a request's denoising, of one step, and bytes of the rank that needs most."""

    seconds: float
    step: float
    memory: float


class CostModel:
    """Predictions of `ditmesh plan` for the requests of a study, one image each.

    Args:
        hardware: a device such as ``h100``, with its usual link.

    Raises:
        InputError, ConfigError: there is no such device, or the model's cost cannot be predicted, in one sentence.
    """

    def __init__(self, setup: Setup, hardware: str) -> None:
        self._hardware = machine(hardware, 1, setup.dtype)
        more: dict[str, Any] = {"size": setup.size, "frames": setup.frames}
        self._subject = subject(setup.model, self._hardware, steps=setup.steps, dtype=setup.dtype, **more)
        try:
            self._subject.predict(ParallelConfig(), self._hardware)
        except LayoutError as error:
            raise InputError(f"--hardware {hardware}: the cost of {setup.name} cannot be predicted ({error})") from None

    def describe(self) -> str:
        """The device and its link."""
        return self._hardware.describe().removeprefix("1 x ")

    def of(self, row: Row) -> PredictedCost | None:
        """A combination, with the synchronous steps that were measured; None: it cannot be run there."""
        return self.cost(row.strategy, row.devices, row.warmup, row.synchronous.value, row.evaluations)

    def cost(
        self, strategy: str, devices: int, warmup: str, synchronous: float | None, evaluations: int, side: int = 1
    ) -> PredictedCost | None:
        """The cost with a strategy, or on one device (``devices`` is 1); sides are ``side`` times as long."""
        about = self._subject
        workload = enlarged(about.workload, side)
        about = replace(about, workload=workload, demand=replace(about.demand, workload=workload))
        cell = Cell("", (), (), (), strategy, devices, warmup, real=True)
        try:
            config = cell.config() if devices > 1 else replace(cell, strategy="synchronous").config()
            found = about.predict(config, replace(self._hardware, devices=devices))
            waits = evaluations if synchronous is None else synchronous
            seconds = waits * found.first_step + (evaluations - waits) * found.step
            # Policies differ in time, not in what is kept; one that reads drift cannot decide without values.
            memory, _ = about.demand.largest(config.model_copy(update={"warmup": "fixed(1)"}))
            return PredictedCost(seconds, found.step, memory)
        except (ConfigError, LayoutError):
            return None
