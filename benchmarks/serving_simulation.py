"""A server in simulated time: the scheduler, or a fixed configuration, serves requests whose costs are known.

The adaptive server decides with `ditmesh.serve.schedule.core.Scheduler`, the code of the ranks. The fixed one follows
the rules of `ditmesh.serve.worker.worker.TaskScheduler`: replicas that take the oldest request first, and run a call of
each group of like requests in turn. A simulation leaves out what the machine adds: messages between processes, and
noise other than that of ``costs``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ditmesh.serve.schedule.core import Run, Scheduler, Task
from ditmesh.serve.schedule.costs import AFTER, ALONE, BEFORE, Kind, Mode, StepCosts

# Seconds from the end of a run to the beginning of the next one on the same ranks.
MEETING = 0.001


@dataclass(frozen=True)
class Wish:
    """A request of a trace.

    Attributes:
        arrives: seconds.
        kind, steps: what is asked for.
        within: seconds from then on in which it is to be done; None: it is patient.
    """

    arrives: float
    kind: Kind
    steps: int
    within: float | None = None
    owner: str = ""


@dataclass
class _Request:
    wish: Wish
    number: int
    begun: bool = False
    steps: int = 0
    done: float | None = None

    def __post_init__(self) -> None:
        self.steps = self.wish.steps

    @property
    def id(self) -> str:
        return f"{self.number:06d}"

    @property
    def stage(self) -> str:
        return "step" if self.begun and self.steps else AFTER if self.begun else BEFORE


@dataclass(frozen=True)
class ServedTrace:
    """What has become of a trace.

    Attributes:
        seconds: of every request from its arrival to its end, in the order of the trace.
        met: the share of requests that were done in time.
        makespan: seconds until all were done.
        wide: share of the ranks' busy time in calls that several ranks shared.
    """

    seconds: tuple[float, ...]
    met: float
    makespan: float
    wide: float = 0.0

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return len(self.seconds) / self.makespan


@dataclass
class World:
    """True costs: seconds of calls and of the parts around the steps."""

    call: Callable[[Kind, Mode, int], float]
    part: Callable[[Kind, str], float]

    def alone(self, wish: Wish, mode: Mode = ALONE) -> float:
        """Seconds of a request on the ranks of a mode."""
        kind = wish.kind
        return self.part(kind, BEFORE) + wish.steps * self.call(kind, mode, 1) + self.part(kind, AFTER)


def trace(
    kinds: Sequence[tuple[float, Kind, int]],
    load: float,
    ranks: int,
    requests: int,
    world: World,
    seed: int = 0,
    factor: float | None = 1.5,
    bursts: int = 1,
    modes: Sequence[Mode] = (ALONE,),
) -> list[Wish]:
    """Requests that arrive as a Poisson process.

    Args:
        kinds: weight, kind and steps of each sort of request.
        load: share of the capacity: the requests per second of all ranks if each made one request after the other.
        ranks: of the server.
        requests: how many.
        world: true costs.
        seed: of the draws.
        factor: each request is to be done within so many times what it takes alone; None: patient.
        modes: alone, the fastest of these.
        bursts: so many arrive at a time, at so many times longer intervals.
    """
    draw = random.Random(seed)
    weights = [weight for weight, _, _ in kinds]
    chosen = [Wish(0.0, kind, steps) for _, kind, steps in draw.choices(kinds, weights, k=requests)]
    mean = sum(w * world.alone(Wish(0.0, kind, steps)) for w, kind, steps in kinds) / sum(weights)
    found, now = [], 0.0
    for number, wish in enumerate(chosen):
        if number % bursts == 0:
            now += draw.expovariate(load * ranks / mean / bursts)
        within = None if factor is None else factor * min(world.alone(wish, mode) for mode in modes)
        found.append(Wish(now, wish.kind, wish.steps, within))
    return found


def _outcome(requests: Sequence[_Request], busy: float, wide: float) -> ServedTrace:
    ends = [one.done or 0.0 for one in requests]
    seconds = tuple(end - one.wish.arrives for end, one in zip(ends, requests, strict=True))
    met = [one.wish.within is None or took <= one.wish.within for took, one in zip(seconds, requests, strict=True)]
    start = requests[0].wish.arrives
    return ServedTrace(seconds, sum(met) / len(met), max(ends) - start, wide / busy if busy else 0.0)


@dataclass
class _Adaptive:
    world: World
    scheduler: Scheduler
    costs: StepCosts
    draw: random.Random
    noise: float
    wide: float = 0.0
    busy: float = 0.0
    live: dict[str, _Request] = field(default_factory=dict)
    running: list[tuple[float, Run]] = field(default_factory=list)

    def seconds(self, kind: Kind, mode: Mode, together: int) -> float:
        """Of a call, measured."""
        took = self.world.call(kind, mode, together) * self.draw.uniform(1, 1 + self.noise)
        self.costs.add(kind, mode, together, took)
        return took

    def task(self, one: _Request) -> Task:
        wish = one.wish
        due = None if wish.within is None else wish.arrives + wish.within
        return Task(
            one.id, wish.kind, one.steps, one.begun, wish.arrives, wish.steps, due, wish.owner,
            narrow=one.stage != "step", form=None if one.stage == AFTER else wish.kind,
        )  # fmt: skip

    def advance(self, now: float, coming: float | None) -> float:
        """Begin what can begin; the time at which something happens next.

        Args:
            now: seconds.
            coming: when the next request arrives; None: none does.
        """
        for _, run in [item for item in self.running if item[0] <= now]:
            for id in run.tasks:
                if self.live[id].done is not None:
                    del self.live[id]
        self.running = [item for item in self.running if item[0] > now]
        tasks, free = [self.task(request) for request in self.live.values()], [now] * self.scheduler.ranks
        for end, run in self.running:
            for rank in run.ranks:
                free[rank] = end
        for run in self.scheduler.decide(self.costs, now, tasks, [run for _, run in self.running], free):
            owner = self.live[run.tasks[0]].wish.owner
            spent = self.run(run, now)
            self.scheduler.charge(owner, spent * run.mode.ranks)
            self.running.append((now + spent + MEETING, run))
        events = [end for end, _ in self.running] + ([] if coming is None else [coming])
        return min(events, default=now)

    def run(self, run: Run, now: float) -> float:
        """Simulate a run; the seconds that it takes."""
        spent, calls = 0.0, 0
        requests = [self.live[id] for id in run.tasks]
        while requests and (calls < run.calls if run.calls else spent < run.seconds * 0.99):
            calls += 1
            # Before its steps, a request makes its own calls in the run that it has joined.
            one = next((one for one in requests if one.stage != "step"), None)
            if one is None:
                spent += self.seconds(requests[0].wish.kind, run.mode, len(requests))
                for one in requests:
                    one.steps -= 1
                if run.mode.ranks > 1:
                    # Other calls belong to one rank.
                    requests = [one for one in requests if one.steps]
            else:
                stage = one.stage
                took = self.world.part(one.wish.kind, stage)
                self.costs.add_part(one.wish.kind, stage, took)
                spent += took
                one.begun = True
                if stage == AFTER:
                    one.done = now + spent
                    requests.remove(one)
        self.busy += spent * run.mode.ranks
        self.wide += spent * run.mode.ranks if run.mode.ranks > 1 else 0.0
        return spent


def adaptive(
    wishes: Sequence[Wish], world: World, scheduler: Scheduler, costs: StepCosts | None = None, noise: float = 0.05
) -> ServedTrace:
    """Serve a trace with the scheduler.

    Args:
        wishes: in the order in which they arrive.
        world: true costs.
        scheduler: of the ranks.
        costs: what is known at the beginning; default: nothing.
        noise: a call takes up to so much longer, relative.
    """
    one = _Adaptive(world, scheduler, costs or StepCosts(), random.Random(0), noise)
    requests = [_Request(wish, number) for number, wish in enumerate(wishes)]
    coming, now = deque(requests), 0.0
    while coming or one.live:
        while coming and coming[0].wish.arrives <= now:
            request = coming.popleft()
            one.live[request.id] = request
        now = one.advance(now, coming[0].wish.arrives if coming else None)
    return _outcome(requests, one.busy, one.wide)


def fixed(wishes: Sequence[Wish], world: World, ranks: int, mode: Mode, together: int = 8) -> ServedTrace:
    """Serve a trace with replicas of one configuration.

    Args:
        wishes: in the order in which they arrive.
        world: true costs.
        ranks: of all replicas.
        mode: of each replica.
        together: requests that a replica runs at a time; 1: one after the other.
    """
    requests = [_Request(wish, number) for number, wish in enumerate(wishes)]
    replicas: list[tuple[float, list[_Request]]] = [(0.0, []) for _ in range(ranks // mode.ranks)]
    coming: deque[_Request] = deque(requests)
    queue: deque[_Request] = deque()
    busy = 0.0
    while coming or queue or any(running for _, running in replicas):
        # The replica that comes first to the end of its round; an idle one when something comes.
        number = min(range(len(replicas)), key=lambda n: (replicas[n][0], len(replicas[n][1]), n))
        now, running = replicas[number]
        while coming and coming[0].wish.arrives <= now:
            queue.append(coming.popleft())
        _take(running, queue, [one for _, one in replicas], together)
        if not running:
            nexts = [coming[0].wish.arrives] if coming else []
            nexts += [at for at, one in replicas if one and at > now]
            replicas[number] = (min(nexts), running) if nexts else (now + MEETING, running)
            continue
        spent = _fixed_round(running, world, mode, now)
        busy += spent * mode.ranks
        replicas[number] = now + spent + MEETING, [one for one in running if one.done is None]
    return _outcome(requests, busy, busy if mode.ranks > 1 else 0.0)


def _take(running: list[_Request], queue: deque[_Request], everyone: Sequence[list[_Request]], together: int) -> None:
    """Give a replica requests, as the dispatcher does: each to the one with the fewest."""
    while queue and len(running) < min(together, min(len(one) for one in everyone) + 1):
        running.append(queue.popleft())


def _fixed_round(running: Sequence[_Request], world: World, mode: Mode, now: float) -> float:
    """A step of every request, and one other call beside it, as `Batcher.round` does."""
    other = next((one for one in running if one.stage != "step"), None)
    if other is not None:
        stage, spent = other.stage, world.part(other.wish.kind, other.stage)
        other.begun = True
        if stage == AFTER:
            other.done = now + spent
        if all(one.stage != "step" for one in running if one.done is None):
            return spent
    else:
        spent = 0.0
    groups: dict[Kind, list[_Request]] = {}
    for one in running:
        if one.done is None and one.stage == "step":
            groups.setdefault(one.wish.kind, []).append(one)
    for kind, group in groups.items():
        spent += world.call(kind, mode, len(group))
        for one in group:
            one.steps -= 1
    return spent
