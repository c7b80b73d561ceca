"""The traffic of a configuration between hosts, and the configuration with the least traffic."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ..config import AXES, ParallelConfig
from ..core.unexpected import MISTAKES, unexpected
from ..errors import ConfigError, DitmeshError
from ..layout import TokenLayout
from ..layout.describe import meta_model
from .auto import UsualCall, hardware_here, usual_workload
from .costs.hardware import Hardware
from .costs.step import SHARD, Route, Term
from .costs.work import Workload
from .model_work import work_of
from .prediction import predict
from .search import Model, SearchLimits, config_refusal

log = logging.getLogger(__name__)

# Axes with exchanges at every layer that ranks wait for.
BUSY = ("ulysses", "tensor")


def host_numbers(text: str, world_size: int) -> tuple[int, ...]:
    """For every rank the number of its host, from the number of hosts, ``"2"``, or the ranks of each, ``"3,1"``.

    Raises:
        ConfigError: the ranks cannot be shared out so.
    """
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"hosts {text!r} are no number of hosts; use 2, or the ranks of each such as 3,1")
    counts = [int(word) for word in words]
    if len(counts) == 1:
        if world_size % counts[0]:
            raise ConfigError(
                f"{counts[0]} hosts do not share {world_size} ranks evenly; say how many each has, such as "
                f"{world_size - 1},1"
            )
        counts = [world_size // counts[0]] * counts[0]
    if sum(counts) != world_size:
        raise ConfigError(f"hosts {text} have {sum(counts)} ranks, and the configuration {world_size}; use as many")
    return tuple(host for host, count in enumerate(counts) for _ in range(count))


def across(config: ParallelConfig, hosts: Sequence[int]) -> list[str]:
    """Axes with groups across several hosts, the busiest last.

    Args:
        config: degrees of the axes.
        hosts: for every rank the number of its host.
    """
    return [
        axis
        for axis in AXES
        if any(len({hosts[rank] for rank in group}) > 1 for group in config.groups((axis,)) if len(group) > 1)
    ]


def bytes_across(terms: Iterable[Term], config: ParallelConfig, hosts: Sequence[int]) -> dict[str, float]:
    """Bytes of a step that all ranks together send to other hosts, by axis.

    ``"sequence"`` is ring and ulysses at once, ``"shard"`` the ranks that share weights.

    Args:
        terms: of the step, for that configuration.
        config, hosts: as of `across`.
    """
    found: dict[str, float] = defaultdict(float)
    for term in terms:
        if term.route:
            name = term.axes[0] if len(term.axes) == 1 else "sequence"
            for group in config.shard_groups() if name == SHARD else config.groups(term.axes):
                here = [hosts[rank] for rank in group]
                found[name] += term.sent * (
                    _once_to_each(term.route, here)
                    if term.route in ("same to all", "from last")
                    else sum(share for a, b, share in _pairs(term.route, len(here)) if here[a] != here[b])
                )
    return {name: sent for name, sent in found.items() if sent}


def _once_to_each(route: Route, hosts: Sequence[int]) -> float:
    """The share of a rank's bytes that a group sends to other hosts, if each host receives everything once."""
    senders = 1.0 if route == "from last" else len(hosts) / max(1, len(hosts) - 1)
    return senders * (len(set(hosts)) - 1)


def _pairs(route: Route, size: int) -> Iterator[tuple[int, int, float]]:
    """Pairs of places in a group, and the share of a rank's bytes from the first to the second."""
    if route == "all":
        yield from ((a, b, 1 / (size - 1)) for a in range(size) for b in range(size) if a != b)
    elif route == "ring":
        yield from ((a, (a + 1) % size, 1.0) for a in range(size))
    elif route == "back":
        yield size - 1, 0, 1.0
    else:
        yield from ((a, a + 1, 1.0 if route == "chain" else 1 / (size - 1)) for a in range(size - 1))


@dataclass(frozen=True)
class HostTraffic:
    """The traffic of a configuration between hosts.

    Attributes:
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
        """Axes across hosts with waits in every layer."""
        return tuple(axis for axis in self.axes if axis in BUSY)


def between_hosts(
    config: ParallelConfig, model: Model, workload: Workload, hardware: Hardware, hosts: Sequence[int]
) -> HostTraffic:
    """Predict the traffic of a configuration between hosts.

    Args:
        config: a valid configuration for the model.
        model, workload, hardware: the model, the request, the devices.
        hosts: for every rank the number of its host.
    """
    prediction = predict(config, model.work, workload, hardware)
    sent = [bytes_across(terms, config, hosts) for terms in (prediction.stale, prediction.synchronous)]
    return HostTraffic(config, tuple(across(config, hosts)), *sent)


def better(
    one: HostTraffic, model: Model, workload: Workload, hardware: Hardware, hosts: Sequence[int]
) -> HostTraffic | None:
    """The configuration with the least traffic between hosts, among those of the same ranks and image.

    Only guidance, ring, Ulysses and tensor degrees are others. None: none sends less, or none keeps tensor and Ulysses
    inside of the hosts.
    """
    found = [
        between_hosts(config, model, workload, hardware, hosts)
        for config in _others(one.config, workload)
        if config_refusal(config, model, SearchLimits(tested=False)) is None
    ]
    found = [other for other in found if not other.busy and other.total < one.total]
    # Weights that are shared out may have to be.
    return min(found, key=lambda other: (-other.config.tensor, other.total), default=None)


def _others(config: ParallelConfig, workload: Workload) -> Iterator[ParallelConfig]:
    """The same ranks on other axes; no rank without work."""
    axes = ("cfg", "ring", "ulysses", "tensor")
    ranks = config.size_of(axes)
    divisors = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    for cfg, ring, ulysses in product(divisors, repeat=3):
        if ranks % (cfg * ring * ulysses) or cfg > max(workload.branches, config.cfg):
            continue
        degrees = {"cfg": cfg, "ring": ring, "ulysses": ulysses, "tensor": ranks // (cfg * ring * ulysses)}
        # Whole weights need not be split; the number of ranks with stale keys affects the image.
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
    call: UsualCall,
    chosen: ParallelConfig,
    hosts: Sequence[int],
    device: torch.device | None = None,
) -> str | None:
    """The warning about Ulysses or tensor ranks on several hosts; None: no warning.

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
        twin = meta_model(transformer, dict(config))
        model, workload = Model(twin, layout, work_of(twin, layout)), usual_workload(config, call)
        hardware = hardware_here(chosen.world_size, device)
        one = between_hosts(chosen, model, workload, hardware, hosts)
        other = better(one, model, workload, hardware, hosts)
    except DitmeshError:
        # A model that cannot be analysed is parallelised without a warning.
        return f"{reaches}, where its ranks exchange something in every layer; {inside}"
    except MISTAKES as error:
        unexpected(log, error, f"What {transformer} sends between hosts cannot be predicted")
        return f"{reaches}, where its ranks exchange something in every layer; {inside}"
    sent = f"{describe_bytes(one.total)} a step go between them ({workload.image:,} image tokens, predicted)"
    figure = f"{reaches}: {sent}"
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
