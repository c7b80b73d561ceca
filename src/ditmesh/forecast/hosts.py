"""What a configuration sends between hosts, and the one that sends least of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ..config import ParallelConfig
from ..core.unexpected import MISTAKES, unexpected
from ..errors import ConfigError, DitmeshError
from ..layout import TokenLayout
from ..layout.describe import on_meta
from .auto import Call, hardware_here, job_of
from .costs.between_hosts import BUSY, across, bytes_across
from .costs.hardware import Hardware
from .costs.work import Job
from .model_work import work_of
from .prediction import predict
from .search import Limits, Model, refusal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Across:
    """What a configuration sends between hosts.

    Attributes:
        config: the configuration.
        axes: those of which a group has ranks on several hosts.
        sent: bytes of a step that all ranks together send to other hosts, by axis, after the warm-up.
        synchronous: the same of a synchronous step.
    """

    config: ParallelConfig
    axes: tuple[str, ...]
    sent: dict[str, float]
    synchronous: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes of a step on all axes."""
        return sum(self.sent.values())

    @property
    def busy(self) -> tuple[str, ...]:
        """Axes across hosts whose ranks wait for one another in every layer."""
        return tuple(axis for axis in self.axes if axis in BUSY)


def between_hosts(config: ParallelConfig, model: Model, job: Job, hardware: Hardware, hosts: Sequence[int]) -> Across:
    """Predict what a configuration sends between hosts.

    Args:
        config: a valid configuration for the model.
        model, job, hardware: what is computed, how much of it, on what.
        hosts: for every rank the number of its host.
    """
    prediction = predict(config, model.work, job, hardware)
    sent = [bytes_across(terms, config, hosts) for terms in (prediction.stale, prediction.synchronous)]
    return Across(config, tuple(across(config, hosts)), *sent)


def better(one: Across, model: Model, job: Job, hardware: Hardware, hosts: Sequence[int]) -> Across | None:
    """The configuration for as many ranks that sends least between hosts, of those that draw the same picture.

    Only guidance, ring, Ulysses and tensor degrees are others. None: none sends less, or none keeps tensor and Ulysses
    inside of the hosts.
    """
    found = [
        between_hosts(config, model, job, hardware, hosts)
        for config in _others(one.config, job)
        if refusal(config, model, Limits(tested=False)) is None
    ]
    found = [other for other in found if not other.busy and other.total < one.total]
    # Weights that are shared out may have to be.
    return min(found, key=lambda other: (-other.config.tensor, other.total), default=None)


def _others(config: ParallelConfig, job: Job) -> Iterator[ParallelConfig]:
    """The same ranks on other axes; no rank without work."""
    axes = ("cfg", "ring", "ulysses", "tensor")
    ranks = config.size_of(axes)
    divisors = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    for cfg, ring, ulysses in product(divisors, repeat=3):
        if ranks % (cfg * ring * ulysses) or cfg > max(job.branches, config.cfg):
            continue
        degrees = {"cfg": cfg, "ring": ring, "ulysses": ulysses, "tensor": ranks // (cfg * ring * ulysses)}
        # Whole weights need not be cut; how many ranks share stale keys decides the picture.
        if degrees["tensor"] > config.tensor or (config.exchange != "exact" and ring != config.ring):
            continue
        try:
            yield ParallelConfig(**{**config.model_dump(), **degrees})
        except ConfigError:
            continue


def advice(
    transformer: str,
    config: Mapping[str, Any],
    layout: TokenLayout | None,
    call: Call,
    chosen: ParallelConfig,
    hosts: Sequence[int],
    device: torch.device | None = None,
) -> str | None:
    """What is to be said of a configuration whose Ulysses or tensor ranks are on several hosts; None: nothing.

    Args:
        transformer, config, layout, call, device: as of `ditmesh.forecast.auto.chosen`.
        chosen: the configuration.
        hosts: for every rank the number of its host.
    """
    busy = [axis for axis in across(chosen, hosts) if axis in BUSY]
    if not busy:
        return None
    names = " and ".join(f"{axis}={chosen.degrees[axis]}" for axis in busy)
    reaches = f"{names} {'reaches' if len(busy) == 1 else 'reach'} across hosts"
    inside = "keep tensor and ulysses inside of a host, and use cfg, ring, pipe or data between hosts"
    if layout is None or layout.source != "reviewed":
        return f"{reaches}, where its ranks exchange something in every layer; {inside}"
    try:
        twin = on_meta(transformer, dict(config))
        model, job = Model(twin, layout, work_of(twin, layout)), job_of(config, call)
        hardware = hardware_here(chosen.world_size, device)
        one = between_hosts(chosen, model, job, hardware, hosts)
        other = better(one, model, job, hardware, hosts)
    except DitmeshError:
        # A model that cannot be looked at is parallelised all the same.
        return f"{reaches}, where its ranks exchange something in every layer; {inside}"
    except MISTAKES as error:
        unexpected(log, error, f"What {transformer} sends between hosts cannot be predicted")
        return f"{reaches}, where its ranks exchange something in every layer; {inside}"
    figure = f"{reaches}: {describe_bytes(one.total)} a step go between them ({job.image:,} image tokens, predicted)"
    if other is None:
        return f"{figure}; {inside}"
    return f"{figure}; {other.config.describe()} sends {describe_bytes(other.total)}"


def describe_bytes(count: float) -> str:
    """Such as ``14.2 MiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} GiB"
