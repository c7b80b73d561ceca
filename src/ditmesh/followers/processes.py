"""Ranks beside a running program: its own process becomes rank 0."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ..errors import ConfigError, RankFailed
from ..launch.devices import use_loopback
from ..launch.pool import RankPool
from ..launch.rank import join_group

T = TypeVar("T")

# Seconds for ranks to meet, all of which have started by then.
MEET_SECONDS = 60.0


class HostedCall(Generic[T]):
    """The value or exception of this process, and the values of the other ranks."""

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

    The process joins a process group, torch's default one, until `close`. Its ranks end with it, however it ends, and
    with a call that raises on one of them. `ConfigError`: as `RankPool`; or this process is in a process group already.
    """

    _first = 1

    def __init__(
        self,
        world_size: int,
        device: str = "cpu",
        threads: int | None = None,
        gpus: Sequence[int] | None = None,
    ) -> None:
        """Start the other ranks, and join them.

        Args:
            world_size: this process included.
            device, threads: as for `RankPool`; ``threads`` are the other ranks'.
            gpus: numbers of the GPUs of all ranks, this process's first.
        """
        import torch.distributed as dist

        if world_size < 2:
            raise ConfigError(f"{world_size} ranks beside one another are not possible; use at least 2")
        if dist.is_available() and dist.is_initialized():
            raise ConfigError(
                "this process is in a process group of torch.distributed already, as one of its ranks; leave that "
                "group first, or call ditmesh.parallelize(...) on all of its ranks"
            )
        self._environment = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        # Whether this process is in no process group of these ranks.
        self._left = True
        # The others have started by then and cannot be missed for long.
        super().__init__(world_size, device, threads, MEET_SECONDS, gpus=gpus, import_main=False)
        self._left = False
        use_loopback()
        meeting = f"rendezvous-{self.generation}"
        joined: HostedCall[None] = HostedCall()
        others = self._beside(self._join_anew, lambda: joined.take(lambda: join_group(self._settings[0], meeting)))
        if joined.error is not None or not others:
            self._end("the ranks could not meet")
            self._leave()
            raise RankFailed(
                f"the {world_size - 1} ranks beside this process did not meet it within {MEET_SECONDS:g} s", 0
            ) from joined.error

    def together(self, here: Callable[[], T], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> HostedCall[T]:
        """Call ``fn(*args, **kwargs)`` on every other rank, and ``here()`` in this thread: what both have returned.

        What ``here`` raises is no failure of the ranks. `RankFailed`: another rank has raised, or died; the ranks have
        ended. `ConfigError`: they are closed.
        """
        done: HostedCall[T] = HostedCall()
        done.others = self._beside(lambda: self.run(fn, *args, **kwargs), lambda: done.take(here))
        return done

    def _beside(self, call: Callable[[], Any], part: Callable[[], None]) -> Any:
        """The result of ``call``, which hears the others in a thread of its own, while this one does rank 0's part."""
        heard: HostedCall[Any] = HostedCall()
        thread = threading.Thread(target=heard.take, args=(call,), name="ditmesh-hears-ranks", daemon=True)
        thread.start()
        try:
            part()
            thread.join()
        except BaseException:
            # Ctrl-C: the state of the others is not known.
            self._end("a call was broken off")
            self._leave()
            raise
        if self.closed:
            self._leave()
        if heard.error is not None:
            raise heard.error
        return heard.value

    def close(self, reason: str = "it was closed") -> None:
        """End the ranks, and leave the process group."""
        super().close(reason)
        if not self.inherited:
            self._leave()

    def _leave(self) -> None:
        """Leave the process group, and put this process's environment back."""
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
