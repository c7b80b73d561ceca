"""The loop of every rank of a pool: it follows the log of events, and makes the calls that it is told to make."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..offers import ModelSpec, request_kind
from ..schedule.core import Run, Scheduler
from ..schedule.costs import ALONE, Kind
from ..types import RankState
from .batching import PipelineTask
from .conductor import Conductor
from .loaded import LoadedModel
from .model_cache import ModelCache
from .pooled import PoolBatcher
from .priority import give_way
from .protocol import Cancelled, Load, Message, ModelFailed, Stop, TaskStepped
from .rendezvous import FailureReason, RankRendezvous, failure_of
from .trim import MemoryTrimmer
from .wire import (
    Answers,
    Assigned,
    Channel,
    Ending,
    Failing,
    Joined,
    Left,
    Loading,
    Relayed,
    Renewing,
    RunDone,
    TaskAfter,
)
from .worker import STATE_INTERVAL, RunningTask, TaskScheduler


def serve_pool(specs: Sequence[ModelSpec], *, report: Any, scheduler: Scheduler | None = None) -> None:
    """Serve until a `Stop` command, with ranks that change between the steps of a request.

    As `worker.serve_rank`, for models with ``ModelSpec.pool``.

    Args:
        specs, report: as of `worker.serve_rank`.
        scheduler: decides on rank 0; default: a `Scheduler` of all ranks.

    Raises:
        RuntimeError: another rank is gone: this replica is to be started again.
    """
    from ...generate.runner import quieten

    quieten()
    with torch.no_grad():
        worker = PoolWorker(report, scheduler)
        try:
            worker.run(specs)
        finally:
            worker.close()


# Bytes of results that a rank keeps of tasks that it has no part in, before it goes on with them itself.
BACKLOG = 64 << 20


class PoolRendezvous(RankRendezvous):
    """A rank's reports: the rank that makes a call tells what comes of it, through rank 0.

    Attributes:
        tell: sends rank 0's conductor a message.
        note: lets it know of what rank 0 itself has told the owner, the next time that it does something.
    """

    tell: Callable[[Any], None]
    note: Callable[[TaskStepped], None]

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        # Of each thread: pictures are written in one of their own.
        self._thread = threading.local()

    @property
    def shows(self) -> bool:
        """Any rank may make the last call of a task."""
        return True

    @property
    def silent(self) -> bool:
        """True if another rank reports the present work of this thread."""
        return getattr(self._thread, "silent", False)

    @contextmanager
    def hushed(self, silent: bool) -> Iterator[None]:
        """Report nothing in this thread meanwhile, or with ``silent=False`` do."""
        before, self._thread.silent = self.silent, silent
        try:
            yield
        finally:
            self._thread.silent = before

    def send(self, message: Message) -> None:
        """Report to the owner, unless `silent`."""
        if self.silent:
            return
        if self.rank > 0:
            self.tell(Relayed(message))
            return
        super().send(message)
        if isinstance(message, TaskStepped):
            # The conductor counts steps, for its next decision.
            self.note(message)


class PoolTasks(TaskScheduler):
    """The tasks of a rank of a pool."""

    def begin(self, work: RunningTask) -> FailureReason | None:
        """Begin a task, up to its first call of a component; the reason why it has failed."""
        self._begin(work, self._models.models[work.task.model])
        if work.run is not None:
            work.run.resume()
            if work.run.failure is not None:
                return failure_of(work.run.failure)
        return self._ranks.message.failed.pop(work.task.id, None)

    def fail(self, id: str, reason: Any) -> None:
        """Forget a task, and report why."""
        if id in self.tasks:
            self._fail(id, [reason])

    def leave(self, id: str) -> None:
        """Forget a task."""
        if (work := self.tasks.get(id)) is not None:
            self._leave(work)

    def finish(self, work: RunningTask) -> None:
        """Report a finished task, from rank 0, and forget it."""
        self._finish(work)


class PoolWorker:
    """One rank of a pool."""

    def __init__(self, report: Any, scheduler: Scheduler | None = None) -> None:
        self._ranks = PoolRendezvous(report)
        self._models = ModelCache(self._ranks)
        self._tasks = PoolTasks(self._ranks, self._models)
        rank, size = self._ranks.rank, self._ranks.size
        self._conductor = Conductor(lambda: self._channel, report, scheduler or Scheduler(size)) if rank == 0 else None
        inbox = (lambda message: None) if self._conductor is None else self._conductor.inbox.put
        self._channel = Channel(rank, size, inbox, self._ranks.gather)
        self._ranks.tell = self._channel.tell
        if self._conductor is not None:
            self._ranks.note = self._conductor.notes.append
        # By task, results of calls that other ranks have made, as `Answers.data`.
        self._backlog: dict[str, list[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._trimmer = MemoryTrimmer()
        self._state_time = 0.0
        self._step_seconds = 0.0
        self._ended = False

    def run(self, specs: Sequence[ModelSpec]) -> None:
        """Serve until a `Stop` command."""
        with self._ranks.hushed(self._ranks.rank > 0):
            self._run(specs)

    def _run(self, specs: Sequence[ModelSpec]) -> None:
        if self._conductor is not None:
            for spec in specs:
                self._conductor.inbox.put(Load(spec, len(specs)))
            for target in (self._conductor.run, self._pass_on):
                thread = threading.Thread(target=target, name="ditmesh-conductor", daemon=True)
                thread.start()
                self._threads.append(thread)
        if self._models.device.type == "cpu":
            give_way()
        while True:
            event = self._channel.events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Ending):
                self._ended = True
                return
            self._obey(event)
            self._trimmer.trim_when_due()

    def close(self) -> None:
        """Drop all tasks and unload the models."""
        self._tasks.close()
        self._models.close()
        if self._ended:
            # After a failure, others may not answer.
            self._channel.close()
            for thread in self._threads:
                thread.join()
        self._ranks.close()
        gc.collect()

    def _pass_on(self) -> None:
        """Give the owner's commands to the conductor; a thread of rank 0."""
        assert self._conductor is not None
        while True:
            for command in self._ranks.take_commands(1.0):
                self._conductor.inbox.put(command)
                if isinstance(command, Stop):
                    return

    # ---- events

    def _obey(self, event: Any) -> None:
        if isinstance(event, Joined):
            self._tasks.add(event.task)
        elif isinstance(event, Left):
            self._forget(event.id)
            if event.cancelled:
                self._ranks.send(Cancelled(event.id, event.step))
        elif isinstance(event, Failing):
            self._backlog.pop(event.id, None)
            self._tasks.fail(event.id, event.reason)
        elif isinstance(event, Answers):
            self._keep(event)
        elif isinstance(event, Assigned):
            if self._ranks.rank in event.run.ranks:
                self._channel.tell(self._made(event))
        elif isinstance(event, Loading):
            self._load(event.load)
        elif isinstance(event, Renewing) and event.model in self._models.models:
            batcher = self._models.models[event.model].batcher
            assert isinstance(batcher, PoolBatcher)
            batcher.placements.ways[event.mode].renew()

    def _load(self, load: Load) -> None:
        self._models.waiting.append(load)
        answer = self._models.load(load, self._tasks.needed)
        self._ranks.send(answer)
        if isinstance(answer, ModelFailed):
            self._tasks.refuse(answer)
        if self._conductor is not None:
            self._conductor.inbox.put(answer)

    def _forget(self, id: str) -> None:
        self._backlog.pop(id, None)
        self._tasks.leave(id)

    def _keep(self, event: Answers) -> None:
        """Keep what other ranks have computed of a task: this rank may have no part in it."""
        if event.ended:
            self._forget(event.id)
        elif self._ranks.rank not in event.ranks and event.id in self._tasks.tasks:
            self._backlog.setdefault(event.id, []).append(event.data)
            if sum(len(data) for kept in self._backlog.values() for data in kept) > BACKLOG:
                for id in [*self._backlog]:
                    self._catch_up(self._tasks.tasks[id])

    def _catch_up(self, work: RunningTask) -> FailureReason | None:
        """Bring a task to where the ranks are that have made its calls; the reason why it has failed."""
        kept = self._backlog.pop(work.task.id, [])
        model = self._models.models[work.task.model]
        assert isinstance(model.batcher, PoolBatcher)
        with self._ranks.hushed(self._ranks.silent or bool(kept)):
            if work.run is None and (reason := self._tasks.begin(work)) is not None:
                return reason
            assert work.run is not None
            for data in (one for many in kept for one in pickle.loads(many)):
                model.batcher.replay(work.run, data)
            return None if work.run.failure is None else failure_of(work.run.failure)

    # ---- runs

    def _made(self, event: Assigned) -> RunDone:
        """Make the calls of a run."""
        with self._ranks.hushed(self._ranks.rank != event.run.first):
            return self._calls_of(event)

    def _calls_of(self, event: Assigned) -> RunDone:
        run = event.run
        done = RunDone(event.number, self._ranks.rank)
        self._channel.recalled.difference_update([n for n in self._channel.recalled if n < event.number])
        works = []
        began = time.perf_counter()
        for id in run.tasks:
            work = self._tasks.tasks.get(id)
            if work is None:
                done.missing.append(id)
                continue
            first, since = work.step == 0 and work.run is None, time.perf_counter()
            if (reason := self._catch_up(work)) is not None:
                done.failed[id] = reason
                continue
            if first:
                # To check and prepare a request takes as long as some calls.
                done.parts.append((id, True, time.perf_counter() - since))
            works.append(work)
        if works:
            model = self._models.models[works[0].task.model]
            self._models.used(model.spec.name)
            batcher = model.batcher
            assert isinstance(batcher, PoolBatcher)
            calls, rows = batcher.counts.calls, batcher.counts.rows
            if run.mode == ALONE:
                self._make_alone(event, works, model, batcher, done)
            else:
                self._make_shared(run, works[0], model, batcher, done)
            for work in works:
                self._report(work, batcher, run, done)
            done.number_of_calls, done.rows = batcher.counts.calls - calls, batcher.counts.rows - rows
            done.batch = batcher.counts.batch
            done.sent = batcher.placements.traffic()
        self._step_seconds = time.perf_counter() - began
        done.state = self._state()
        return done

    def _report(self, work: RunningTask, batcher: PoolBatcher, run: Run, done: RunDone) -> None:
        pipeline, id = work.run, work.task.id
        assert pipeline is not None
        if pipeline.failure is not None and id not in done.failed:
            done.failed[id] = failure_of(pipeline.failure)
        answers = batcher.take_answers(pipeline)
        if self._ranks.rank == run.first and answers and not pipeline.ended:
            # All ranks forget a task that has ended, so its last results go to none.
            done.answers[id] = pickle.dumps(answers)
        waits = pipeline.pending is not None and not batcher.steps(pipeline)
        done.after[id] = TaskAfter(work.step, work.steps, waits, pipeline.ended)
        if pipeline.ended and id not in done.failed:
            since = time.perf_counter()
            self._tasks.finish(work)
            done.parts.append((id, False, time.perf_counter() - since))

    def _kind(self, work: RunningTask, model: LoadedModel) -> Kind:
        return request_kind(model.spec, model.card, work.task.request)

    def _make_alone(
        self, event: Assigned, works: list[RunningTask], model: LoadedModel, batcher: PoolBatcher, done: RunDone
    ) -> None:
        began, run = time.perf_counter(), event.run
        by_run = {work.run: work for work in works if work.run is not None}
        seconds: list[float] = []

        def seen(members: Sequence[PipelineTask], took: float) -> None:
            seconds.append(took)
            for one in members:
                id = by_run[one].task.id
                done.made[id] = done.made.get(id, 0) + 1

        stuck: set[PipelineTask] = set()

        def goes_on() -> bool:
            if run.open:
                return event.number not in self._channel.recalled and not any(one.ended for one in by_run)
            return time.perf_counter() - began < run.seconds * 0.95

        first = True
        while first or goes_on():
            first = False
            pending = [one for one in by_run if one.pending is not None and one not in stuck]
            narrow = [one for one in pending if not batcher.steps(one)]
            if narrow:
                work = by_run[narrow[0]]
                early = not work.step
                done.parts.append((work.task.id, early, batcher.make_narrow_call(narrow[0])))
            elif pending:
                seconds.clear()
                failed = batcher.make_calls(pending, seen)
                if not failed:
                    # Calls that cannot be joined cost what they cost one after the other.
                    done.calls.append((self._kind(by_run[pending[0]], model), len(pending), sum(seconds)))
                for one, reason in failed.items():
                    done.failed[by_run[one].task.id] = reason
                    stuck.add(one)
            else:
                return

    def _make_shared(
        self, run: Run, work: RunningTask, model: LoadedModel, batcher: PoolBatcher, done: RunDone
    ) -> None:
        pipeline = work.run
        assert pipeline is not None
        for _ in range(run.calls):
            if pipeline.pending is None or not batcher.steps(pipeline):
                return
            try:
                seconds = batcher.make_shared_call(pipeline, run.mode)
            except Exception as error:
                done.failed[work.task.id] = failure_of(error)
                done.broken = True
                return
            done.calls.append((self._kind(work, model), 1, seconds))
            done.made[work.task.id] = len(done.calls)

    def _state(self) -> RankState | None:
        now = time.monotonic()
        if now - self._state_time < STATE_INTERVAL:
            return None
        self._state_time, device = now, self._models.device
        if device.type == "cuda":
            memory = int(torch.cuda.memory_allocated(device))
        else:
            import psutil

            memory = int(psutil.Process().memory_info().rss)
        return RankState(
            rank=self._ranks.rank, device=str(device), step_seconds=self._step_seconds, memory_bytes=memory
        )
