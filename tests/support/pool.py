"""A pool of ranks whose schedule is drawn at random, and what one rank draws by itself."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from ditmesh import zoo
from ditmesh.config import ParallelConfig
from ditmesh.launch import RankPool
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.schedule.core import Run, Scheduler, Task
from ditmesh.serve.schedule.costs import ALONE, Mode, StepCosts
from ditmesh.serve.worker.adaptive import serve_pool
from ditmesh.serve.worker.protocol import Beat, Cancel, Cancelled, Finished, TaskFailed, TaskStepped
from support.batching import Owner, of, picture, task

PROMPTS = ["a red apple", "a green frog", "a yellow star", "a blue fish"]


def pool_spec(ranks: int, name: str = "emoji", model: str = "emoji-sd3", **config: Any) -> ModelSpec:
    return ModelSpec(name, str(zoo.path(model)), ParallelConfig(**config), pool=ranks)


@dataclass
class RandomScheduler(Scheduler):
    """Any ranks for any task, for a few calls; tasks wait at random, and run together at random.

    The first call that can be shared is shared by all ranks, so that no schedule is without such a call.
    """

    seed: int = 0
    draw: random.Random = field(init=False)
    shared: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def decide(
        self,
        costs: StepCosts,
        now: float,
        tasks: Sequence[Task],
        running: Sequence[Run] = (),
        free: Sequence[float] = (),
    ) -> list[Run]:
        busy = {rank for run in running for rank in run.ranks}
        at_work = {id for run in running for id in run.tasks}
        waiting = [one for one in tasks if one.id not in at_work]
        self.draw.shuffle(waiting)
        begun: list[Run] = []
        while waiting:
            one = waiting.pop()
            if (begun or busy) and self.draw.random() < 0.3:
                continue
            modes = [ALONE] if one.narrow or not one.steps else list(self.modes.get(one.kind.model, [ALONE]))
            self.draw.shuffle(modes)
            if not self.shared and (wide := [mode for mode in modes if mode.ranks == self.ranks > 1]):
                if busy:
                    continue
                modes, self.shared = wide, True
            for mode in modes:
                firsts = [
                    first
                    for first in range(0, self.ranks, mode.ranks)
                    if not busy.intersection(range(first, first + mode.ranks))
                ]
                if not firsts:
                    continue
                ids = [one.id]
                if mode == ALONE and one.form is not None and one.steps:
                    # Also such as have not begun: they make their own calls first.
                    same = [other for other in waiting if other.form == one.form and other.steps]
                    ids += [other.id for other in same if self.draw.random() < 0.5]
                waiting = [other for other in waiting if other.id not in ids]
                run = Run(self.draw.choice(firsts), mode, tuple(ids), self.draw.randint(1, 3), 1e-9)
                endless = self.shared and self.draw.random() < 0.5
                begun.append(run if mode.ranks > 1 else Run(run.first, mode, run.tasks, 0, 1e-9, endless))
                busy.update(run.ranks)
                break
        return begun

    def recall(
        self,
        costs: StepCosts,
        now: float,
        tasks: Sequence[Task],
        running: Sequence[Run],
        able: Collection[int],
        free: Sequence[float] = (),
    ) -> list[int]:
        return [place for place in able if self.draw.random() < 0.5]


@dataclass
class InTurn(Scheduler):
    """All ranks share every call of a transformer, and requests take turns by the call."""

    def decide(
        self,
        costs: StepCosts,
        now: float,
        tasks: Sequence[Task],
        running: Sequence[Run] = (),
        free: Sequence[float] = (),
    ) -> list[Run]:
        if running or not tasks:
            return []
        # All are to be at their steps before one takes its first.
        one = max(tasks, key=lambda task: (task.narrow, task.steps, task.id))
        mode = ALONE if one.narrow or not one.steps else Mode(1, self.ranks)
        return [Run(0, mode, (one.id,), 1 if mode.ranks > 1 else 0, 1e-9)]


@dataclass
class RandomSchedules(RandomScheduler):
    """A schedule after another, each drawn from a seed of its own: the number that the tasks' ids begin with."""

    def decide(
        self,
        costs: StepCosts,
        now: float,
        tasks: Sequence[Task],
        running: Sequence[Run] = (),
        free: Sequence[float] = (),
    ) -> list[Run]:
        seed = min(int(one.id.partition("/")[0]) for one in tasks)
        if seed != self.seed:
            self.seed, self.draw, self.shared = seed, random.Random(seed), False
        return super().decide(costs, now, tasks, running, free)


