"""Every rank's time and tokens in every step of a request, and when tokens should move because of them.

A rank that waits for others has less to do than they have. What it computes itself is a step's time without that, so
ranks that are slow for a while, or become so, show in every step, with no block run for a measurement. On a machine
with other work a rank also waits for its core. Among ranks that share the same cores in the same way that is chance,
and is taken off; elsewhere it is what makes a rank slow.
"""

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
from ..core.thread_clock import CoreShare, ThreadClock, ThreadTime

# A rank with steps less than this share longer than the mean is not slow: see `Watch`.
DEAD_BAND = 0.08
# Of how much longer it takes in one step no more counts, and from this sum on tokens move.
MOST, LIMIT = 0.3, 1.0
# And at once where a rank takes this share longer than the mean in so many steps in a row; their median is its speed.
FAR, RECENT = 0.25, 3
# Where steps differ by chance, the band is as wide as they are, sums are to reach so many times that, and a rank is far
# off from so many times on. The chance is that of so many steps.
SUMMED, CERTAIN, HISTORY = 5.0, 3.0, 32
# Steps that are shorter count together until they are this many seconds long, by their medians: what the system does
# with a core it does for some tens of milliseconds.
SPAN = 0.25
# Of its share a rank keeps at least this in one move.
MIN_KEPT_SHARE = 0.5
# Of how much longer the slowest rank took, what may be left once tokens have moved: else they move back, and stay for
# so many steps at least, and at most.
HELPED, PAUSE, LONGEST = 0.7, 50, 800
# Seconds that a failed request waits for times of other ranks.
TIMES_TIMEOUT = 20.0


@dataclass(frozen=True)
class StepLoad:
    """One step on one rank.

    Attributes:
        step: number in its request, from 0.
        seconds: from its beginning to that of the next step, or the end of the request.
        waited: of these, for which the rank waited for others.
        tokens: of the image on this rank; 0 while nothing is known of them.
        moved: whether tokens were shared out otherwise from this step on.
        own: of the seconds without waiting those that other work on the machine did not take; None: not known.
    """

    step: int
    seconds: float
    waited: float
    tokens: int
    moved: bool = False
    own: float | None = None

    @property
    def computed(self) -> float:
        """Seconds in which the rank did not wait."""
        return max(self.seconds - self.waited, 0.0)


