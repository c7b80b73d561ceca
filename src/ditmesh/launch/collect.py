"""The result of a call on all ranks, decided from their messages, and the ranks that stay for many calls."""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, RankFailed
from . import failures
from .backend import Conversing, OnMessage, Watch
from .failures import Failure
from .messages import encode_call

# Seconds to wait for the cause of a failure, and for all ranks to end a failed call.
CAUSE_SECONDS = 2.0


class Collector:
    """Collects one answer or failure of every rank from messages that the owner passes on; no process, no clock."""

    def __init__(
        self,
        world_size: int,
        seconds: float = math.inf,
        what: str = "answered",
        *,
        first: int = 0,
        on_message: OnMessage | None = None,
        watch: Watch | None = None,
        grace: Callable[[Collection[Failure]], float] = lambda failed: CAUSE_SECONDS,
    ) -> None:
        """Set a deadline of ``seconds`` from the first `tick`; a late rank has not done ``what``.

        ``first``: the first rank that answers. ``on_message`` and ``watch``: see `Launcher.run`. ``grace``: seconds to
        wait for more after these failures.
        """
        self.answers: dict[int, Any] = {}
        self.failed: dict[int, Failure] = {}
        self._world_size, self._ranks = world_size, range(first, world_size)
        self._seconds, self._expected = seconds, f"{what} within {seconds:g} s"
        self._on_message, self._watch, self._grace = on_message, watch, grace
        self._limit: float | None = None

    def take(self, rank: int, kind: str, content: Any) -> None:
        """Handle an ``"answer"``, a ``"failure"`` (a `Failure`) or a ``"message"`` of a rank."""
        if kind == "answer":
            self.answers[rank] = content
        elif kind == "failure":
            self.failed[rank] = content
        elif self._on_message is not None:
            self._on_message(rank, content)

    def tick(self, now: float) -> float:
        """Seconds to wait for further messages; 0: the call has ended with `result`."""
        if self._limit is None:
            self._limit = now + self._seconds
        if not self._silent:
            return 0.0
        if self.failed:
            # A dead rank sends nothing more. After an exception, wait briefly: other ranks may raise too, and what was
            # seen first may be a consequence, and its cause shows up within moments.
            if self._causes[0].certain:
                return 0.0
            self._limit = min(self._limit, now + self._grace(self.failed.values()))
        elif self._watch is not None and (missed := self._watch()) is not None:
            self._limit, self._expected = now, missed
        return max(0.0, self._limit - now)

    def result(
        self, code_places: Callable[[Sequence[int]], Mapping[int, str]], rejoin: Callable[[], bool] | None
    ) -> list[Any]:
        """The answers, in rank order.

        Args:
            code_places: the present places of ranks in their code.
            rejoin: lets the ranks join a new process group, in which they can be called again; whether they have. None:
                after a failure they cannot be called.
        """
        if len(self.answers) == len(self._ranks):
            return [self.answers[rank] for rank in self._ranks]
        silent = self._silent
        if not self.failed:
            raise failures.late(code_places(silent), self._world_size, self._expected)
        causes = self._causes
        stalled = code_places(silent) if causes[0].weight > 0 else dict.fromkeys(silent, "")
        # All ranks have ended the call, and none has lost its device or a peer.
        stay = not silent and not any(failure.weight or failure.gone for failure in causes)
        stay = stay and rejoin is not None and (failures.alike(causes, self._world_size) or rejoin())
        raise failures.rank_failed(causes, stalled, self._world_size, stay)

    @property
    def _causes(self) -> list[Failure]:
        """All failures, causes first."""
        return sorted(self.failed.values(), key=lambda failure: failure.weight)

    @property
    def _silent(self) -> list[int]:
        return [rank for rank in self._ranks if rank not in self.answers and rank not in self.failed]


class StayingRanks(Conversing):
    """Ranks for any number of calls, until they are closed or have failed permanently."""

    timeout: float
    # Whether ranks import the program's main module.
    imports_main = False
    # Why the ranks are closed; how often they have joined a process group: groups of an earlier generation are invalid.
    _closed: str | None = None
    generation: int = 0
    # The first rank that answers calls.
    _first = 0

    def __init__(self) -> None:
        self._lock = threading.Lock()

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

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        deadline: float | None = None,
        on_message: OnMessage | None = None,
        watch: Watch | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank at once; see `Launcher.run`. Arguments and results are pickled.

        A function of an importable module travels by its name; a lambda, a closure, or what was defined in a notebook
        travels by value, with a copy of the globals that it uses.

        Raises:
            RankFailed: a rank raised, died, was stopped or missed the deadline. When its exception can be pickled, it
                is the ``__cause__``. If every rank has come to an end of the call all the same, having answered or
                raised, and none has lost its device or a peer, the ranks can be used again (``pool_open``); unless all
                have raised alike, they have then joined a new process group, and groups made before are no more. In
                every other case all ranks have been ended.
            ConfigError: the ranks are closed.
            TypeError: ``fn`` or an argument cannot be pickled; the ranks are as they were.
        """
        with self._lock:
            if self._closed is not None:
                raise ConfigError(f"this {type(self).__name__} is closed ({self._closed}); make a new one")
            call = encode_call(fn, args, kwargs, on_message is not None, main=self.imports_main)
            try:
                limit = math.inf if deadline is None else deadline
                return self._call(call, self._collector(limit, on_message=on_message, watch=watch))
            except RankFailed as error:
                if not error.pool_open:
                    self._end(str(error).split("\n", 1)[0])
                raise
            except BaseException:
                self._break_off(on_message)
                raise

    def _collector(self, *limits: Any, **watched: Any) -> Collector:
        return Collector(self.world_size, *limits, first=self._first, **watched)

    @abstractmethod
    def _call(self, call: bytes, collector: Collector) -> list[Any]:
        """The answers to a call of `encode_call`."""

    @abstractmethod
    def _end(self, reason: str) -> None:
        """Leave nothing behind, and remember why."""

    def _break_off(self, on_message: OnMessage | None) -> None:
        """End the ranks in the middle of a call."""
        self._end("a call was broken off")
