"""The conductor of a pool: a thread of rank 0 that knows what every rank does, and decides what comes next.

Ranks are told of decisions, and of one another's results, by one log of events that is the same for all of them. So
every rank knows every request at the same step, by its own copy of the pipeline's call, and any ranks can make the
next call of any request.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..offers import ModelSpec, request_kind, request_steps
from ..schedule.core import Run, Scheduler, Task
from ..schedule.costs import AFTER, ALONE, BEFORE, Kind, Mode, StepCosts
from ..types import RankState
from .protocol import Beat, Cancel, Load, ModelFailed, ModelReady, PictureTask, Start, Stop, TaskStepped
from .rendezvous import FailureReason
from .wire import (
    Answers,
    Assigned,
    Channel,
    Ending,
    Failing,
    Joined,
    Left,
    Loading,
    Recall,
    Relayed,
    Renewing,
    RunDone,
    TaskAfter,
)

# Seconds between heartbeats of ranks without work, and between two tables of costs for the owner; and after which runs
# without an end are looked at again, if nothing has happened. Between two heartbeats of ranks at work.
HEARTBEAT, TOLD, LOOK, BEAT = 1.0, 2.0, 0.2, 0.25


@dataclass(eq=False)
class Live:
    """A task in the pool.

    Attributes:
        after: what is known of it since its latest run.
        before: seconds of calls before its first step.
        calls: of transformers; late: seconds of calls after its last step.
        alone: it is not to be shared by several ranks any more.
        run: number of the run that it takes part in; step: that it has reached there.
    """

    task: PictureTask
    kind: Kind
    arrived: float
    deadline: float | None
    after: TaskAfter
    before: float = 0.0
    calls: int = 0
    late: float = 0.0
    alone: bool = False
    run: int | None = None
    step: int = 0


@dataclass(eq=False)
class Going:
    """A run that ranks are at.

    Attributes:
        until: seconds of the clock at which it is expected to be over.
        waiting: ranks that have not reported.
        charged: seconds of the clock until which its owners have been charged.
        recalled: it was told to end.
        done: their reports.
    """

    run: Run
    model: str
    until: float
    waiting: set[int]
    charged: float
    recalled: bool = False
    done: list[RunDone] = field(default_factory=list)

    @property
    def endless(self) -> bool:
        """True if it continues until it is recalled."""
        return self.run.open and not self.recalled


class Conductor:
    """Decides, publishes events, and tells the owner of the pool's state. One thread of rank 0 runs it.

    Args:
        channel: to the ranks.
        send: reports to the owner.
        scheduler: decides.

    Attributes:
        inbox: what it is told, by any thread.
        notes: steps that the owner knows of already: they are no reason to do something now.
    """

    def __init__(self, channel: Callable[[], Channel], send: Callable[[Any], None], scheduler: Scheduler) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.notes: deque[TaskStepped] = deque()
        self.costs = StepCosts()
        self.scheduler = scheduler
        self._channel_of, self._send, self._ranks = channel, send, scheduler.ranks
        self._lives: dict[str, Live] = {}
        self._going: dict[int, Going] = {}
        self._models: dict[str, tuple[ModelSpec, Mapping[str, Any]]] = {}
        self._loads: list[Load] = []
        self._loading: Load | None = None
        self._renew: list[Renewing] = []
        self._numbers = 0
        self._modes: dict[str, list[Mode]] = {}
        self._states: dict[int, RankState] = {}
        self._sent: dict[int, Mapping[str, int]] = {}
        self._calls = self._rows = self._batch = 0
        self._beat = self._told = self._looked = 0.0

    # ---- the loop

    def run(self) -> None:
        """Take messages until `Stop`. An error is published on this rank, where the main thread raises it."""
        try:
            while self._take():
                pass
        except Exception as error:
            self._channel.events.put(error)

    @property
    def _channel(self) -> Channel:
        return self._channel_of()

    def _take(self) -> bool:
        messages: list[Any] = []
        try:
            messages.append(self.inbox.get(timeout=LOOK if self._going else HEARTBEAT))
            while True:
                messages.append(self.inbox.get_nowait())
        except queue.Empty:
            pass
        while self.notes:
            self._count_step(self.notes.popleft())
        events: list[Any] = []
        for message in messages:
            if isinstance(message, Stop):
                self._recall(self._going, events)
                self._channel.publish([*events, Ending()])
                return False
            if isinstance(message, Exception):
                raise message
            self._hear(message, events)
        now = time.monotonic()
        # A step that has been made changes no decision.
        if any(not isinstance(one, Relayed) for one in messages) or now - self._looked > LOOK:
            self._looked = now
            self._advance(events)
        self._tell(bool(messages))
        return True

    def _publish(self, events: list[Any]) -> None:
        if events:
            self._channel.publish(list(events))
            events.clear()

    def _hear(self, message: Any, events: list[Any]) -> None:
        if isinstance(message, RunDone):
            self._done(message, events)
        elif isinstance(message, Relayed):
            self._said(message)
        elif isinstance(message, Start):
            self._join(message.task, events)
        elif isinstance(message, Cancel):
            if (live := self._lives.pop(message.id, None)) is not None:
                self._recall([number for number in self._going if number == live.run], events)
                events.append(Left(message.id, step=max(live.step, live.after.step)))
        elif isinstance(message, Load):
            self._loads.append(message)
        elif isinstance(message, (ModelReady, ModelFailed)):
            self._loaded(message)

    def _said(self, said: Relayed) -> None:
        message = said.message
        if isinstance(message, TaskStepped):
            self._count_step(message)
        self._send(message)

    def _count_step(self, message: TaskStepped) -> None:
        if (live := self._lives.get(message.id)) is not None:
            live.step = message.step

    def _join(self, task: PictureTask, events: list[Any]) -> None:
        events.append(Joined(task))
        known = self._models.get(task.model)
        if known is None:
            # Refused by the ranks, unless the model is about to be loaded.
            spec = next((load.spec for load in self._waiting_loads if load.spec.name == task.model), None)
            if spec is None:
                return
            known = spec, {}
        spec, card = known
        steps = request_steps(spec, card, task.request)
        now = time.monotonic()
        deadline = None if task.within is None else now + task.within
        self._lives[task.id] = Live(
            task, request_kind(spec, card, task.request), now, deadline, TaskAfter(0, steps, narrow=True, ended=False)
        )

    @property
    def _waiting_loads(self) -> list[Load]:
        return [*self._loads, *([self._loading] if self._loading else [])]

    def _loaded(self, message: ModelReady | ModelFailed) -> None:
        load, self._loading = self._loading, None
        for name in message.unloaded:
            self._models.pop(name, None)
        if isinstance(message, ModelFailed):
            for live in [one for one in self._lives.values() if one.task.model == message.name]:
                del self._lives[live.task.id]
            return
        assert load is not None
        self._models[message.name] = load.spec, message.card
        self._modes[message.name] = [Mode(*mode) for mode in message.modes] or [ALONE]
        self.scheduler.modes = self._modes
        for live in self._lives.values():
            if live.task.model == message.name and live.run is None and not live.after.step:
                live.kind = request_kind(load.spec, message.card, live.task.request)

    # ---- results

    def _done(self, message: RunDone, events: list[Any]) -> None:
        going = self._going[message.number]
        going.waiting.discard(message.rank)
        going.done.append(message)
        if message.state is not None:
            self._states[message.rank] = message.state
        self._sent[message.rank] = message.sent
        if going.waiting:
            return
        del self._going[message.number]
        first = min(going.done, key=lambda one: one.rank)
        self._calls += first.number_of_calls
        self._rows, self._batch = self._rows + first.rows, first.batch or self._batch
        mode, now = going.run.mode, time.monotonic()
        for kind, together, seconds in first.calls:
            self.costs.add(kind, mode, together, seconds)
        broken = any(one.broken for one in going.done)
        if broken:
            self._renew.append(Renewing(going.model, mode))
        self._charge(going, now)
        for id in going.run.tasks:
            live = self._lives.get(id)
            if live is None:
                continue
            live.run = None
            self._go_on(live, going, first, broken, events)

    def _go_on(self, live: Live, going: Going, first: RunDone, broken: bool, events: list[Any]) -> None:
        """Update a task after a run: it continues, has ended, or has failed."""
        id = live.task.id
        reason = next((one.failed[id] for one in going.done if id in one.failed), None)
        if any(id in one.missing for one in going.done):
            del self._lives[id]
            return
        if broken:
            self._again(live, reason, events)
            return
        after = first.after.get(id)
        data, ended = first.answers.get(id, b""), after is not None and after.ended
        if reason is not None:
            events.append(Failing(id, reason))
            del self._lives[id]
            return
        if data or ended:
            events.append(Answers(id, going.run.ranks, data, ended))
        if after is not None:
            self._learn(live, first, after)
            live.after, live.step = after, after.step
            if ended:
                del self._lives[id]

    def _again(self, live: Live, reason: FailureReason | None, events: list[Any]) -> None:
        """Begin a task again after ranks have failed together, on one rank; the second time it fails.

        The answers that all ranks of the run have are not known.
        """
        id = live.task.id
        del self._lives[id]
        if live.alone:
            events.append(Failing(id, reason or FailureReason("internal", "the ranks have failed twice")))
            return
        events += [Left(id, cancelled=False), Joined(live.task)]
        self._lives[id] = Live(
            live.task,
            live.kind,
            live.arrived,
            live.deadline,
            TaskAfter(0, live.after.steps, narrow=True, ended=False),
            alone=True,
        )

    def _learn(self, live: Live, first: RunDone, after: TaskAfter) -> None:
        """Learn the costs of a task's parts when they are over."""
        for name, before, seconds in first.parts:
            if name == live.task.id and before:
                live.before += seconds
            elif name == live.task.id:
                live.late += seconds
        live.calls += first.made.get(live.task.id, 0)
        if after.step and not live.after.step:
            self.costs.add_part(live.kind, BEFORE, live.before)
        if after.ended:
            self.costs.add_part(live.kind, AFTER, live.late)
            self.costs.add_steps(live.kind.model, live.calls, after.steps)

    # ---- decisions

    def _advance(self, events: list[Any]) -> None:
        """Load and renew when all ranks are free, else let free ranks begin runs."""
        if self._loading is None and (self._renew or self._loads):
            load = self._next_load()
            if self._renew or load is not None:
                if not self._going:
                    events += self._renew
                    self._renew = []
                    if load is not None:
                        self._loads.remove(load)
                        self._loading = load
                        events.append(Loading(load))
                else:
                    self._recall(self._going, events)
                self._publish(events)
                # Ranks that are at work end what they are at, and begin nothing before that.
                if self._loading is not None or self._going:
                    return
        if self._loading is None:
            self._decide(events)
        self._publish(events)

    def _next_load(self) -> Load | None:
        """The first model to be loaded, if there is space for it beside the models of tasks."""
        load = next(iter(self._loads), None)
        if load is None or load.spec.name in self._models or len(self._models) < max(1, load.most):
            return load
        needed = {live.task.model for live in self._lives.values()}
        return load if any(name not in needed for name in self._models) else None

    def _decide(self, events: list[Any]) -> None:
        lives = {id: live for id, live in self._lives.items() if live.task.model in self._models}
        if not lives:
            return
        now = time.monotonic()
        tasks = [self._task(live) for live in lives.values()]
        for going in self._going.values():
            self._charge(going, now)
        before, running = [*self._going], [going.run for going in self._going.values()]
        for run in self.scheduler.decide(self.costs, now, tasks, running, self._free(now)):
            self._numbers += 1
            for id in run.tasks:
                lives[id].run = self._numbers
            model = lives[run.tasks[0]].task.model
            self._going[self._numbers] = Going(run, model, now + run.seconds, set(run.ranks), now)
            events.append(Assigned(self._numbers, run))
        # Idle ranks begin before the others are looked at.
        self._publish(events)
        numbers, running = [*self._going], [going.run for going in self._going.values()]
        able = [place for place, number in enumerate(before) if self._going[number].endless]
        late = self.scheduler.recall(self.costs, now, tasks, running, able, self._free(now))
        self._recall([numbers[place] for place in late], events)

    def _free(self, now: float) -> list[float]:
        """Seconds of the clock at which each rank is expected to be free."""
        free = [now] * self._ranks
        for going in self._going.values():
            until = max(now + self.scheduler.quantum if going.endless else going.until, now + 1e-3)
            for rank in going.run.ranks:
                free[rank] = until
        return free

    def _recall(self, numbers: Iterable[int], events: list[Any]) -> None:
        """Tell ranks that are at runs without an end to end them."""
        for number in numbers:
            going = self._going[number]
            if going.endless:
                going.recalled = True
                going.until = time.monotonic() + self.scheduler.quantum
                events.append(Recall(number))

    def _charge(self, going: Going, now: float) -> None:
        """Record what the owners of a run's tasks have had of the ranks since the last time."""
        seconds, going.charged = now - going.charged, now
        for id in going.run.tasks:
            if (live := self._lives.get(id)) is not None:
                self.scheduler.charge(
                    live.task.owner, seconds * going.run.mode.ranks / len(going.run.tasks), live.task.weight
                )

    def _task(self, live: Live) -> Task:
        after, request = live.after, live.task.request
        if live.step > after.step:
            # Steps of the run that it takes part in.
            after = replace(after, step=live.step, narrow=live.step == after.steps)
        return Task(
            id=live.task.id,
            kind=live.kind,
            steps=max(0, after.steps - after.step),
            begun=bool(after.step),
            arrived=live.arrived,
            total=after.steps,
            deadline=live.deadline,
            owner=live.task.owner,
            weight=live.task.weight,
            priority=request.priority,
            narrow=after.narrow,
            single=live.alone,
            form=None if live.alone else (live.kind, request.loras),
        )

    # ---- the owner

    def _tell(self, worked: bool) -> None:
        now = time.monotonic()
        if not worked and now - self._beat < HEARTBEAT:
            return
        if worked and now - self._beat < BEAT:
            return
        self._beat = now
        table = None
        if now - self._told > TOLD:
            self._told, table = now, self.costs.table()
        sent: Counter[str] = Counter()
        for one in self._sent.values():
            sent.update(one)
        self._send(
            Beat(
                running=tuple(id for id, live in self._lives.items() if live.after.step or live.run is not None),
                batch=self._batch,
                calls=self._calls,
                rows=self._rows,
                ranks=tuple(state for _, state in sorted(self._states.items())),
                bytes=dict(sent),
                costs=table,
            )
        )