class Watch:
    """Decides, from what all ranks know alike, when shares are to change.

    What it sees is a step, or the median of several short ones. Every rank has a cumulative sum (Page 1954, "Continuous
    inspection schemes") of how much longer than the mean it took in a step, as a share of that, without a dead band,
    and never below 0. One that is somewhat slower passes the limit after some steps, and one that is as fast as others,
    with steps that differ by chance, never. A step counts `MOST` at most, so that no single one moves anything. For one
    that is far too slow `RECENT` steps are enough. The dead band and both limits grow with what ranks' steps differ by
    chance, which is the median of how far one differs from the step before.

    Whether fewer tokens make a rank faster is then seen. Where much of a step does not depend on them, or the machine
    was busy for a moment, they do not: then the shares are those from before, and nothing moves for a while, twice as
    long every time. So it is where another rank is the slowest than the time before, but then all get equal shares.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pause = PAUSE
        # The rank that the latest move was made for.
        self._slowest: int | None = None
        # By how much ranks' steps differ from those before, of two neighbours with the same shares each.
        self._differences: deque[list[float]] = deque(maxlen=HISTORY)
        self.forget()

    def forget(self) -> None:
        """Nothing is known of the ranks, but how much their steps differ by chance."""
        self._sums = [0.0] * self._ranks
        # Seconds of the latest steps, and how much longer than the mean they are.
        self._recent: deque[tuple[Sequence[float], Sequence[float]]] = deque(maxlen=RECENT)
        # Shares from before the latest change, and how much longer than the mean the slowest rank took then.
        self._before: tuple[tuple[float, ...], float] | None = None
        self._quiet = 0

    def see(self, seconds: Sequence[float], shares: Sequence[float]) -> tuple[float, ...] | None:
        """A step in which ranks with such shares computed for so long.

        Returns:
            Speeds by which to share out tokens from now on; None: as they are.
        """
        mean = sum(seconds) / self._ranks
        if min(seconds) <= 0 or len(shares) != self._ranks or min(shares) <= 0:
            return None
        over = [one / mean - 1 for one in seconds]
        if self._recent:
            self._differences.append([abs(now - then) for now, then in zip(over, self._recent[-1][1], strict=True)])
        self._recent.append((seconds, over))
        if self._before is not None and len(self._recent) == RECENT:
            before, self._before = self._before, None
            if self._excess() > HELPED * before[1]:
                self.forget()
                self._quiet, self._pause = self._pause, min(2 * self._pause, LONGEST)
                return before[0]
        if self._quiet:
            self._quiet -= 1
            return None
        if not self._is_slow(over):
            return None
        took, excess, whole = self._took(), self._excess(), sum(shares)
        slowest = took.index(max(took))
        self.forget()
        if self._slowest not in (None, slowest):
            # A slow rank has become fast: by chance, or because it has recovered.
            self._slowest = None
            self._quiet, self._pause = self._pause, min(2 * self._pause, LONGEST)
            return (1 / self._ranks,) * self._ranks
        self._slowest = slowest
        self._before = tuple(share / whole for share in shares), excess
        found = [share / one for share, one in zip(shares, took, strict=True)]
        least = [share / whole * sum(found) * MIN_KEPT_SHARE for share in shares]
        return levelled_speeds([max(one, bound) for one, bound in zip(found, least, strict=True)], DEAD_BAND)

    def _is_slow(self, over: Sequence[float]) -> bool:
        """Add a step to the sums, and say whether one is at its limit, or a rank is far off."""
        chance = self.chance()
        band = max(DEAD_BAND, chance)
        self._sums = [max(0.0, before + min(more, MOST) - band) for before, more in zip(self._sums, over, strict=True)]
        far = max(min(past[rank] for _, past in self._recent) for rank in range(self._ranks))
        is_far = len(self._recent) == RECENT and far >= max(FAR, CERTAIN * chance)
        return is_far or max(self._sums) >= max(LIMIT, SUMMED * chance)

    def chance(self) -> float:
        """Standard deviation by which a rank's step differs from the mean by chance, of the rank with the largest."""
        if not self._differences:
            return 0.0
        # Of a normal distribution the median of two values' distance is 0.954 of it.
        return max(map(statistics.median, zip(*self._differences, strict=True))) / 0.954

    def _took(self) -> list[float]:
        """Seconds of every rank, the median of the latest steps."""
        return [statistics.median(step[rank] for step, _ in self._recent) for rank in range(self._ranks)]

    def _excess(self) -> float:
        """The factor by which the slowest rank takes longer than the mean."""
        took = self._took()
        return max(took) * self._ranks / sum(took) - 1


def levelled_speeds(speeds: Sequence[float], band: float) -> tuple[float, ...]:
    """Speeds, with a sum of 1; equal ones where the slowest would take less than ``band`` longer than the mean."""
    times = [1 / speed for speed in speeds]
    if max(times) * len(times) / sum(times) - 1 < band:
        return (1 / len(speeds),) * len(speeds)
    return tuple(round(speed / sum(speeds), 3) for speed in speeds)


