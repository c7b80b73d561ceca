"""The configurations of a number of devices, for the planner and `verify`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal

from .config import AXES, REPLICAS, ParallelConfig
from .errors import ConfigError


def grids(
    devices: int, most: Mapping[str, int], axes: Sequence[str] = AXES, even: bool = True
) -> Iterator[dict[str, int]]:
    """Degrees of the axes for so many devices, in the order of the axes, each from 1 up.

    Args:
        devices: there are.
        most: of an axis; default: as many as there are devices.
        axes: that have degrees.
        even: whether the product of the degrees divides the number of devices, so that ranks share evenly; else it is
            that number at most.
    """
    if not axes:
        yield {}
        return
    axis, *others = axes
    for degree in range(1, min(devices, most.get(axis, devices)) + 1):
        if not even or devices % degree == 0:
            yield from ({axis: degree, **rest} for rest in grids(devices // degree, most, others, even))


def resized(
    config: ParallelConfig,
    devices: int,
    keep: Literal["bits", "strategy"] = "bits",
    *,
    lost: Collection[int] | None = None,
    heads: int | None = None,
) -> ParallelConfig:
    """The configuration for another number of devices that comes closest to a given one.

    What decides the bits of a reproducible image stays in either case: tiles, patches, the tensor degree.

    Args:
        devices: number of ranks that are there.
        keep: ``"bits"``: as many of the devices as can be used, shared among the axes much as they are. Among
            those for equally many the images' axis (data) shrinks first, then the branches' (cfg), then the
            stages' (pipe), then the tokens' (ring and ulysses together, which grow only where that uses more
            ranks). ``"strategy"``: all devices, for PipeFusion or a stale exchange as far as it can use them, the
            other axes given up for ring and ulysses.
        lost: with ``"bits"``: ranks of the configuration that are gone. The others keep their speeds and become
            ranks 0, 1, … in their order, the last ones perhaps without work; sequence ranks that several of them
            share have the slowest one's speed. None: the devices are others, and the speeds are not kept.
        heads: with ``"strategy"``: attention heads of the model, when known.

    Returns:
        With ``"bits"`` a configuration for ``world_size <= devices`` ranks, else for ``devices``.

    Raises:
        ConfigError: not even the smallest fits (no device is left, or too few for the weights), or the settings
            that stay do not fit the devices.
    """
    if keep == "strategy":
        return _with_strategy(config, devices, heads)
    if devices < config.tensor:
        raise ConfigError(
            f"tensor={config.tensor} needs {config.tensor} ranks, and {devices} {'is' if devices == 1 else 'are'} left"
            if devices
            else f"no rank of {config.describe()} is left"
        )
    degrees = _closest_degrees(config, devices)
    changed: dict[str, Any] = dict(degrees) | {"shard": _closest_shard(config, degrees)}
    if config.pipe > 1 and config.patches is None:
        # As many patches as there were stages.
        changed["patches"] = config.pipe
    if lost is None or (degrees["pipe"] != config.pipe and isinstance(config.stages, tuple)):
        # Other stages: how their blocks are cut is decided again.
        changed["stages"] = "estimated"
    if lost is None or (config.pipe > 1 and (degrees["pipe"] == 1 or isinstance(config.speeds, tuple))):
        # Settings of stages, or of ranks, that the smaller configuration lacks.
        changed["speeds"] = None
    elif isinstance(config.speeds, tuple):
        survivors = [rank for rank in range(config.world_size) if rank not in lost]
        changed["speeds"] = _speeds_of(config, config.speeds, survivors, degrees)
    return ParallelConfig(**{**config.model_dump(), **changed})


def _closest_degrees(config: ParallelConfig, devices: int) -> dict[str, int]:
    """Degrees of all axes but tensor, for as many of the devices as can be used (see `resized`)."""
    limit = config.tiles if config.reproducible else devices
    # A ring takes any number of ranks; Ulysses no more than the model has heads, of which the old degree is a proof.
    most = config.degrees | {"ring": max(devices, config.ring)}

    def closeness(degrees: dict[str, int]) -> tuple[int, ...]:
        sequence = degrees["ring"] * degrees["ulysses"]
        grown = max(0, sequence - config.sequence)
        order = (degrees[axis] for axis in ("ulysses", "pipe", "cfg", "data"))
        return (prod(degrees.values()), -grown, sequence, *order)

    axes = ("data", "cfg", "pipe", "ring", "ulysses")
    some = grids(devices // config.tensor, most, axes, even=False)
    return max((one for one in some if one["ring"] * one["ulysses"] <= limit), key=closeness)


def _closest_shard(config: ParallelConfig, degrees: Mapping[str, int]) -> int:
    """The degree of sharing weights with which a rank of new degrees holds as little as now, if that can be."""
    replicas = prod(degrees[axis] for axis in REPLICAS if axis != "data" or config.inputs != "per-data-rank")
    return next((n for n in range(config.shard, replicas) if replicas % n == 0), replicas if config.shard > 1 else 1)


def _speeds_of(
    config: ParallelConfig, given: tuple[float, ...], survivors: Sequence[int], degrees: Mapping[str, int]
) -> tuple[float, ...] | None:
    """Speeds of the new sequence ranks, from those of the ranks that take their places."""
    sequence, shared = degrees["ring"] * degrees["ulysses"], config.tensor
    if sequence == 1:
        return None
    speeds = [given[rank // shared % config.sequence] for rank in survivors]
    replicas = degrees["data"] * degrees["cfg"] * degrees["pipe"]
    return tuple(
        min(
            speeds[(replica * sequence + place) * shared + part]
            for replica in range(replicas)
            for part in range(shared)
        )
        for place in range(sequence)
    )


def _with_strategy(config: ParallelConfig, devices: int, heads: int | None) -> ParallelConfig:
    """All devices for the stale strategy, or for ring and ulysses (see `resized`)."""

    def sharing(**degrees: int) -> dict[str, int]:
        return degrees | {"shard": _closest_shard(config, {**dict.fromkeys(AXES, 1), **degrees})}

    if devices == config.world_size:
        return config
    settings = config.model_dump() | dict.fromkeys(AXES, 1) | {"speeds": None, "shard": 1}
    if config.stages_or_patches:
        patches = config.patches or config.pipe
        settings |= {"patches": patches, "stages": "estimated"}
        if 1 < devices <= patches:
            return ParallelConfig(**{**settings, "pipe": devices})
    elif config.exchange != "exact":
        if devices > 1:
            return ParallelConfig(**{**settings, **sharing(ring=devices)})
        settings |= {"exchange": "exact", "compress": None, "predict": None}
    exact = ParallelConfig.auto(devices, heads) if heads is not None else ParallelConfig(ring=devices)
    return ParallelConfig(**{**settings, **sharing(ulysses=exact.ulysses, ring=exact.ring)})
