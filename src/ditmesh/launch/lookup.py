"""Launchers by name: this machine, ``torchrun``, Ray, or another package's."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from typing import Any

from ..errors import ConfigError, did_you_mean
from .backend import Launcher
from .devices import default_threads, resolve_device

# The default launcher.
VARIABLE = "DITMESH_LAUNCHER"
BUILT_IN = {
    "local": "ditmesh.launch.pool:RankPool",
    "torchrun": "ditmesh.launch.torchrun:TorchrunRanks",
    "ray": "ditmesh.launch.ray:RayRanks",
}


def launcher(name: str | None, world_size: int, *arguments: Any, **options: Any) -> Launcher:
    """Start ranks with the launcher of a name.

    Args:
        name: ``"local"`` (`RankPool`), ``"torchrun"`` (`TorchrunRanks`), ``"ray"`` (`RayRanks`), or
            ``"package.module:Class"``; None: ``$DITMESH_LAUNCHER``, else ``"local"``.
        world_size, arguments, options: see `Launcher`.

    Raises:
        ConfigError: there is no launcher of that name, or it refuses the arguments.
        RankFailed: a rank could not start.
    """
    name = _named(name)
    target = BUILT_IN.get(name, name)
    try:
        if ":" not in target:
            raise ImportError("it names no module and class")
        make = EntryPoint(name, target, "").load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"there is no launcher {name!r} ({error}); use {', '.join(BUILT_IN)}, or package.module:Class"
            f"{did_you_mean(name, BUILT_IN)}"
        ) from error
    return make(world_size, *arguments, **options)


def device_of_launcher(name: str | None, device: str, world_size: int) -> str:
    """The device type of a launcher's ranks, here or on its cluster; `ConfigError`: there are too few."""
    if _named(name) == "ray":
        from .ray import device_of_cluster

        return device_of_cluster(device, world_size)
    return resolve_device(device, world_size)


def threads_of_launcher(name: str | None, device: str, world_size: int) -> int:
    """The threads of each of ``world_size`` ranks of a launcher, from the cores of this machine or its cluster."""
    if _named(name) == "ray":
        from .ray import threads_of_cluster

        return threads_of_cluster(device, world_size)
    return default_threads(world_size, device)


def _named(name: str | None) -> str:
    """A launcher's name, by default the environment's."""
    return name or os.environ.get(VARIABLE) or "local"
