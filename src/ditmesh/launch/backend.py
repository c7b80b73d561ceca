"""The interface of launchers, and those there are: ranks of this machine, of ``torchrun``, of another package."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ConfigError
from .devices import DeviceKind

if TYPE_CHECKING:
    from typing_extensions import Self

Report = Callable[[Any], None]
OnMessage = Callable[[int, Any], None]
Watch = Callable[[], str | None]

# The launcher of whoever names none.
VARIABLE = "DITMESH_LAUNCHER"
# Where installed packages say which launchers they bring.
ENTRY_POINTS = "ditmesh.launchers"
BUILT_IN = {"local": "ditmesh.launch.pool:RankPool", "torchrun": "ditmesh.launch.torchrun:TorchrunRanks"}


class Launcher(Protocol):
    """Ranks with a process group, on which functions run.

    A launcher is made as ``make(world_size, device="auto", threads=None, timeout=600.0, **options)``, with the options
    ``gpus``, ``stop_limit`` and ``preload`` (a hint), all as of `RankPool`. What it cannot do it refuses with a
    `ConfigError`.

    Attributes:
        world_size: number of ranks.
        device: what all of them compute on.
        threads: threads of each rank.
        speaks: whether this process is the one that tells the user what comes of it. Where the caller is itself one of
            the ranks, only one of them does.
    """

    world_size: int
    device: DeviceKind
    threads: int
    speaks: bool

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
            What every rank returned, in rank order: CPU tensors or plain data, as results may be pickled.

        Raises:
            RankFailed: a rank failed. ``lost`` names the ranks that are gone through no error of the job (killed,
                ended, fallen silent, without their machine or device): it may be started again on the others. A rank
                whose function raised would raise again. ``pool_open``: whether the ranks can run something else.
        """
        ...

    def close(self) -> None:
        """End the ranks, or leave them. Harmless when they are gone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Conversing(Launcher, Protocol):
    """A launcher whose ranks take replies in the middle of a call, as the ranks of a server do."""

    def reply(self, content: Any) -> None:
        """Send all ranks what their function takes by ``report.reply()``, in order; from any thread.

        What a rank has not taken when its call ends is dropped.
        """
        ...


def launcher(name: str | None, world_size: int, *arguments: Any, **options: Any) -> Launcher:
    """Ranks, from the launcher of that name.

    Args:
        name: ``"local"`` (`RankPool`), ``"torchrun"`` (`TorchrunRanks`), an entry point of the group
            ``ditmesh.launchers``, or ``"package.module:Class"``; None: ``$DITMESH_LAUNCHER``, else ``"local"``.
        world_size, arguments, options: see `Launcher`.

    Raises:
        ConfigError: there is no launcher of that name, or it refuses the arguments.
        RankFailed: a rank could not start.
    """
    name = name or os.environ.get(VARIABLE) or "local"
    target = BUILT_IN.get(name, name)
    named = ":" in target
    try:
        (point,) = [EntryPoint(name, target, "")] if named else entry_points(group=ENTRY_POINTS, name=name)
        make = point.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"there is no launcher {name!r} ({error}); use local, torchrun, an entry point of {ENTRY_POINTS}, or "
            f"package.module:Class"
        ) from error
    return make(world_size, *arguments, **options)
