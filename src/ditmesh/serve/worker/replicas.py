"""Replicas: groups of ranks that run tasks, are monitored, and are restarted when they fail."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from ...errors import ConfigError, RankFailed
from ...launch import Launcher
from ...launch.backend import Conversing
from ...launch.pool import POLL_SECONDS
from ..offers import ModelSpec
from ..settings import ServiceSettings
from .protocol import Beat, Command, Message, ModelReady, Stop

# Seconds between attempts to start ranks: the first and the longest pause.
BACKOFF, LONGEST_BACKOFF = 0.2, 60.0
# Seconds for ranks to obey `Stop`, and for their thread to end after that.
JOIN_SECONDS = 5.0

# Where each rank was, in the text of a `RankFailed`: of its stack the innermost place, without folders.
WHERE = re.compile(
    r"^(rank \d+) was here: (?:it is ([^\n]*)|[^\n]*\n\s*File \"(?:[^\"\n]*[/\\])?([^\"\n]*)\", (line [^\n]*))",
    re.MULTILINE,
)

MakeRanks = Callable[[], Launcher]


@dataclass(frozen=True)
class RanksUp:
    """The ranks accept commands."""


@dataclass(frozen=True)
class RanksDown:
    """The ranks have ended: their tasks will not be answered.

    Attributes:
        code: what jobs that failed with them are told.
        why: a sentence that names the rank and the cause; empty: they have stopped as they were told.
        final: they are not started again.
    """

    code: Literal["rank_failed", "stalled"] = "rank_failed"
    why: str = ""
    final: bool = False


ReplicaReport = Message | RanksUp | RanksDown


def serve(specs: Sequence[ModelSpec], function: Callable[..., None] | None, *, report: Any) -> None:
    """Serve tasks on this rank until `Stop` comes. Every rank of a replica calls this."""
    report(RanksUp())
    if function is not None:
        function(specs, report=report)
        return
    # Imports torch, which the owner does not need.
    from .worker import serve_rank

    serve_rank(specs, report=report)


class Replica:
    """A group of ranks, and the thread that starts them, receives their reports, and restarts them when they fail.

    A rank that dies or raises, a rank that is stopped, a step that takes longer than `ServiceSettings.stall`: all
    ranks are killed, since those left wait for the one that is gone, and new ones started, at once the first time and
    after up to a minute when that keeps failing.
    """

    def __init__(
        self,
        name: str,
        make: MakeRanks,
        say: Callable[[Replica, ReplicaReport], None],
        specs: Sequence[ModelSpec],
        limits: ServiceSettings,
        function: Callable[..., None] | None = None,
    ) -> None:
        """Prepare; `start` starts.

        Args:
            make: starts ranks of a launcher that takes replies (`launch.backend.Conversing`).
            say: called in the replica's thread with what rank 0 reports, and `RanksUp` and `RanksDown` around it.
            function: called by every rank in the place of `worker.serve_rank`.
        """
        self.name, self.limits, self._specs = name, limits, specs
        self._make, self._say, self._function = make, say, function
        self._thread = threading.Thread(target=self._run, name=f"ditmesh-{name}", daemon=True)
        self._pool: Conversing | None = None
        self._stopping = threading.Event()
        self._killed = False
        # Times of the monotonic clock: of the last message, of the last that says that work has been done, of the last
        # look at them.
        self._heard = self._worked = self._looked = self._slowest = 0.0
        self._calls, self._stalled = 0, ""
        # How many models are loaded.
        self._loaded = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, command: Command) -> None:
        """Send the ranks a command, from any thread; it is dropped if they have ended, which `RanksDown` reports."""
        pool = self._pool
        if pool is None:
            return
        # A new task has the whole time limit.
        self._worked = time.monotonic()
        pool.reply(command)

    def stop(self) -> None:
        """Tell the ranks to return immediately, and do not restart them; see `join`."""
        self._stopping.set()
        self.send(Stop())

    def join(self, seconds: float = JOIN_SECONDS) -> None:
        """Wait until the ranks have stopped; kill them if they do not."""
        self._thread.join(seconds)
        self._killed = True
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        pause = BACKOFF
        while not self._stopping.is_set():
            down = self._serve_once()
            self._say(self, down)
            if down.final:
                return
            # Ranks that have loaded a model did not fail to start.
            pause = BACKOFF if self._loaded else min(2 * pause, LONGEST_BACKOFF)
            self._stopping.wait(pause)

    def _serve_once(self) -> RanksDown:
        """Start ranks, let them serve until they end, and return how they ended."""
        self._stalled, self._calls, self._slowest, self._loaded = "", -1, 0.0, 0
        try:
            with self._make() as pool:
                if not hasattr(pool, "reply"):
                    raise ConfigError(
                        f"{type(pool).__name__} takes no replies during a call, which a server's ranks need; use "
                        "launcher 'local'"
                    )
                self._heard = self._worked = self._looked = time.monotonic()
                hear = partial(self._hear, cast("Conversing", pool))
                pool.run(serve, self._specs, self._function, on_message=hear, watch=self._missed)
            down = RanksDown(why="the ranks have returned")
        except RankFailed as error:
            down = self._failed(error)
        except Exception as error:
            # A launcher's error is permanent; a full disk, or too many processes, may be temporary.
            down = RanksDown(why=f"ranks cannot be started: {error}", final=isinstance(error, ConfigError))
        finally:
            self._pool = None
        # Ranks that had to be killed because they did not stop have not failed.
        return RanksDown(final=True) if self._stopping.is_set() else down

    def _hear(self, pool: Conversing, rank: int, message: Message | RanksUp) -> None:
        if rank > 0:
            return
        self._heard = time.monotonic()
        if self._ready:
            self._slowest = max(self._slowest, self._heard - self._worked)
        if isinstance(message, RanksUp):
            # A command that was sent before would have come before the call that takes it.
            self._pool = pool
            if self._stopping.is_set():
                self.send(Stop())
        if not isinstance(message, Beat):
            self._worked = self._heard
            self._loaded += isinstance(message, ModelReady)
        elif not message.running or message.calls != self._calls:
            self._worked, self._calls = self._heard, message.calls
        self._say(self, message)

    @property
    def _ready(self) -> bool:
        """True if all models are loaded."""
        return self._loaded == len(self._specs)

    def _missed(self) -> str | None:
        if self._killed or (self._stopping.is_set() and self._pool is None):
            return "stopped when they were told to"
        now = time.monotonic()
        if (away := now - self._looked) > 2 * POLL_SECONDS:
            # This process was stopped itself, and its ranks perhaps with it (Ctrl-Z): that time does not count.
            self._heard, self._worked = min(now, self._heard + away), min(now, self._worked + away)
        self._looked = now
        limit = max(self.limits.stall, 4 * self._slowest) if self._ready else self.limits.load
        if now - self._heard > limit:
            self._stalled = f"said anything for {limit:g} s"
        elif now - self._worked > limit:
            self._stalled = f"done a step for {limit:g} s"
        return self._stalled or None

    def _failed(self, error: RankFailed) -> RanksDown:
        text = str(error)
        first = text.splitlines()[0].strip()
        where = [f"{rank}: {how or f'{file} {line}'}" for rank, how, file, line in WHERE.findall(text)]
        stalled = bool(self._stalled) or " stalled" in first or "had not" in first
        why = f"{first} ({'; '.join(where)})" if where else first
        return RanksDown("stalled" if stalled else "rank_failed", why)
