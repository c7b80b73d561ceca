"""Every rank's time and tokens in every step, and when tokens move from ranks that compute longer to the others."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from ..core.clock import TransformerCall
from .balance import EQUAL_SPEEDS

# Looks at ranks that all have to show one as slow. Steps count together until a look is this many seconds long.
LOOKS, LOOK_SECONDS = 4, 0.25
# What a move may leave of the slowest rank's excess; else tokens move back, and stay for so many looks, then for twice.
HELPED, PAUSE = 0.7, 16
TIMES_TIMEOUT = timedelta(seconds=20)  # that a failed request waits for times of other ranks


@dataclass(frozen=True)
class StepLoad:
    """One step on a rank: its number, seconds until the next, those of waiting, image tokens; whether they moved."""

    step: int
    seconds: float
    waited: float
    tokens: int
    moved: bool = False

    @property
    def computed(self) -> float:
        """Seconds in which the rank did not wait."""
        return max(self.seconds - self.waited, 0.0)


class Watch:
    """Decides when shares change, from what all ranks know: where `LOOKS` in a row show the same rank as slow."""

    def __init__(self) -> None:
        self._looks: deque[Sequence[float]] = deque(maxlen=LOOKS)
        self._quiet, self._pause = 0, PAUSE
        # Shares before the latest move, and how much longer than the mean the slowest rank took then.
        self._before: tuple[tuple[float, ...], float] | None = None

    def see(self, seconds: Sequence[float], shares: Sequence[float]) -> tuple[float, ...] | None:
        """Look at ranks that computed for so long with such shares; returns new shares, None: as they are."""
        if len(shares) != len(seconds) or min(*seconds, *shares) <= 0:
            return None
        self._looks.append(seconds)
        self._quiet -= 1
        if len(self._looks) < LOOKS:
            return None
        took = [statistics.median(rank) for rank in zip(*self._looks, strict=True)]
        excess = max(took) / statistics.mean(took) - 1
        before, self._before = self._before, None
        if before is not None and excess > HELPED * before[1]:
            # Little of a step depends on tokens, or the rank was slow for a moment.
            self._looks.clear()
            self._quiet, self._pause = self._pause, 2 * self._pause
            return before[0]
        over = [look[took.index(max(took))] / statistics.mean(look) - 1 for look in self._looks]
        # Where looks differ by more than a rank is slow, it is so by chance.
        if self._quiet > 0 or min(over) <= max(EQUAL_SPEEDS, max(over) - min(over)):
            return None
        self._looks.clear()
        old = tuple(share / sum(shares) for share in shares)
        self._before = old, excess
        speeds = [share / seconds for share, seconds in zip(old, took, strict=True)]
        # A rank keeps at least half of its share in one move.
        kept = [max(speed / sum(speeds), share / 2) for speed, share in zip(speeds, old, strict=True)]
        return tuple(round(share / sum(kept), 3) for share in kept)


class StepLoads:
    """The loads of this rank; while ranks are balanced, each tells all others its last step's, and none waits for that.

    Args:
        waited, tokens: this rank's seconds of waiting so far; image tokens of every sequence rank, as far as known.
        place: this rank's group, sequence rank and tensor rank; and how many there are of each.
        post: `Link.all_reduce_async` of all ranks; None: nothing is exchanged.
        move: takes new speeds at the same step on every rank; returns whether tokens move, None: not yet.
    """

    def __init__(
        self,
        waited: Callable[[], float],
        tokens: Callable[[], Sequence[int]],
        place: tuple[tuple[int, int, int], tuple[int, int, int]],
        post: Callable[[Tensor], Callable[[timedelta | None], Tensor]] | None = None,
        move: Callable[[tuple[float, ...], int], bool | None] = lambda speeds, step: False,
    ) -> None:
        self._waited, self._tokens, self._clock = waited, tokens, time.perf_counter
        self._place, self._post, self._move = place, post, move
        self.steps: list[StepLoad] = []
        self._began: tuple[int, int, float, float] | None = None
        self.forget()

    def forget(self) -> None:
        """Drop what ranks know of one another, after a failure."""
        self._watch, self._moved, self._old = Watch(), False, False
        # Seconds of every rank in the steps of this look; times that come (``_old``: of before a move); shares to come.
        self._look: list[list[float]] = []
        self._coming, self._wanted = None, None

    def begin_step(self, call: TransformerCall) -> None:
        """A step begins, on all ranks."""
        fresh = self._began is None or self._began[0] != call.request
        self._end_step()
        self.steps = [] if fresh else self.steps
        if self._post is not None and not torch.is_grad_enabled():
            self._read()
            if self._wanted is not None and (moved := self._move(self._wanted, call.step)) is not None:
                self._wanted, self._old, self._moved = None, moved, moved
            # The first step of a request prepares what later ones use.
            if not fresh and self.steps[-1].step > 0:
                told = torch.zeros(self._place[1], dtype=torch.float64)
                told[self._place[0]] = self.steps[-1].computed
                self._coming = self._post(told)
        self._began = call.request, call.step, self._clock(), self._waited()

    def end_request(self, failed: bool = False) -> None:
        """The request is over: its last step, too."""
        self._end_step()
        with suppress(*(RuntimeError,) * failed):
            self._read(TIMES_TIMEOUT if failed else None)

    def _end_step(self) -> None:
        if self._began is not None:
            (_, step, began, waited), rank = self._began, self._place[0][1]
            seconds, tokens = self._clock() - began, sum(self._tokens()[rank : rank + 1])
            self.steps.append(StepLoad(step, seconds, min(self._waited() - waited, seconds), tokens, self._moved))
            self._moved, self._began = False, None

    def _read(self, limit: timedelta | None = None) -> None:
        """Look at what ranks have told of the step before."""
        if self._coming is None:
            return
        coming, self._coming = self._coming, None
        # Ranks that share weights share tokens: the slowest of them counts.
        seconds = coming(limit)[self._place[0][0]].amax(dim=1).tolist()
        self._look, self._old = [] if self._old else [*self._look, seconds], False
        if sum(map(max, self._look)) >= LOOK_SECONDS:
            look = [statistics.median(rank) for rank in zip(*self._look, strict=True)]
            self._look, self._wanted = [], self._watch.see(look, self._tokens()) or self._wanted
