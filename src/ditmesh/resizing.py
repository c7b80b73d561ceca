"""A configuration for another number of devices."""

from __future__ import annotations

from math import prod

from .config import AXES, REPLICAS, ParallelConfig


def resized(config: ParallelConfig, devices: int, heads: int | None = None) -> ParallelConfig:
    """The configuration for another number of devices that comes closest to a given one, on all of them.

    PipeFusion and a stale exchange stay as far as they can use the devices; the other axes are given up for ring and
    ulysses. Tiles and patches, which decide the bits of a reproducible image, stay. `ConfigError`: the settings that
    stay do not fit the devices.
    """
    if devices == config.world_size:
        return config
    settings = config.model_dump() | dict.fromkeys(AXES, 1) | {"speeds": None, "shard": 1}

    def sharing(**degrees: int) -> ParallelConfig:
        # A rank holds as little of the weights as now, if that can be.
        replicas = prod(degrees.get(axis, 1) for axis in REPLICAS)
        whole = replicas if config.shard > 1 else 1
        shard = next((n for n in range(config.shard, replicas) if replicas % n == 0), whole)
        return ParallelConfig(**{**settings, **degrees, "shard": shard})

    if config.stages_or_patches:
        patches = config.patches or config.pipe
        settings |= {"patches": patches, "stages": "estimated"}
        if 1 < devices <= patches:
            return ParallelConfig(**{**settings, "pipe": devices})
    elif config.exchange != "exact":
        if devices > 1:
            return sharing(ring=devices)
        settings |= {"exchange": "exact", "compress": None, "predict": None}
    exact = ParallelConfig.auto(devices, heads) if heads is not None else ParallelConfig(ring=devices)
    return sharing(ulysses=exact.ulysses, ring=exact.ring)
