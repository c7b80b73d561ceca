"""Launchers by name: this machine, ``torchrun``, Ray, or another package."""

from __future__ import annotations

import inspect
import os
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..errors import ConfigError, did_you_mean
from .backend import Launcher
from .devices import DeviceChoice, DeviceKind, default_threads, resolve_device

# The default launcher.
VARIABLE = "DITMESH_LAUNCHER"
# The entry point group of launchers in installed packages.
ENTRY_POINTS = "ditmesh.launchers"
BUILT_IN = {
    "local": "ditmesh.launch.pool:RankPool",
    "torchrun": "ditmesh.launch.torchrun:TorchrunRanks",
    "ray": "ditmesh.launch.ray:RayRanks",
}


def launcher(name: str | None, world_size: int, *arguments: Any, **options: Any) -> Launcher:
    """Start ranks with the launcher of a name.

    Args:
        name: ``"local"`` (`RankPool`), ``"torchrun"`` (`TorchrunRanks`), ``"ray"`` (`RayRanks`), an entry point of
            the group ``ditmesh.launchers``, or ``"package.module:Class"``; with ``@`` and the address of a cluster
            behind it where the launcher takes one, ``"ray@10.0.0.1:6379"``; None: ``$DITMESH_LAUNCHER``, else
            ``"local"``.
        world_size, arguments, options: see `Launcher`.

    Raises:
        ConfigError: there is no launcher of that name, or it refuses the arguments.
        RankFailed: a rank could not start.
    """
    name, address = _split(name)
    if address is not None:
        options["address"] = address
    target = BUILT_IN.get(name, name)
    named = ":" in target
    try:
        (point,) = [EntryPoint(name, target, "")] if named else entry_points(group=ENTRY_POINTS, name=name)
        make = point.load()
    except (ImportError, AttributeError, ValueError) as error:
        # A ValueError: no entry point has that name, or several have.
        why = "" if isinstance(error, ValueError) else f" ({error})"
        raise ConfigError(
            f"there is no launcher {name!r}{why}; use local, torchrun, ray, an entry point of {ENTRY_POINTS}, or "
            f"package.module:Class{did_you_mean(name, BUILT_IN)}"
        ) from error
    if address is not None and "address" not in inspect.signature(make).parameters:
        raise ConfigError(f"launcher {name} takes no address, and {address!r} is given; leave it out, or use ray")
    return make(world_size, *arguments, **options)


def device_of_launcher(name: str | None, device: DeviceChoice, world_size: int) -> DeviceKind:
    """The device type of ``world_size`` ranks of a launcher, on this machine or its cluster.

    Raises:
        ConfigError: the devices are not there.
    """
    name, address = _split(name)
    if name == "ray":
        from .ray import device_of_cluster

        return device_of_cluster(device, world_size, address)
    return resolve_device(device, world_size)


def threads_of_launcher(name: str | None, device: DeviceKind, world_size: int) -> int:
    """The threads of each of ``world_size`` ranks of a launcher, from the cores of this machine or its cluster.

    Raises:
        ConfigError: there are not enough.
    """
    name, address = _split(name)
    if name == "ray":
        from .ray import threads_of_cluster

        return threads_of_cluster(device, world_size, address)
    return default_threads(world_size, device)


def connection(name: str | None) -> AbstractContextManager[None]:
    """A context with the resources that groups of ranks of a launcher share, such as a cluster's connection.

    Raises:
        ConfigError: the cluster does not answer.
    """
    name, address = _split(name)
    if name == "ray":
        from .ray import connected

        return connected(address)
    return nullcontext()


def _split(name: str | None) -> tuple[str, str | None]:
    """A launcher's name, by default the environment's, and the address behind it."""
    name, _, address = (name or os.environ.get(VARIABLE) or "local").partition("@")
    return name, address or None
