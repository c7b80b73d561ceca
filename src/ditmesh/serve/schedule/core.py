"""The decision which ranks run the next calls of which requests, and how.

A pure function of its arguments (`Scheduler.decide`), so that it is tested without ranks, and so that a simulation
decides as a server does. The order is after known rules: the earliest deadline first (Liu and Layland 1973),
over a set that leaves out the longest request where not all can be in time (Moore 1968), and for the others the
highest response ratio next (Brinch Hansen 1971) within the owner that has had the least (start-time fair queueing,
Goyal et al. 1996). That the ranks of a request change between its steps, with the fewest that meet its deadline, is
after TetriServe (arXiv:2510.01565) and GF-DiT (arXiv:2606.13501).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from .costs import AFTER, ALONE, BEFORE, Kind, Mode, StepCosts

# Seconds for which ranks go on before they ask again what to do; a longer call is not interrupted.
QUANTUM = 0.025
# Seconds of the ranks' time that an owner may have before another one that waits, and is not held back for.
BURST = 2.0
# A batch has to save so much of the time of its rows alone.
WORTH = 0.97
# What comes while a call runs waits for its end. So where requests have deadlines, a call of several requests takes no
# longer than the longest call of one, or than this share of the shortest request, and late requests share none: the
# next one that is due would wait longer.
BLOCKED = 0.25
# From so many late ones for each rank on, what calls save matters more: neither holds.
LINE = 3
# More ranks have to make a request at least so many times as fast as fewer of them: they take time from the others.
WIDER = 1.15
# A task that has begun stays in the plan while it is expected to be late by no more than this share of what is left of
# it, and these seconds: what was done of it would be lost, and costs are known no better than that.
LATE, LATE_SECONDS = 0.06, 0.005
# A task gets more ranks if fewer would leave less than this share of the seconds until its deadline: calls take longer
# than expected now and then.
MARGIN = 0.03
# A request without a deadline, or with one that was missed, goes before those with deadlines when it has waited for so
# many times of what it takes alone, and for so many seconds.
PATIENCE, LEAST_PATIENCE = 12.0, 5.0


@dataclass(frozen=True)
class Task:
    """A request as the scheduler sees it.

    Attributes:
        id: of the task.
        kind: what its steps cost.
        steps: denoising steps that are left.
        begun: its text has been encoded.
        arrived: seconds, on the clock of ``now``.
        total: steps in all.
        deadline: on the same clock; None: it is patient.
        owner: name of the client that it belongs to; weight: of that owner's share.
        priority: among the tasks of its owner higher ones go first.
        narrow: its next call belongs to one rank (text encoder, autoencoder).
        single: it is never shared by several ranks.
        form: the steps of tasks with equal forms can be joined; None: they cannot. Before its steps a task makes its
            own calls in the run that it has joined.
    """

    id: str
    kind: Kind
    steps: int
    begun: bool = False
    arrived: float = 0.0
    total: int = 0
    deadline: float | None = None
    owner: str = ""
    weight: float = 1.0
    priority: int = 0
    narrow: bool = False
    single: bool = False
    form: object = None


@dataclass(frozen=True)
class Run:
    """The next calls of neighbouring ranks.

    Attributes:
        first, mode: of the ranks.
        tasks: by id; several: their calls run as one.
        calls: so many calls of each task; 0: one rank goes on until ``seconds`` are over.
        seconds: that it is expected to take.
        open: it goes on after that, until one of its tasks is done or `Scheduler.recall` ends it.
    """

    first: int
    mode: Mode
    tasks: tuple[str, ...]
    calls: int
    seconds: float
    open: bool = False

    @property
    def ranks(self) -> range:
        """The ranks."""
        return range(self.first, self.first + self.mode.ranks)


@dataclass
class _Placed:
    """A task with its ranks while a decision is made."""

    mode: Mode
    batch: list[Task]
    first: int = 0

    @property
    def task(self) -> Task:
        return self.batch[0]

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.mode.ranks)


@dataclass
class Scheduler:
    """Decides what ranks do.

    Args:
        ranks: of the pool.
        modes: by model, in which calls may be shared; of others: one rank.
        together: most requests in a call.

    Attributes:
        used: seconds of ranks that owners have had, by their weights.
    """

    ranks: int
    modes: Mapping[str, Sequence[Mode]] = field(default_factory=dict)
    together: int = 8
    quantum: float = QUANTUM
    used: dict[str, float] = field(default_factory=dict)
    # The first of the ranks that a task was meant to have when the last decision was made.
    _meant: dict[str, int] = field(default_factory=dict, repr=False)
    # Answers of `_best`, and the costs that they are of.
    _memo: dict[Any, dict[int, tuple[float, Mode]]] = field(default_factory=dict, repr=False)
    _version: tuple[StepCosts | None, int] = field(default=(None, -1), repr=False)

    def charge(self, owner: str, seconds: float, weight: float = 1.0) -> None:
        """Record the time of ranks that an owner has had."""
        self.used[owner] = self.used.get(owner, 0.0) + seconds / weight

    # ---- the time that is left

    def left(self, costs: StepCosts, task: Task, mode: Mode = ALONE, together: int = 1) -> float:
        """Seconds until a task is done on the ranks of a mode."""
        calls = costs.calls_of(task.kind, task.steps)
        before = 0.0 if task.begun else costs.part(task.kind, BEFORE)
        return before + calls * costs.call(task.kind, mode, together) + costs.part(task.kind, AFTER)

    def _modes(self, task: Task) -> Sequence[Mode]:
        return (ALONE,) if task.narrow or task.single or not task.steps else self.modes.get(task.kind.model, (ALONE,))

    def _best(self, costs: StepCosts, task: Task) -> dict[int, tuple[float, Mode]]:
        """By number of ranks the seconds that are left and the mode, only where more ranks are faster."""
        modes = tuple(self._modes(task))
        key = task.kind, task.steps, task.begun, modes
        known, version = self._version
        # Not by its number, which another one has when it is gone.
        if known is not costs or version != costs.version or len(self._memo) > 10_000:
            self._memo.clear()
            self._version = costs, costs.version
        if key not in self._memo:
            self._memo[key] = self._faster(costs, task, modes)
        return self._memo[key]

    def _faster(self, costs: StepCosts, task: Task, modes: Sequence[Mode]) -> dict[int, tuple[float, Mode]]:
        found: dict[int, tuple[float, Mode]] = {}
        for mode in modes:
            seconds = self.left(costs, task, mode)
            if mode.ranks not in found or seconds < found[mode.ranks][0]:
                found[mode.ranks] = seconds, mode
        least = float("inf")
        for ranks in sorted(found):
            if found[ranks][0] * WIDER > least:
                del found[ranks]
            else:
                least = found[ranks][0]
        return found

    # ---- the order

    def in_time(
        self, costs: StepCosts, now: float, tasks: Sequence[Task], free: Sequence[float] = ()
    ) -> tuple[list[tuple[Task, Mode]], dict[str, float]]:
        """The tasks with deadlines that are planned to be in time, by deadline, with the fewest ranks for it.

        Args:
            costs: of calls.
            now: seconds.
            tasks: with deadlines.
            free: seconds from now on at which ranks are free; default: now.

        Returns:
            The tasks, and for each of them the seconds from now to its end, by id.
        """
        waiting = sorted(tasks, key=lambda task: (task.deadline or 0.0, task.arrived, task.id))
        best = {task.id: self._best(costs, task) for task in waiting}
        fastest = {id: min(seconds for seconds, _ in found.values()) for id, found in best.items()}
        within = {task.id: self._within(now, task, fastest[task.id]) for task in waiting}
        # Those that could not be in time alone are left out at once.
        waiting = [task for task in waiting if fastest[task.id] <= within[task.id]]
        dropped: set[str] = set()
        while True:
            heap = list(free) or [0.0] * self.ranks
            heapify(heap)
            chosen: list[tuple[Task, Mode]] = []
            ends: dict[str, float] = {}
            late: Task | None = None
            for task in waiting:
                if task.id in dropped:
                    continue
                place = self._place(heap, best[task.id], (task.deadline or now) - now, within[task.id])
                if place is None:
                    late = task
                    break
                chosen.append((task, place[0]))
                ends[task.id] = place[1]
            if late is None:
                return chosen, ends

            # The one that takes most is left out.
            def work(task: Task) -> float:
                return min(ranks * seconds for ranks, (seconds, _) in best[task.id].items())

            dropped.add(max([*(task for task, _ in chosen), late], key=lambda task: (work(task), task.id)).id)

    @staticmethod
    def _within(now: float, task: Task, left: float) -> float:
        """Seconds from now in which a task is to be done to count as in time; ``left``: that it takes."""
        return (task.deadline or now) - now + (LATE * left + LATE_SECONDS if task.begun else 0.0)

    @staticmethod
    def _place(
        heap: list[float], best: Mapping[int, tuple[float, Mode]], until: float, within: float
    ) -> tuple[Mode, float] | None:
        """Put a task onto the ranks that are free first.

        Args:
            heap: seconds at which each rank is free; updated.
            best: by number of ranks, the seconds of the task and the mode.
            until: the seconds to its deadline; it gets the fewest ranks that end before that with a margin.
            within: the seconds in which it counts as in time, if none do: the ranks that end first.

        Returns:
            The mode and the end; None: it is late on any number.
        """
        free = [heappop(heap) for _ in range(max(best))]
        ends = {ranks: free[ranks - 1] + seconds for ranks, (seconds, _) in best.items()}
        early = [ranks for ranks, end in ends.items() if end <= (1 - MARGIN) * until]
        chosen = min(early) if early else min(ends, key=lambda ranks: (ends[ranks], ranks))
        fits = ends[chosen] <= within
        for place, one in enumerate(free):
            heappush(heap, ends[chosen] if fits and place < chosen else one)
        return (best[chosen][1], ends[chosen]) if fits else None

    def order(
        self, costs: StepCosts, now: float, tasks: Sequence[Task], wait: Sequence[float] = ()
    ) -> list[tuple[Task, Mode]]:
        """The tasks in the order in which they get ranks, each with the mode that its deadline needs."""
        return self._ordered(costs, now, tasks, self._due(costs, now, tasks, wait))

    def _due(
        self, costs: StepCosts, now: float, tasks: Sequence[Task], wait: Sequence[float]
    ) -> list[tuple[Task, Mode]]:
        """Of all tasks those that are planned to be in time, as `in_time`."""
        return self.in_time(costs, now, [task for task in tasks if task.deadline is not None], wait)[0]

    def _ordered(
        self, costs: StepCosts, now: float, tasks: Sequence[Task], chosen: Sequence[tuple[Task, Mode]]
    ) -> list[tuple[Task, Mode]]:
        needed = {task.id: mode for task, mode in chosen}
        place = {task.id: number for number, (task, _) in enumerate(chosen)}
        least = min((self.used.get(task.owner, 0.0) for task in tasks), default=0.0)

        def key(task: Task) -> tuple[bool, int, float, float, float, str]:
            used = self.used.get(task.owner, 0.0)
            ahead = used - least > BURST
            alone = max(costs.request(task.kind, task.total or task.steps), 1e-6)
            waited = max(0.0, now - task.arrived)
            if task.id in place:
                return ahead, 1, place[task.id], 0.0, task.arrived, task.id
            if waited > max(PATIENCE * alone, LEAST_PATIENCE):
                return ahead, 0, task.arrived, 0.0, task.arrived, task.id
            ratio = (waited + alone) / max(self.left(costs, task), 1e-6)
            return ahead, 2, used // BURST, -ratio, task.arrived, task.id

        ordered = sorted(tasks, key=key)
        missed = {task.id for task in ordered if task.deadline is not None and task.id not in place}

        # Of an owner's tasks that have missed a deadline, the oldest goes first: by the response ratio long ones would
        # be left to the end of a rush, with nothing to fill the other ranks.
        def age(task: Task) -> tuple[float, str]:
            return (task.arrived, task.id) if task.id in missed else (0.0, "")

        ordered = _sorted_in_places(ordered, lambda task: (task.owner, task.id in missed), age)
        ordered = _sorted_in_places(ordered, lambda task: task.owner, lambda task: -task.priority)
        return [(task, needed.get(task.id, ALONE)) for task in ordered]

    # ---- the decision

    def decide(
        self,
        costs: StepCosts,
        now: float,
        tasks: Sequence[Task],
        running: Sequence[Run] = (),
        free: Sequence[float] = (),
    ) -> list[Run]:
        """The runs that begin now, on ranks that are free.

        Args:
            costs: of calls.
            now: seconds, on the clock of the tasks' deadlines.
            tasks: that are not done, with those that run: of these the steps that are left when their run ends.
            running: what ranks do; the others are free.
            free: seconds of ``now``'s clock at which each rank is expected to be free; default: now, and in a quantum.
        """
        busy = {rank: run for run in running for rank in run.ranks}
        at = list(free) or [now + self.quantum * (rank in busy) for rank in range(self.ranks)]
        wait = [max(0.0, at[rank] - now) if rank in busy else 0.0 for rank in range(self.ranks)]
        if not tasks or len(busy) == self.ranks:
            return []
        chosen = self._due(costs, now, tasks, wait)
        runs_of = {id: run for run in running for id in run.tasks}
        self._forget_others(tasks)
        joining = _Joining(self, costs, now, {task.id for task, _ in chosen}, tasks)
        ordered = self._ordered(costs, now, tasks, chosen)
        placed, waiting, free_ranks = self._allocate(ordered, runs_of, joining)
        self._widen(costs, placed, free_ranks)
        self._lay_out(placed, runs_of, wait)
        begun: list[Run] = []
        taken: set[int] = set(busy)
        for one in placed:
            startable = [task for task in waiting if task.id not in runs_of]
            if one.first >= 0 and one.task.id not in runs_of and not taken.intersection(one.ranks):
                joined = joining.join(one, startable, self._meant)
                waiting = [task for task in waiting if task.id not in joined]
                begun.append(self._run(costs, one))
                taken.update(one.ranks)
        return begun + self._backfill(costs, placed, waiting, runs_of, taken, wait)

    def recall(
        self,
        costs: StepCosts,
        now: float,
        tasks: Sequence[Task],
        running: Sequence[Run],
        able: Collection[int],
        free: Sequence[float] = (),
    ) -> list[int]:
        """The runs that are to end after their present call, since their ranks would be given something else now.

        Args:
            costs, now, tasks, running, free: as of `decide`.
            able: places in ``running`` of those that can end before their time.

        Returns:
            Places in ``running``.
        """
        at_work = {id for run in running for id in run.tasks}
        busy = sum(run.mode.ranks for run in running)
        if not able or (busy == self.ranks and all(task.id in at_work for task in tasks)):
            return []
        others = [run for place, run in enumerate(running) if place not in able]
        planned = self.decide(costs, now, tasks, others, free)
        same = {frozenset(run.tasks) for run in planned if run.mode.ranks == 1}
        return [place for place in able if frozenset(running[place].tasks) not in same]

    def _allocate(
        self, ordered: Sequence[tuple[Task, Mode]], runs_of: Mapping[str, Run], joining: _Joining
    ) -> tuple[list[_Placed], list[Task], int]:
        """The tasks that get ranks, the tasks that wait, and the number of ranks that are left."""
        groups: list[_Placed] = []
        # Where there are ranks for all, none of them is shared.
        crowded = len(ordered) > self.ranks
        for task, mode in ordered:
            run = runs_of.get(task.id)
            if run is not None and any(runs_of.get(one.task.id) is run for one in groups):
                # It runs in the calls of another task, and needs no rank of its own.
                continue
            if not (crowded and run is None and mode == ALONE and joining.merge(task, groups, runs_of, self._meant)):
                groups.append(_Placed(mode, [task]))
        if crowded:
            self._spread(groups)
        placed: list[_Placed] = []
        waiting: list[Task] = []
        free = self.ranks
        for one in groups:
            if one.mode.ranks <= free:
                placed.append(one)
                free -= one.mode.ranks
            else:
                waiting += one.batch
        return placed, waiting, free

    def _spread(self, groups: list[_Placed]) -> None:
        """Halve the largest batches until there is one for each rank: no rank is idle for the sake of a batch."""
        while sum(one.mode.ranks for one in groups) < self.ranks:
            largest = max(groups, key=lambda one: len(one.batch))
            kept = (len(largest.batch) + 1) // 2
            if kept == len(largest.batch):
                return
            groups.append(_Placed(ALONE, largest.batch[kept:]))
            del largest.batch[kept:]

    def _widen(self, costs: StepCosts, placed: Sequence[_Placed], free: int) -> None:
        """Give ranks without work to the tasks that gain most by them."""
        steps: list[tuple[float, int, int, Mode]] = []

        def offer(number: int) -> None:
            """Put the next wider mode of a task, with its gain for each rank, onto the heap."""
            one = placed[number]
            best, now = self._best(costs, one.task), one.mode.ranks
            seconds = best[now][0] if now in best else self.left(costs, one.task, one.mode)
            for ranks, (wider, mode) in best.items():
                if ranks > now and wider * WIDER <= seconds:
                    heappush(steps, (-(seconds - wider) / seconds / (ranks - now), number, ranks - now, mode))
                    return

        for number in range(len(placed) if free else 0):
            offer(number)
        while free and steps:
            _, number, more, mode = heappop(steps)
            if more <= free:
                free -= more
                placed[number].mode = mode
                offer(number)

    def _forget_others(self, tasks: Sequence[Task]) -> None:
        """Keep which ranks tasks were meant to have while there are the tasks.

        One that waits for others goes back to its ranks: elsewhere it would be prepared once more.
        """
        self._meant = {task.id: self._meant[task.id] for task in tasks if task.id in self._meant}

    def _lay_out(self, placed: list[_Placed], runs_of: Mapping[str, Run], wait: Sequence[float]) -> None:
        """Give every task its ranks: those that it has or was meant to have before, else those that are free first.

        The widest first: sizes divide one another, so that blocks that begin at multiples of their size fit together.
        """
        placed.sort(key=lambda one: -one.mode.ranks)
        open_ = set(range(self.ranks))
        later: list[_Placed] = []

        def settle(one: _Placed) -> None:
            open_.difference_update(one.ranks)
            self._meant.update((task.id, one.first) for task in one.batch)

        for one in placed:
            run = runs_of.get(one.task.id)
            # What runs stays where it is if it is as wide as it should be.
            if run is not None and run.mode.ranks == one.mode.ranks and open_.issuperset(run.ranks):
                one.first = run.first
                settle(one)
            else:
                later.append(one)
        # Before them, what is due and can begin now: a block that is free is not given to a call that could also wait.
        later.sort(key=lambda one: one.task.deadline is None or one.task.id in runs_of)
        for one in later:
            size, run = one.mode.ranks, runs_of.get(one.task.id)
            before = run.first if run is not None else self._meant.get(one.task.id, -1)
            blocks = [first for first in range(0, self.ranks, size) if open_.issuperset(range(first, first + size))]
            if not blocks:
                # Something that runs lies across every block: it is tried again when that has ended.
                one.first = -self.ranks
                continue
            one.first = min(
                blocks,
                key=lambda first: (
                    max(wait[first : first + size]) - (self.quantum / 2 if first <= before < first + size else 0.0),
                    _room(open_, first, size, self.ranks),
                    first,
                ),
            )
            settle(one)

    def call(self, costs: StepCosts, mode: Mode, batch: Sequence[Task]) -> float:
        """Seconds of the next call of some tasks."""
        first = batch[0]
        if first.narrow or not first.steps:
            return costs.part(first.kind, BEFORE if first.steps else AFTER)
        return costs.call(first.kind, mode, len(batch))

    def _run(self, costs: StepCosts, one: _Placed) -> Run:
        call = max(self.call(costs, one.mode, one.batch), 1e-6)
        ids = tuple(task.id for task in one.batch)
        if one.mode.ranks == 1:
            return Run(one.first, one.mode, ids, 0, max(self.quantum, call), open=True)
        most = min(costs.calls_of(task.kind, task.steps) for task in one.batch)
        calls = max(1, min(most, int(self.quantum / call)))
        return Run(one.first, one.mode, ids, calls, calls * call)

    def _backfill(
        self,
        costs: StepCosts,
        placed: Sequence[_Placed],
        waiting: Sequence[Task],
        runs_of: Mapping[str, Run],
        taken: set[int],
        wait: Sequence[float],
    ) -> list[Run]:
        """Let ranks that are kept for a task until others are free do a call of another one, if it is short enough."""
        begun: list[Run] = []
        others = [task for task in waiting if task.id not in runs_of]
        for one in placed:
            until = max((wait[rank] for rank in one.ranks if rank >= 0), default=0.0)
            for rank in one.ranks:
                if rank < 0 or rank in taken:
                    continue
                for task in others:
                    call = self.call(costs, ALONE, [task])
                    if call <= until:
                        begun.append(Run(rank, ALONE, (task.id,), 0, min(until, max(call, self.quantum))))
                        others.remove(task)
                        taken.add(rank)
                        break
        return begun


@dataclass
class _Joining:
    """Which tasks run in the calls of one that has ranks, in one decision.

    Args:
        scheduler: that decides.
        costs: of calls.
        now: seconds.
        due: ids of the tasks that are planned to be in time.
        tasks: all.
    """

    scheduler: Scheduler
    costs: StepCosts
    now: float
    due: set[str]
    tasks: Sequence[Task]

    @cached_property
    def longest(self) -> float:
        """Seconds that a call of several requests may take."""
        if all(task.deadline is None for task in self.tasks):
            return inf
        lengths = {(task.kind, task.total or task.steps) for task in self.tasks}
        shortest = min(self.costs.request(kind, steps) for kind, steps in lengths)
        return max(BLOCKED * shortest, *(self.costs.call(kind) for kind, _ in lengths))

    @cached_property
    def many_late(self) -> bool:
        """True if so many tasks are late that it matters more what a call saves than how long it takes."""
        return sum(task.id not in self.due for task in self.tasks) >= LINE * self.scheduler.ranks

    def merge(
        self, task: Task, groups: Sequence[_Placed], runs_of: Mapping[str, Run], meant: Mapping[str, int]
    ) -> bool:
        """Let a task run in the calls of an earlier one, both due or both late, instead of taking a rank as well.

        Args:
            task: that does not run.
            groups: earlier tasks, and those that run in their calls.
            runs_of: of tasks that run.
            meant: by id, the rank that a task has been on.

        Returns:
            True if it does.
        """
        for one in groups:
            first = one.task
            # Most are of another form, and there are many.
            if first.form != task.form:
                continue
            alike = one.mode == ALONE and first.id not in runs_of and (first.id in self.due) == (task.id in self.due)
            # Elsewhere it would be prepared once more.
            there = not task.begun or meant.get(task.id) == meant.get(first.id)
            if alike and there and self._fits(one, task, ()):
                one.batch.append(task)
                return True
        return False

    def join(self, one: _Placed, waiting: Sequence[Task], meant: dict[str, int]) -> set[str]:
        """Let tasks that have no ranks run in the calls of one that has, where that saves time; returns their ids.

        Args:
            one: with ranks.
            waiting: without.
            meant: by id, the rank that a task has been on; taken over for those that join.
        """
        joined = set[str]()
        for task in waiting if one.mode == ALONE else ():
            there = not task.begun or meant.get(task.id, one.first) == one.first
            if there and self._fits(one, task, waiting):
                one.batch.append(task)
                joined.add(task.id)
                meant[task.id] = one.first
        return joined

    def _fits(self, one: _Placed, task: Task, waiting: Sequence[Task]) -> bool:
        """True if one more task in a batch saves time, and makes none late that is planned to be in time."""
        first, rows = one.task, len(one.batch) + 1
        if first.form is None or task.form != first.form or not first.steps or not task.steps:
            return False
        if task.id not in self.due and self.longest < inf and not self.many_late:
            return False
        most = inf if self.many_late else self.longest
        return (
            rows <= self.scheduler.together
            and self._worth(first.kind, rows, most)
            and self._in_time(one, task, waiting)
        )

    def _worth(self, kind: Kind, rows: int, most: float) -> bool:
        seconds = self.costs.call(kind, ALONE, rows)
        return seconds < WORTH * rows * self.costs.call(kind) and seconds <= most

    def _in_time(self, one: _Placed, further: Task, waiting: Sequence[Task]) -> bool:
        """Whether what is planned to be in time still is if one more task runs in a batch."""
        if one.task.id in self.due and further.id not in self.due and any(task.id in self.due for task in waiting):
            # Those that are due wait for this rank.
            return False
        rows = len(one.batch) + 1
        return all(
            task.deadline is None
            or task.id not in self.due
            or self.scheduler.left(self.costs, task, ALONE, rows) <= task.deadline - self.now
            for task in (*one.batch, further)
        )


def _sorted_in_places(
    tasks: Sequence[Task], group: Callable[[Task], Hashable], key: Callable[[Task], Any]
) -> list[Task]:
    """Sort the tasks of each group, stably, within the places that the group has."""
    groups: dict[Hashable, list[Task]] = {}
    for task in tasks:
        groups.setdefault(group(task), []).append(task)
    nexts = {name: iter(sorted(line, key=key)) for name, line in groups.items()}
    return [next(nexts[group(task)]) for task in tasks]


def _room(open_: set[int], first: int, size: int, ranks: int) -> int:
    """Open ranks in the next larger block around one: a block with fewer is taken first, so that others stay whole."""
    around = 2 * size * (first // (2 * size)) if 2 * size <= ranks else first
    return sum(rank in open_ for rank in range(around, around + 2 * size))


# ---- admission


@dataclass(frozen=True)
class Forecast:
    """The forecast for a request that is not accepted yet.

    Attributes:
        seconds: from now to its end, after the tasks that are accepted and due before it.
        alone: with all ranks for itself.
    """

    seconds: float
    alone: float


def forecast(
    scheduler: Scheduler, costs: StepCosts, now: float, tasks: Sequence[Task], wish: Sequence[Task]
) -> Forecast:
    """The time at which a request would be done if it were accepted, and made no accepted task with a deadline late.

    Args:
        scheduler: of the pool.
        costs: of calls.
        now: seconds.
        tasks: that are accepted and not done.
        wish: the pictures of the request, with equal deadlines.
    """
    alone = max(min(seconds for seconds, _ in scheduler._best(costs, one).values()) for one in wish)
    due = [task for task in tasks if task.deadline is not None]
    before, _ = scheduler.in_time(costs, now, due)
    kept = [task for task, _ in before]

    def possible(seconds: float) -> bool:
        given = [_due(one, now + seconds) for one in wish]
        _, ends = scheduler.in_time(costs, now, [*kept, *given])
        return all(task.id in ends for task in (*kept, *given))

    low = high = alone + 1e-6
    for _ in range(24):
        if possible(high):
            break
        low, high = high, 1.5 * high
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return Forecast(high, alone)


def _due(task: Task, deadline: float) -> Task:
    return replace(task, deadline=deadline)
