"""Ranks beside a running program: its own process becomes rank 0."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..errors import ConfigError, RankFailed
from ..launch import rank as rank_
from ..launch.devices import DeviceChoice, join_default_group, use_loopback
from ..launch.failures import of_exception
from ..launch.messages import OwnerChannel, RankChannel, Reply
from ..launch.pool import PRELOAD, RankPool

T = TypeVar("T")

# Seconds for ranks to meet, all of which have started by then.
MEET_LIMIT = 60.0
# Seconds after which a stopped rank counts as lost.
STOP_TIMEOUT = 10.0

# The message of the thread that hears the others to the one that computes: there is nothing more to do.
_OVER = pickle.dumps("over")


class _Here:
    """This process in the place of a rank's: nothing here ends it, and nothing waits for its end."""

    exitcode = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        # Never readable: a process that has ended would be.
        self.sentinel, self._kept = os.pipe()

    def is_alive(self) -> bool:
        return True

    def kill(self) -> None:
        """Do nothing."""

    def join(self, timeout: float | None = None) -> None:
        """Do nothing."""

    def close(self) -> None:
        os.close(self.sentinel)
        os.close(self._kept)


class HostedCall(Generic[T]):
    """The value or exception of this process, and the values of the other ranks.

    Attributes:
        value: the result of this process, if nothing was raised.
        error: the exception of this process.
        others: what ranks 1, 2, … have returned.
    """

    value: T
    error: BaseException | None = None
    others: Sequence[Any] = ()

    def take(self, fn: Callable[[], T]) -> None:
        try:
            self.value = fn()
        except BaseException as error:
            self.error = error


class HostedRanks(RankPool):
    """Ranks 1, 2, … on this machine, of which this process is rank 0, with its own device and its own threads.

    The process joins a process group, torch's default one, until `close`. Its ranks end with it, however it ends. What
    a rank 0 that RankPool starts would do, a thread of this process does: `together`.

    Raises:
        ConfigError: as `RankPool`; or this process is in a process group already.
    """

    _main = staticmethod(rank_.main_of_hosted)

    def __init__(
        self,
        world_size: int,
        device: DeviceChoice = "cpu",
        threads: int | None = None,
        gpus: Sequence[int] | None = None,
        stop_limit: float = STOP_TIMEOUT,
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        """Start the other ranks, and join them.

        Args:
            world_size: this process included.
            device, threads, preload: as for `RankPool`; ``threads`` are the other ranks'.
            gpus: numbers of the GPUs of all ranks, this process's first.
            stop_limit: seconds after which a rank that is stopped by a signal counts as lost, and is ended.
        """
        import torch.distributed as dist

        if world_size < 2:
            raise ConfigError(f"{world_size} ranks beside one another are not possible; use at least 2")
        if dist.is_available() and dist.is_initialized():
            raise ConfigError(
                "this process is in a process group of torch.distributed already, as one of its ranks; leave that "
                "group first, or call ditmesh.parallelize(...) on all of its ranks"
            )
        self._place = _Here()
        ours, theirs = socket.socketpair()
        self._to_here, self._own = OwnerChannel(ours), RankChannel(theirs)
        self._own_socket = theirs
        self._environment = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        # The others have started by then and cannot be missed for long.
        self._left = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._leave)
            super().__init__(
                world_size, device, threads, MEET_LIMIT, preload, gpus, stop_limit=stop_limit, import_main=False
            )
            use_loopback()
            met = self._beside(self._join_anew, None)
            if met is not True:
                self._end("the ranks could not meet")
                raise RankFailed(
                    f"the {world_size - 1} ranks beside this process did not meet it within {MEET_LIMIT:g} s", 0
                )
            undo.pop_all()

    def _is_here(self, rank: int) -> bool:
        return rank == 0

    def _start(self, preload: Sequence[str], gpus: Sequence[int], import_main: bool) -> None:
        self._processes.append(self._place)
        self._channels.append(self._to_here)
        super()._start(preload, gpus, import_main)
        # It has started long ago.
        self._own.send("answer", None)

    def together(self, here: Callable[[], T], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> HostedCall[T]:
        """Call ``fn(*args, **kwargs)`` on every other rank, and ``here()`` in this thread at the same time.

        Returns:
            What both have returned; what ``here`` has raised is no failure of the ranks.

        Raises:
            RankFailed: another rank has raised, died, or was stopped; see `RankPool.run`.
            ConfigError: the ranks are closed.
        """
        done: HostedCall[T] = HostedCall()
        done.others = self._beside(lambda: self.run(fn, *args, **kwargs), lambda: done.take(here))[1:]
        return done

    def _beside(self, call: Callable[[], Any], first: Callable[[], None] | None) -> Any:
        """The result of ``call``, which hears the others in a thread of its own, while this one does rank 0's part.

        Args:
            call: asks all ranks for something, and collects their answers.
            first: rank 0's part of the first thing that is asked for; None: what the message says.
        """
        heard: HostedCall[Any] = HostedCall()

        def hear() -> None:
            heard.take(call)
            self._to_here.send(_OVER)

        thread = threading.Thread(target=hear, name="ditmesh-hears-ranks", daemon=True)
        thread.start()
        try:
            while (data := self._own.receive()) != _OVER:
                if first is not None:
                    part, first = first, None
                    part()
                    self._answer(None)
                    continue
                message = pickle.loads(data)
                if message is not None and not isinstance(message, Reply):
                    # Nothing else is asked of ranks in between: to join a new process group.
                    _, (settings, meeting), _, _ = message
                    joined: HostedCall[None] = HostedCall()
                    joined.take(partial(_join_group, settings, meeting))
                    self._answer(joined.error)
        except (EOFError, OSError):
            # Closed by the thread, which has given the ranks up.
            pass
        except BaseException:
            # Ctrl-C: the state of the others is not known.
            self._end("a call was broken off")
            raise
        thread.join()
        if self.closed:
            self._leave()
        if heard.error is not None:
            raise heard.error
        return heard.value

    def _answer(self, error: BaseException | None) -> None:
        if error is None:
            self._own.send("answer", None)
        else:
            self._own.send("failure", of_exception(0, error))

    def _whereabouts(self, ranks: Sequence[int]) -> dict[int, str]:
        places = super()._whereabouts([rank for rank in ranks if rank])
        if 0 in ranks:
            # Its thread's signal handlers are the program's own.
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            places[0] = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else "it did not say"
        return places

    def _end(self, reason: str) -> None:
        super()._end(reason)
        if threading.current_thread().name != "ditmesh-hears-ranks":
            self._leave()

    def _leave(self) -> None:
        """Leave the process group, and free this process's resources of it."""
        import torch.distributed as dist

        if self._left:
            return
        self._left = True
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        for name, value in self._environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        for channel in (self._to_here, self._own_socket):
            channel.close()
        self._place.close()


def _join_group(settings: rank_.RankSettings, meeting: str) -> None:
    """As `rank.join_group`, for a process with threads that stay where they are."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    rendezvous = (Path(settings.folder) / meeting).as_uri()
    join_default_group(settings.device, settings.rank, settings.world_size, settings.gpu, settings.timeout, rendezvous)
