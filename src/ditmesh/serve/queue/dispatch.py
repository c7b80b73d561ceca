"""Dispatch of tasks to replicas, and their reports."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ..errors import StorageError, without_quotes
from ..offers import ServedModel
from ..settings import ServiceSettings
from ..types import Job, JobError, JobImage, ReplicaState
from ..worker.protocol import (
    Beat,
    Cancelled,
    Finished,
    Load,
    ModelFailed,
    ModelReady,
    Preview,
    Start,
    TaskBegan,
    TaskFailed,
    TaskStepped,
)
from ..worker.replicas import MakeRanks, RanksDown, RanksUp, Replica, ReplicaReport
from .jobs import JobState, JobStore
from .queue import NextJob

logger = logging.getLogger(__name__)

# Seconds for which a replica keeps its models before it unloads one for a job that needs another model.
SWITCH = 2.0
# Attempts to load a model before its jobs fail; to start ranks before jobs that could go elsewhere do not wait for
# them; and before all jobs fail, or the server ends if none has ever served.
LOADS, STARTS, MOST_STARTS = 2, 3, 6

# Why an image begins again whose ranks have been told to stop.
STOPPING = "the server is stopping"

TaskReport = TaskBegan | TaskStepped | Preview | Finished | TaskFailed | Cancelled


@dataclass(eq=False)
class ReplicaSlot:
    """The dispatcher's record of a replica.

    Attributes:
        up: it takes commands.
        models: names of those loaded.
        loading: the model that it was told to load; asked: when, on the monotonic clock.
        running: its tasks, by id: jobs and numbers of images.
        exclusive_job: the job that has it for itself, since ranks have failed under it.
        reserved: no task is given to it until it has none: then such a job gets it.
        failures: how often its ranks have failed since they last loaded a model.
        final: they are not started again.
    """

    replica: Replica
    state: ReplicaState
    up: bool = False
    models: set[str] = field(default_factory=set)
    loading: str = ""
    asked: float = 0.0
    running: dict[str, tuple[JobState, int]] = field(default_factory=dict)
    exclusive_job: str = ""
    reserved: bool = False
    failures: int = 0
    final: bool = False

    @property
    def gave_up(self) -> bool:
        """True if the ranks have failed so often that jobs do not wait for them."""
        return self.final or self.failures >= MOST_STARTS

    @property
    def idle(self) -> bool:
        """True if the replica could begin a task immediately."""
        return self.up and not self.running and not self.loading


class Dispatcher:
    """Assigns the images of jobs to replicas.

    Tasks of different jobs run on a replica at the same time. When its ranks fail, their jobs begin again, and from
    then on without company: so the one under which ranks fail again is the one to blame, and fails with the reason.
    """

    def __init__(
        self,
        jobs: JobStore,
        models: Mapping[str, ServedModel],
        launchers: Sequence[MakeRanks],
        settings: ServiceSettings,
        function: Callable[..., None] | None = None,
    ) -> None:
        """Prepare a replica for each of ``launchers``; for the other arguments see `Service`."""
        self._jobs, self._models = jobs, models
        self._most_loaded, self._most_running = settings.max_loaded, settings.max_batch
        self.slots = []
        for number, make in enumerate(launchers):
            name = f"replica-{number}"
            replica = Replica(name, make, self._receive, settings, function)
            self.slots.append(ReplicaSlot(replica, ReplicaState(name=name, state="starting")))
        self._slot_of = {slot.replica: slot for slot in self.slots}
        # Failed loads by model; whether any model has been loaded.
        self._failed_loads: dict[str, int] = {}
        self._served = self._draining = False
        self._gave_up, self._reason = asyncio.Event(), ""

    async def start(self) -> None:
        """Start the replicas, and begin to assign tasks."""
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[tuple[ReplicaSlot, ReplicaReport] | None] = asyncio.Queue()
        for slot in self.slots:
            slot.replica.start()
        self._listener = asyncio.create_task(self._listen())
        self._giver = asyncio.create_task(self._assign_tasks())

    async def stop(self, grace: float) -> None:
        """Begin no more tasks, wait ``grace`` seconds for the running ones, and end the replicas."""
        self._draining = True
        limit = time.monotonic() + grace
        while time.monotonic() < limit and (self._jobs.has_unwritten or any(slot.running for slot in self.slots)):
            await asyncio.sleep(0.05)
        for slot in self.slots:
            slot.replica.stop()
        await asyncio.gather(*(asyncio.to_thread(slot.replica.join) for slot in self.slots))
        # After all their reports.
        self._loop.call_soon(self._inbox.put_nowait, None)
        await self._listener
        self._giver.cancel()
        await asyncio.gather(self._giver, return_exceptions=True)

    async def permanent_failure(self) -> str:
        """Return the reason when no ranks will ever serve; jobs stay queued for a later server."""
        await self._gave_up.wait()
        return self._reason

    @property
    def failure_reason(self) -> str:
        """The reason why waiting jobs will never run, a clause; empty: they will, or they wait for another server."""
        if self._gave_up.is_set() or not all(slot.gave_up for slot in self.slots):
            return ""
        slot = min(self.slots, key=lambda one: one.final)
        often = "" if slot.final else f" {slot.failures} times in a row"
        return f"the ranks of {slot.state.name} have failed{often}: {slot.state.message}"

    def _give_up(self, reason: str) -> None:
        self._reason = f"{reason}; the jobs stay in the queue"
        self._gave_up.set()

    # ---- to replicas

    async def _assign_tasks(self) -> None:
        while True:
            await self._jobs.wake.wait()
            self._jobs.wake.clear()
            try:
                async with self._jobs.change:
                    open_slots = [] if self._draining else list(self.slots)
                    # One task at a time, to the replica with the fewest.
                    while open_slots and not self._jobs.has_unwritten:
                        slot = min(open_slots, key=lambda one: len(one.running))
                        if not await self._assign_next(slot):
                            open_slots.remove(slot)
            except StorageError as error:
                # `JobStore.maintain` wakes this up again.
                logger.error("%s", error)
            except Exception:
                logger.exception("giving tasks to replicas failed")

    async def _assign_next(self, slot: ReplicaSlot) -> bool:
        """Assign a replica its next task if there is one; whether it got one."""
        if not slot.up or slot.loading or len(slot.running) >= self._most_running:
            return False
        head = await self._jobs.on_disk(self._choose(slot))
        # Another replica may have taken the job for which this one was reserved.
        slot.reserved = slot.reserved and head is not None and head.again
        if head is None or (slot.reserved and slot.running):
            return False
        if head.again:
            if not (slot.idle or slot.exclusive_job == head.id):
                slot.reserved = True
                return False
            slot.exclusive_job = head.id
        slot.reserved = False
        if head.model not in slot.models:
            # The model to be unloaded must be idle.
            if len(slot.models) < self._most_loaded or not slot.running:
                self._load(slot, head.model)
            return False
        picture = await self._jobs.on_disk(self._jobs.queue.begin, head.id)
        if picture is None:
            return False
        self._start(slot, self._jobs.live_jobs[head.id], picture)
        return True

    def _choose(self, slot: ReplicaSlot) -> Callable[[], NextJob | None]:
        """A function that finds a replica's next job; it runs on the disk's thread."""
        queue = self._jobs.queue
        if slot.exclusive_job and slot.running:
            return partial(queue.head, job=slot.exclusive_job)
        slot.exclusive_job = ""
        others = [one for one in self.slots if one is not slot]
        # A job that needs a replica to itself need not wait for this one if others are free or almost free.
        elsewhere = any(one.idle or one.reserved or (not one.up and 0 < one.failures < STARTS) for one in others)
        again = slot.idle or not elsewhere
        models = set(slot.models)
        there = {name for one in others for name in (*one.models, one.loading)}

        def choose() -> NextJob | None:
            head = queue.head(self._models.keys(), again=again)
            if head is None or head.model in models:
                return head
            own = queue.head(models, again=again)
            waits = head.model in there or time.time() - head.since < SWITCH
            return own if own is not None and waits else head

        return choose

    def _load(self, slot: ReplicaSlot, name: str) -> None:
        slot.loading, slot.asked = name, time.monotonic()
        slot.replica.send(Load(self._models[name].spec, self._most_loaded))

    def _start(self, slot: ReplicaSlot, live: JobState, picture: int) -> None:
        self._jobs.begin(live, picture, slot.replica)
        task, request = live.task(picture), live.job.request
        slot.running[task] = (live, picture)
        paths = {one.digest: self._jobs.results.input(one.digest) for one in request.inputs}
        files = {digest: str(path) for digest, path in paths.items() if path is not None}
        slot.replica.send(Start(task, request, picture, files))

    # ---- from replicas

    def _receive(self, replica: Replica, said: ReplicaReport) -> None:
        """Called in a replica's thread."""
        with suppress(RuntimeError):
            # The loop may be closed when this process ends.
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, (self._slot_of[replica], said))

    async def _listen(self) -> None:
        while (item := await self._inbox.get()) is not None:
            slot, said = item
            try:
                async with self._jobs.change:
                    if isinstance(said, (RanksUp, RanksDown, ModelReady, ModelFailed, Beat)):
                        await self._apply_rank_report(slot, said)
                    elif said.id in slot.running:
                        await self._apply_task_report(slot, *slot.running[said.id], said)
            except Exception:
                logger.exception("a message of %s could not be handled", slot.replica.name)
            if not isinstance(said, (Beat, TaskBegan, TaskStepped, Preview)):
                self._jobs.wake.set()

    async def _apply_rank_report(
        self, slot: ReplicaSlot, said: RanksUp | RanksDown | ModelReady | ModelFailed | Beat
    ) -> None:
        state = slot.state
        if isinstance(said, RanksUp):
            slot.up = True
            await self._load_first(slot)
        elif isinstance(said, RanksDown):
            await self._down(slot, said)
        elif isinstance(said, ModelReady):
            slot.loading, slot.failures, self._served = "", 0, True
            self._failed_loads.pop(said.name, None)
            slot.models = (slot.models | {said.name}) - set(said.unloaded)
            self._models[said.name].loaded(said.card)
            for lora, note in said.card.get("lora_notes", {}).items():
                logger.warning("LoRA %s fits %s in part: %s", lora, said.name, note)
            state.state, state.models = "ready", sorted(slot.models)
            state.mesh, state.strategy = dict(said.mesh), said.strategy
            facts = {"model": said.name, "configuration": said.strategy, "replica": state.name}
            logger.info("model ready", extra={"facts": facts | {"seconds": round(time.monotonic() - slot.asked, 1)}})
        elif isinstance(said, ModelFailed):
            slot.loading, slot.models = "", slot.models - set(said.unloaded)
            state.message, state.models = said.message, sorted(slot.models)
            await self._load_failed(said.name, JobError(code="internal", message=said.message), LOADS)
            if not slot.models:
                # The server is ready when any of its models is loaded.
                await self._load_first(slot)
        else:
            state.ranks, state.bytes = list(said.ranks), dict(said.bytes)
            state.batch, state.calls, state.rows = said.batch, said.calls, said.rows
            state.synchronous_steps, state.drift = said.synchronous_steps, said.drift

    async def _apply_task_report(self, slot: ReplicaSlot, live: JobState, picture: int, said: TaskReport) -> None:
        if isinstance(said, (Finished, TaskFailed, Cancelled)):
            del slot.running[said.id]
            del live.tasks[picture]
        if live.ended:
            return
        if isinstance(said, TaskBegan):
            live.steps = said.steps or live.steps
        elif isinstance(said, TaskStepped):
            live.steps = said.steps
            self._jobs.stepped(live, picture, said.step, said.batch)
        elif isinstance(said, Preview):
            shown = {"image": picture, "step": said.step, "width": said.width, "height": said.height}
            live.log.publish("preview", {**shown, "b64_json": base64.b64encode(said.jpeg).decode()})
        elif isinstance(said, Finished):
            await self._finished(live, picture, said)
        elif isinstance(said, TaskFailed):
            company = any(one is not live for one, _ in slot.running.values())
            if said.code == "out_of_memory" and company and live.job.attempt == 1:
                # The memory may be enough for the task alone.
                await self._restart(live, [picture], said.message)
            else:
                await self._fail(live, JobError(code=said.code, message=said.message))
        else:
            # The ranks were not told to.
            await self._restart(live, [picture], "the ranks have given it back", counts=False)

    async def _finished(self, live: JobState, picture: int, said: Finished) -> None:
        """Handle a finished image: write its file, then record it."""
        image = JobImage(
            index=picture,
            seed=(live.job.request.seed or 0) + picture,
            url=f"/v1/jobs/{live.id}/images/{picture}",
            width=said.width,
            height=said.height,
            receipt=dict(said.receipt),
            notes=[said.receipt["cut"]] if said.receipt.get("cut") else [],
        )
        queue, results = self._jobs.queue, self._jobs.results

        def change() -> Job | None:
            file = results.write(live.id, picture, said.data)
            job = queue.finish(live.id, picture, file, image)
            if job is None:
                results.remove(live.id, file)
            return job

        def then(job: Job | None) -> None:
            if job is not None and not live.ended:
                live.job = job
                live.log.publish("image", image.model_dump(mode="json"))
                if live.ended:
                    self._jobs.end(live, job)

        await self._jobs.write(live, change, then)

    async def _fail(self, live: JobState, error: JobError) -> None:
        await self._jobs.write(live, partial(self._jobs.queue.fail, live.id, error), partial(self._jobs.end, live))

    async def _restart(self, live: JobState, pictures: Collection[int], why: str, counts: bool = True) -> None:
        """Put images back into the queue; ``counts``: as another attempt of their job."""

        def then(job: Job | None) -> None:
            if job is not None:
                live.job = job
                for picture in pictures:
                    live.progress.pop(picture, None)
                live.log.publish("restarted", {"attempt": job.attempt, "reason": why})

        await self._jobs.write(live, partial(self._jobs.queue.interrupt, live.id, pictures, counts), then)

    # ---- ranks that come and go

    async def _load_first(self, slot: ReplicaSlot) -> None:
        """Load the requested model, or the first, unless it has failed."""
        head = await self._jobs.on_disk(self._jobs.queue.head, self._models.keys())
        names = [*self._models] if head is None else [head.model, *self._models]
        name = next((one for one in names if self._failed_loads.get(one, 0) < LOADS), None)
        if name is not None:
            self._load(slot, name)

    async def _down(self, slot: ReplicaSlot, said: RanksDown) -> None:
        """Handle the end of ranks: their tasks begin again, or fail if the ranks ended while running only them."""
        tasks, loading = list(slot.running.values()), slot.loading
        # All clients are told, and the log.
        said = replace(said, why=_unquoted(said.why, [live for live, _ in tasks]))
        slot.up, slot.loading, slot.exclusive_job, slot.reserved = False, "", "", False
        slot.running, slot.models = {}, set()
        state = slot.state
        state.state = "stopped" if said.final else "restarting"
        state.message, state.models, state.batch, state.ranks = said.why, [], 0, []
        slot.final = said.final
        if said.why:
            slot.failures += 1
            state.restarts += not said.final
            logger.error("%s: %s", state.name, said.why, extra={"facts": {"replica": state.name}})
        lost: dict[JobState, list[int]] = {}
        for live, picture in tasks:
            del live.tasks[picture]
            if not live.ended:
                lost.setdefault(live, []).append(picture)
        for live, pictures in lost.items():
            # Another task, or a model that was being loaded, may be the cause.
            if live.job.attempt > 1 and len(lost) == 1 and said.why and not loading:
                why = f"{said.why}; it was the second time for this job"
                await self._fail(live, JobError(code=said.code, message=why))
            else:
                await self._restart(live, pictures, said.why or STOPPING, counts=bool(said.why) and not loading)
        if loading and said.why:
            await self._load_failed(loading, JobError(code=said.code, message=said.why), 1)
        if said.why and (why := self.failure_reason):
            # No ranks start: waiting jobs stay for a later server, unless this one has served.
            if not self._served or all(slot.final for slot in self.slots):
                self._give_up(why)
            else:
                await self._fail_waiting(JobError(code=said.code, message=why))

    async def _fail_waiting(self, error: JobError, model: str | None = None) -> None:
        """Fail waiting jobs: all, or those of a model that do not run anywhere."""
        for live in list(self._jobs.live_jobs.values()):
            if not live.ended and (model is None or (live.model == model and not live.tasks)):
                await self._fail(live, error)

    async def _load_failed(self, name: str, error: JobError, attempts: int) -> None:
        """Handle a failed load: after `LOADS` attempts the jobs that wait for the model fail."""
        self._failed_loads[name] = self._failed_loads.get(name, 0) + attempts
        if self._failed_loads[name] < LOADS or any(name in slot.models for slot in self.slots):
            return
        error = JobError(code=error.code, message=f"model {name} could not be loaded: {error.message}")
        logger.error("%s", error.message)
        if not self._served and all(self._failed_loads.get(one, 0) >= LOADS for one in self._models):
            self._give_up(error.message)
        else:
            await self._fail_waiting(error, name)


def _unquoted(why: str, lives: Sequence[JobState]) -> str:
    """A reason without what it quotes of the prompts of some jobs."""
    requests = [live.job.request for live in lives]
    return without_quotes(why, [text for request in requests for text in (request.prompt, request.negative_prompt)])