class StepLoads:
    """The loads of this rank, and their exchange while ranks are balanced.

    Every step each rank tells all others how long it computed in the step before, with and without what other work took
    of its core, and which cores it may use with what priority, in one small message that nothing waits for: it is read
    when the next step begins.

    Args:
        waited: this rank's seconds of waiting so far.
        tokens: image tokens of every sequence rank; empty: not known.
        rank: this one's place among the sequence ranks.
        post: `Link.all_reduce_async` of all ranks; None: nothing is exchanged.
        place: this rank's place in what is exchanged: group, sequence rank, tensor rank; and how many there are of
            each.
        move: takes the group's new speeds when a step begins, on every rank, and returns whether tokens move.
        holds: whether tokens must stay where they are in this step.
        clock, cores: seconds, and the number of `CoreShare`; for tests.

    Attributes:
        steps: those of the latest request that are over.
    """

    def __init__(
        self,
        waited: Callable[[], float],
        tokens: Callable[[], Sequence[int]],
        rank: int,
        post: Callable[[Tensor], Callable[[timedelta | None], Tensor]] | None = None,
        place: tuple[tuple[int, int, int], tuple[int, int, int]] = ((0, 0, 0), (1, 1, 1)),
        move: Callable[[tuple[float, ...], int], bool] = lambda speeds, step: False,
        holds: Callable[[int], bool] = lambda step: False,
        clock: Callable[[], float] = time.perf_counter,
        cores: Callable[[], int] | None = None,
    ) -> None:
        self._waited, self._tokens, self._rank = waited, tokens, rank
        self._post, self._place, self._move, self._holds = post, place, move, holds
        self._clock, self._thread = clock, ThreadClock()
        self._cores = cores or CoreShare().number
        self.steps: list[StepLoad] = []
        self._began: tuple[int, int, float, float, ThreadTime] | None = None
        self._watch = Watch(place[1][1])
        # Of short steps that count together, the seconds of every sequence rank.
        self._together: list[list[float]] = []
        self._coming: Callable[[timedelta | None], Tensor] | None = None
        self._wanted: tuple[float, ...] | None = None
        # Whether what comes next is of a step before tokens moved.
        self._old = self._moved = False

    def begin_step(self, call: TransformerCall) -> None:
        """A step begins, on all ranks."""
        fresh = self._began is None or self._began[0] != call.request
        self._end_step()
        if fresh:
            self.steps = []
        if self._post is not None and not torch.is_grad_enabled():
            self._exchange(fresh, call.step)
        self._began = call.request, call.step, self._clock(), self._waited(), self._thread.read()

    def end_request(self, failed: bool = False) -> None:
        """The request is over: its last step, too."""
        self._end_step()
        self._began = None
        coming, self._coming = self._coming, None
        if coming is not None:
            if failed:
                with suppress(RuntimeError):
                    coming(timedelta(seconds=TIMES_TIMEOUT))
            else:
                self._read(coming)

    def forget(self) -> None:
        """Reset what ranks know of one another after a failure."""
        self._watch.forget()
        self._coming = self._wanted = None
        self._old = False
        self._together = []

    def _end_step(self) -> None:
        if self._began is None:
            return
        _, step, began, waited, thread = self._began
        lengths = self._tokens()
        own = lengths[self._rank] if len(lengths) > self._rank else 0
        seconds = self._clock() - began
        waits = min(self._waited() - waited, seconds)
        alone = self._thread.read().own(seconds - waits, thread)
        self.steps.append(StepLoad(step, seconds, waits, own, self._moved, alone))
        self._moved = False

    def _exchange(self, fresh: bool, step: int) -> None:
        """Read what ranks have told in the step before, act on it, and tell how long this one's last step took."""
        coming, self._coming = self._coming, None
        if coming is not None:
            self._read(coming)
        if self._wanted is not None and not self._holds(step):
            wanted, self._wanted = self._wanted, None
            self._old = self._moved = self._move(wanted, step)
        # The first step of a request prepares what later ones use.
        if fresh or self.steps[-1].step == 0:
            return
        (group, rank, part), sizes = self._place
        told, last = torch.zeros((*sizes, 3), dtype=torch.float64), self.steps[-1]
        alone = last.computed if last.own is None else last.own
        told[group, rank, part] = torch.tensor([last.computed, alone, self._cores()], dtype=torch.float64)
        assert self._post is not None
        self._coming = self._post(told)

    def _read(self, coming: Callable[[timedelta | None], Tensor]) -> None:
        told = coming(None)[self._place[0][0]]
        # On the same cores, with the same priority, what others take of them says nothing about a rank.
        alike = bool((told[..., 2] == told[0, 0, 2]).all())
        # Ranks that share weights share tokens: the slowest of them counts.
        seconds = told[..., 1 if alike else 0].amax(dim=1).tolist()
        if self._old:
            self._old = False
            self._together = []
            return
        self._together.append(seconds)
        if sum(map(max, self._together)) < SPAN:
            return
        pooled = [statistics.median(each) for each in zip(*self._together, strict=True)]
        self._together = []
        wanted = self._watch.see(pooled, self._tokens())
        self._wanted = wanted or self._wanted
