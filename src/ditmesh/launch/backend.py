"""The interface of launchers, and their lookup: this machine, ``torchrun``, Ray, or another package."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ConfigError, did_you_mean
from .devices import DeviceChoice, DeviceKind, default_threads, resolve_device

if TYPE_CHECKING:
    from typing import Self

MessageSink = Callable[[Any], None]
OnMessage = Callable[[int, Any], None]
Watch = Callable[[], str | None]

# The default launcher.
VARIABLE = "DITMESH_LAUNCHER"
# The entry point group of launchers in installed packages.
ENTRY_POINTS = "ditmesh.launchers"
BUILT_IN = {
    "local": "ditmesh.launch.pool:RankPool",
    "torchrun": "ditmesh.launch.torchrun:TorchrunRanks",
    "ray": "ditmesh.launch.ray:RayRanks",
}


class Launcher(Protocol):
    """Ranks with a process group that run functions.

    A launcher is made as ``make(world_size, device="auto", threads=None, timeout=600.0, **options)``, with the options
    ``gpus``, ``stop_limit`` and ``preload`` (a hint), all as of `RankPool`. It refuses options that it does not support
    with a `ConfigError`.

    Attributes:
        device: of all of them.
        threads: threads of each rank.
        is_reporter: whether this process prints results. Where the caller is itself one of
            the ranks, only one of them does.
    """

    world_size: int
    device: DeviceKind
    threads: int
    is_reporter: bool

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        deadline: float | None = None,
        on_message: OnMessage | None = None,
        watch: Watch | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank at once, inside its process group.

        Args:
            fn, args, kwargs: the function and its arguments, which may be pickled.
            deadline: seconds within which every rank has to answer; None: no limit but that of collectives.
            on_message: called in this process, in the calling thread, as ``on_message(rank, message)`` for what ranks
                report. With it ``fn`` gets one more argument by name, ``report``, which takes a picklable message.
            watch: called in this process about once a second; unless it returns None the call is broken off, and what
                it returns is what the ranks have failed to do: the rest of "ranks 0, 1 of 2 had not …".

        Returns:
            The result of every rank, in rank order: CPU tensors or plain data, as results may be pickled.

        Raises:
            RankFailed: a rank failed. ``lost`` names the ranks that are gone through no error of the job (killed,
                ended, fallen silent, without their machine or device): it may be started again on the others. A rank
                that had raised in its function would raise again. ``pool_open``: whether the ranks can run something
                else.
        """
        ...

    def close(self) -> None:
        """End the ranks, or leave their process group. Harmless if they have ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Conversing(Launcher, Protocol):
    """A launcher with replies to ranks during a call, as a server's ranks need."""

    def reply(self, content: Any) -> None:
        """Send all ranks a message that their function receives by ``report.reply()``; thread-safe and in order.

        Replies that a rank has not taken when its call ends are dropped.
        """
        ...


class StayingRanks(Conversing):
    """Ranks for any number of calls, until they are closed or have failed permanently."""

    # Why the ranks are closed; how often they have joined a process group.
    _closed: str | None = None
    _meetings: int = 0

    def __repr__(self) -> str:
        state = f"closed: {self._closed}" if self.closed else f"{self.threads} threads each"
        return f"{type(self).__name__}({self.world_size} ranks on {self.device}, {state})"

    @property
    def closed(self) -> bool:
        """True if these ranks can run no more calls."""
        return self._closed is not None

    @property
    def reason(self) -> str:
        """The reason why the ranks are closed; empty while they are open."""
        return self._closed or ""

    @property
    def generation(self) -> int:
        """The number of process groups that the ranks have joined; groups of an earlier generation are invalid."""
        return self._meetings


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
