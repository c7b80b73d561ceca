"""Dispatch of tasks to replicas, and their reports."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Mapping, Sequence
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
    Frames,
    ModelFailed,
    ModelReady,
    Preview,
    Start,
    TaskFailed,
    TaskStepped,
)
from ..worker.replicas import MakeRanks, RanksDown, RanksUp, Replica, ReplicaReport
from .jobs import JobState, JobStore

logger = logging.getLogger(__name__)

# How often ranks may fail one after the other before they are given up.
MOST_STARTS = 6

# Why an image begins again whose ranks have been told to stop.
STOPPING = "the server is stopping"

TaskReport = TaskStepped | Preview | Frames | Finished | TaskFailed | Cancelled


@dataclass(eq=False)
class ReplicaSlot:
    """The dispatcher's record of a replica.

    Attributes:
        up: its models are loaded, and it takes commands.
        began: when its ranks were started, on the monotonic clock.
        running: its tasks, by id: jobs and numbers of images.
        hurried: those of them that could be in time for a deadline when they began.
        failures: how often its ranks have failed since they were last up.
        final: they are not started again.
    """

    replica: Replica
    state: ReplicaState
    up: bool = False
    began: float = 0.0
    running: dict[str, tuple[JobState, int]] = field(default_factory=dict)
    hurried: set[str] = field(default_factory=set)
    failures: int = 0
    final: bool = False

    @property
    def gave_up(self) -> bool:
        """True if the ranks have failed so often that jobs do not wait for them."""
        return self.final or self.failures >= MOST_STARTS

    @property
    def exclusive_job(self) -> str | None:
        """The id of a job under which ranks have failed, if it has the replica for itself."""
        jobs = {live for live, _ in self.running.values()}
        return next((live.id for live in jobs if len(jobs) == 1 and live.job.attempt > 1), None)


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
        self._most_running = settings.max_batch
        self.slots = []
        for number, make in enumerate(launchers):
            name = f"replica-{number}"
            specs = [model.spec for model in models.values()]
            replica = Replica(name, make, self._receive, specs, settings, function)
            self.slots.append(ReplicaSlot(replica, ReplicaState(name=name, state="starting")))
        self._slot_of = {slot.replica: slot for slot in self.slots}
        # Whether any replica has been up.
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
        while time.monotonic() < limit and (self._jobs.write_error or any(slot.running for slot in self.slots)):
            await asyncio.sleep(0.05)
        for slot in self.slots:
            slot.replica.stop()
        await asyncio.gather(*(asyncio.to_thread(slot.replica.join) for slot in self.slots))
        self._jobs.stops = True
        # After all their reports.
        self._loop.call_soon(self._inbox.put_nowait, None)
        await self._listener
        self._giver.cancel()
        await asyncio.gather(self._giver, return_exceptions=True)

    async def permanent_failure(self) -> str:
        """Return the reason when no ranks will ever serve; jobs stay queued for a later server."""
        await self._gave_up.wait()
        return self._reason

    def _give_up(self, reason: str) -> None:
        self._reason = self._reason or f"{reason}; the jobs stay in the queue"
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
                    while open_slots:
                        slot = min(open_slots, key=lambda open_slot: (len(open_slot.hurried), len(open_slot.running)))
                        if not await self._assign(slot):
                            open_slots.remove(slot)
            except StorageError as error:
                # `JobStore.maintain` wakes this up again.
                logger.error("%s", error)
            except Exception:
                logger.exception("giving tasks to replicas failed")

    async def _assign(self, slot: ReplicaSlot) -> bool:
        """Begin the next image on a replica, if there is one for it; whether there was."""
        if not slot.up:
            return False
        jobs, exclusive = self._jobs, slot.exclusive_job
        head = await jobs.on_disk(jobs.queue.head, exclusive)
        # A job under which ranks have failed begins where nothing else runs: nothing is begun before it, so that some
        # replica soon runs nothing.
        if head is None or (head.again and slot.running and exclusive is None):
            return False
        # Those that can be in time pause others, and have places of their own.
        if len(slot.hurried if head.left is not None else slot.running.keys() - slot.hurried) >= self._most_running:
            return False
        picture = await jobs.on_disk(jobs.queue.begin, head.id)
        if picture is None:
            return False
        live = jobs.live_jobs[head.id]
        jobs.begin(live, picture, slot.replica)
        task, request = live.task(picture), live.job.request
        slot.running[task] = (live, picture)
        if head.left is not None:
            slot.hurried.add(task)
        files = {given.digest: str(jobs.results.path(live.id, f"{given.digest}.png")[0]) for given in request.inputs}
        slot.replica.send(Start(task, request, picture, files, live.owner, head.left, head.seconds))
        return True

    # ---- from replicas

    def _receive(self, replica: Replica, report: ReplicaReport) -> None:
        """Called in a replica's thread."""
        with suppress(RuntimeError):
            # The loop may be closed when this process ends.
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, (self._slot_of[replica], report))

    async def _listen(self) -> None:
        while (item := await self._inbox.get()) is not None:
            slot, report = item
            try:
                async with self._jobs.change:
                    await self._apply(slot, report)
            except Exception:
                logger.exception("a message of %s could not be handled", slot.replica.name)
            if not isinstance(report, (Beat, TaskStepped, Preview, Frames)):
                self._jobs.wake.set()

    async def _apply(self, slot: ReplicaSlot, report: ReplicaReport) -> None:
        """Do what a report of ranks asks for."""
        state = slot.state
        if isinstance(report, RanksUp):
            slot.began = time.monotonic()
        elif isinstance(report, RanksDown):
            await self._down(slot, report)
        elif isinstance(report, ModelReady):
            self._model_ready(slot, report)
        elif isinstance(report, ModelFailed):
            reason = f"model {report.name} could not be loaded: {report.message}"
            logger.error("%s", reason)
            if not self._served:
                self._give_up(reason)
        elif isinstance(report, Beat):
            state.ranks, state.bytes = list(report.ranks), dict(report.bytes)
            for name in ("batch", "calls", "rows", "synchronous_steps", "drift"):
                setattr(state, name, getattr(report, name))
        elif report.id in slot.running:
            live, picture = slot.running[report.id]
            if isinstance(report, (Finished, TaskFailed, Cancelled)):
                del slot.running[report.id]
                slot.hurried.discard(report.id)
                del live.tasks[picture]
            if not live.ended:
                await self._apply_to_job(live, picture, report)

    async def _apply_to_job(self, live: JobState, picture: int, report: TaskReport) -> None:
        if isinstance(report, TaskStepped):
            live.steps = report.steps
            self._jobs.stepped(live, picture, report.step, report.batch)
        elif isinstance(report, Preview):
            shown = {"image": picture, "step": report.step, "width": report.width, "height": report.height}
            self._jobs.publish(live, "preview", {**shown, "b64_json": base64.b64encode(report.jpeg).decode()})
        elif isinstance(report, Frames):
            await self._jobs.add_part(live, picture, report)
        elif isinstance(report, Finished):
            await self._finished(live, picture, report)
        elif isinstance(report, TaskFailed):
            await self._fail(live, JobError(code=report.code, message=report.message))

    def _model_ready(self, slot: ReplicaSlot, report: ModelReady) -> None:
        state = slot.state
        self._models[report.name].loaded(report.card)
        for lora, note in report.card.get("lora_notes", {}).items():
            logger.warning("LoRA %s fits %s in part: %s", lora, report.name, note)
        state.models = sorted({*state.models, report.name})
        state.mesh, state.strategy = dict(report.mesh), report.strategy
        facts = {"model": report.name, "configuration": report.strategy, "replica": state.name}
        logger.info("model ready", extra={"facts": facts | {"seconds": round(time.monotonic() - slot.began, 1)}})
        if len(state.models) == len(self._models):
            slot.up, slot.failures, self._served, state.state = True, 0, True, "ready"

    async def _finished(self, live: JobState, picture: int, report: Finished) -> None:
        """Handle a finished image: write its file, then record it."""
        image = JobImage(
            index=picture,
            seed=(live.job.request.seed or 0) + picture,
            url=f"/v1/jobs/{live.id}/images/{picture}",
            width=report.width,
            height=report.height,
            receipt=dict(report.receipt),
            notes=[report.receipt["cut"]] if report.receipt.get("cut") else [],
        )
        queue, results = self._jobs.queue, self._jobs.results

        def change() -> Job | None:
            file = results.write(live.id, f"{picture}.{live.job.request.format}", report.data)
            job = queue.finish(live.id, picture, file, image)
            if job is None:
                results.remove(live.id, file)
            return job

        job = await self._jobs.write(live, change)
        if job is not None:
            live.job = job
            self._jobs.publish(live, "image", image.model_dump(mode="json"))
            if live.ended:
                self._jobs.end(live, job)

    async def _fail(self, live: JobState, error: JobError) -> None:
        self._jobs.end(live, await self._jobs.write(live, partial(self._jobs.queue.fail, live.id, error)))

    # ---- ranks that come and go

    async def _down(self, slot: ReplicaSlot, report: RanksDown) -> None:
        """Handle the end of ranks: their tasks begin again, or fail if the ranks ended while running only them."""
        tasks = list(slot.running.values())
        # All clients are told, and the log.
        requests = [live.job.request for live, _ in tasks]
        prompts = [text for request in requests for text in (request.prompt, request.negative_prompt)]
        report = replace(report, why=without_quotes(report.why, prompts))
        slot.up, slot.running, slot.hurried, slot.final = False, {}, set(), report.final
        state = slot.state
        slot.failures += bool(report.why)
        state.state = "stopped" if slot.gave_up else "restarting"
        state.message, state.models, state.batch, state.ranks = report.why, [], 0, []
        if report.why:
            state.restarts += not report.final
            logger.error("%s: %s", state.name, report.why, extra={"facts": {"replica": state.name}})
        lost: dict[JobState, list[int]] = {}
        for live, picture in tasks:
            del live.tasks[picture]
            if not live.ended:
                lost.setdefault(live, []).append(picture)
        for live, pictures in lost.items():
            # Another task may be the cause.
            if live.job.attempt > 1 and len(lost) == 1 and report.why:
                why = f"{report.why}; it was the second time for this job"
                await self._fail(live, JobError(code=report.code, message=why))
            else:
                # The images wait again: as another attempt of their job, unless the ranks were told to stop.
                again = partial(self._jobs.queue.interrupt, live.id, pictures, bool(report.why))
                job = await self._jobs.write(live, again)
                if job is not None:
                    live.job = job
                    for picture in pictures:
                        live.progress.pop(picture, None)
                    reason = report.why or STOPPING
                    self._jobs.publish(live, "restarted", {"attempt": job.attempt, "reason": reason})
        if report.why and all(slot.gave_up for slot in self.slots):
            often = "" if slot.final else f" {slot.failures} times in a row"
            self._give_up(f"the ranks of {state.name} have failed{often}: {report.why}")
