"""The result of a call on all ranks, decided from their messages, without processes, sockets or clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from . import failures
from .backend import OnMessage, Watch
from .failures import Failure

# Seconds to wait for the cause of a failure, and for all ranks to end a failed call.
CAUSE_TIMEOUT = 2.0


class Collector:
    """Collects one answer of every rank, or failures, from the messages that the owner passes on.

    Attributes:
        answers, failed: by rank.
    """

    def __init__(
        self,
        world_size: int,
        seconds: float = math.inf,
        what: str = "answered",
        on_message: OnMessage | None = None,
        watch: Watch | None = None,
        grace: Callable[[Collection[Failure]], float] = lambda failed: CAUSE_TIMEOUT,
    ) -> None:
        """Set a deadline of ``seconds`` from the first `tick`; a late rank has not done ``what``.

        ``on_message`` and ``watch``: see `Launcher.run`. ``grace``: seconds to wait for more after these failures.
        """
        self.answers: dict[int, Any] = {}
        self.failed: dict[int, Failure] = {}
        self._world_size, self._seconds, self._expected = world_size, seconds, f"{what} within {seconds:g} s"
        self._on_message, self._watch, self._grace = on_message, watch, grace
        self._limit: float | None = None
        # Ranks that count as failed although they may have answered.
        self._late: Sequence[int] = ()

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
        if not self._silent or self._late:
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

    def give_up(self, ranks: Sequence[int], expected: str) -> None:
        """End the call because ranks have not done the ``expected`` action."""
        self._late, self._expected = ranks, expected

    def result(
        self, code_places: Callable[[Sequence[int]], Mapping[int, str]], rejoin: Callable[[], bool] | None
    ) -> list[Any]:
        """The answers, in rank order.

        Args:
            code_places: the present places of ranks in their code.
            rejoin: lets the ranks join a new process group, in which they can be called again; whether they have.
                None: after a failure they cannot be called.

        Raises:
            RankFailed: a rank has failed, or has done nothing in time.
        """
        if len(self.answers) == self._world_size:
            return [self.answers[rank] for rank in range(self._world_size)]
        silent = self._silent
        if not self.failed:
            raise failures.late(code_places(self._late or silent), self._world_size, self._expected)
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
        return [rank for rank in range(self._world_size) if rank not in self.answers and rank not in self.failed]
