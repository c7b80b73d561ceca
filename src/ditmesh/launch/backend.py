"""The interface of launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

MessageSink = Callable[[Any], None]
OnMessage = Callable[[int, Any], None]
Watch = Callable[[], str | None]


class Launcher(Protocol):
    """Ranks with a process group that run functions.

    A launcher is made as ``make(world_size, device="auto", threads=None, timeout=600.0, **options)``, with the options
    ``gpus`` and ``preload`` (a hint), both as of `RankPool`. It refuses options that it does not support with a
    `ConfigError`. ``is_reporter``: whether this process prints results. Where the caller is itself one of the ranks,
    only one of them does.
    """

    world_size: int
    device: str
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

        Returns the result of every rank, in rank order: CPU tensors or plain data, as results may be pickled.

        `RankFailed`: a rank failed. ``lost`` names the ranks that are gone through no error of the job (killed, ended,
        fallen silent, without their machine or device): it may be started again on the others. A rank that had raised
        in its function would raise again. ``pool_open``: whether the ranks can run something else.
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
