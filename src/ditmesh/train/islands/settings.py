"""Settings of training on islands: groups of devices that slow links join."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class IslandsConfig(BaseModel):
    """Groups of devices that train mostly on their own and exchange their changes over a slow link.

    Every island is a run of its own, with all settings equal but ``index``: its ranks average gradients in every step,
    as ever. Islands exchange the change of their weights every so many steps, and an outer optimizer applies the mean
    change (DiLoCo: Douillard et al. 2023, arXiv:2311.08105). With ``learning_rate: 1`` and ``momentum: 0`` the weights
    are averaged (local SGD: Stich 2018, arXiv:1805.09767).

    Attributes:
        count: number of islands; 1: training without islands.
        index: this island, from 0.
        meet: ``HOST:PORT`` at which the islands meet; the first rank of island 0 listens there.
        every: optimizer steps from one exchange to the next, or ``auto``: as many as make the exchange take at most
            ``overhead`` of the time, measured.
        overhead: share of the time that exchanges may take, for ``every: auto``.
        learning_rate, momentum: of the outer optimizer, SGD with Nesterov momentum.
        start: steps at the beginning in which gradients are averaged over all islands (Lin et al. 2018,
            arXiv:1808.07217).
        compress: form in which changes travel: ``none`` (float32), ``bf16``, or ``int8`` with one scale for every 1,024
            values. What rounding loses is added to the next change (error feedback).
        delay: steps that go on while changes travel; the outer step is applied after them.
        exchange: ``weights``, or ``late_gradients``: every step applies the mean gradient of the step before, which
            travels in the meantime.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    count: Annotated[int, Field(ge=1, le=64)] = 2
    index: Annotated[int, Field(ge=0)] = 0
    meet: Annotated[str, Field(pattern=r"^[^\s:/]+:[0-9]{1,5}$|^\[[0-9A-Fa-f:]+\]:[0-9]{1,5}$")] = "127.0.0.1:29600"
    every: Annotated[int, Field(ge=1)] | Literal["auto"] = 20
    overhead: Annotated[float, Field(gt=0, le=1)] = 0.05
    learning_rate: Annotated[float, Field(gt=0)] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    start: Annotated[int, Field(ge=0)] = 0
    compress: Literal["none", "bf16", "int8"] = "none"
    delay: Annotated[int, Field(ge=0)] = 0
    exchange: Literal["weights", "late_gradients"] = "weights"

    @model_validator(mode="after")
    def _fits(self) -> IslandsConfig:
        if self.index >= self.count:
            raise ValueError(f"index={self.index} is none of count={self.count} islands; use 0 to {self.count - 1}")
        if isinstance(self.every, int) and self.delay >= self.every:
            raise ValueError(
                f"delay={self.delay} is not shorter than every={self.every} steps, so that two exchanges would be "
                "under way; use a shorter delay"
            )
        given = self.model_fields_set & {"every", "overhead", "learning_rate", "momentum", "delay"}
        if self.exchange == "late_gradients" and given:
            raise ValueError(f"{min(given)} is for exchange='weights'; leave it out with 'late_gradients'")
        if self.every == "auto" and self.delay:
            raise ValueError(f"every='auto' with delay={self.delay}: give every as a number, or leave delay out")
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of ``meet``."""
        host, _, port = self.meet.rpartition(":")
        return host.strip("[]"), int(port)