def serve_with(name: str, value: Any, specs: Any, *, report: Any, scheduler: Scheduler) -> None:
    """As `serve_pool`, with another value of a constant of the ranks' modules (``"conductor.BEAT"``)."""
    with mock.patch(f"ditmesh.serve.worker.{name}", value):
        serve_pool(specs, report=report, scheduler=scheduler)


def drawn_by_schedules(
    pool: RankPool, spec: ModelSpec, numbers: Sequence[int], seeds: Sequence[int], **more: Any
) -> tuple[dict[int, list[np.ndarray]], list[int]]:
    """As `drawn`, under one random schedule after the other, by ranks that load the model once.

    Returns:
        By the number of the schedule its pictures, and bytes that ranks had exchanged when it was over.
    """
    coming = iter(numbers)
    found: dict[int, list[np.ndarray]] = {}
    sent: list[int] = []
    left: list[Any] = []
    ended = exchanged = 0

    def begin(send: Any) -> None:
        nonlocal ended
        if (number := next(coming, None)) is not None:
            ended = 0
            starts = [task(f"{number}/{seed}", PROMPTS[seed % 4], seed=seed, **more) for seed in seeds]
            left[:] = [*starts, task(f"{number}/gone", PROMPTS[0], seed=99, **more)]
            send(left.pop(0))

    def script(message: Any, send: Any) -> None:
        nonlocal ended, exchanged
        if type(message).__name__ == "ModelReady":
            begin(send)
        elif isinstance(message, Beat):
            exchanged = sum(message.bytes.values())
        elif isinstance(message, TaskStepped) and message.step == 1:
            if left:
                send(left.pop(0))
            if message.id.endswith("gone"):
                send(Cancel(message.id))
        elif isinstance(message, (Finished, Cancelled, TaskFailed)):
            ended += 1
            if ended == len(seeds) + 1:
                number = int(message.id.partition("/")[0])
                found[number] = [picture(owner.said, f"{number}/{seed}") for seed in seeds]
                sent.append(exchanged)
                begin(send)

    owner = Owner(script, len(numbers) * (len(seeds) + 1))
    # The bytes that ranks have exchanged are told after every message, not four times a second.
    own = partial(serve_with, "conductor.BEAT", 0.0, scheduler=RandomSchedules(spec.pool, seed=-1))
    owner.serve(pool, [spec], own, deadline=1700.0)
    # A request may be done before the ranks read that it is cancelled.
    over = [one for one in of(owner.said, Finished) if one.id.endswith("gone")]
    assert len(of(owner.said, Cancelled)) + len(over) == len(numbers) > 2 * len(over)
    return found, sent


def drawn(pool: RankPool, spec: ModelSpec, scheduler: Scheduler, seeds: Sequence[int], **more: Any) -> list[Any]:
    """Pictures of these seeds, of which each is asked for when the one before has done a step; one more is cancelled.

    Returns:
        The messages of the ranks.
    """
    starts = [task(str(seed), PROMPTS[seed % 4], seed=seed, **more) for seed in seeds]
    starts.append(task("gone", PROMPTS[0], seed=99, **more))
    left = iter(starts)

    def script(message: Any, send: Any) -> None:
        if type(message).__name__ == "ModelReady":
            send(next(left))
        elif isinstance(message, TaskStepped) and message.step == 1:
            for one in [*[next(left, None)]]:
                if one is not None:
                    send(one)
            if message.id == "gone":
                send(Cancel("gone"))

    said = Owner(script, len(starts)).serve(pool, [spec], partial(serve_pool, scheduler=scheduler))
    assert len(of(said, Cancelled)) == 1
    return said


def pictures(said: Sequence[Any], seeds: Sequence[int]) -> list[np.ndarray]:
    return [picture(said, str(seed)) for seed in seeds]
