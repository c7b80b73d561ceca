"""The jobs of a server, in memory for clients and on disk for restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, TypeVar, cast

from ...errors import InputError
from ..errors import RESTART_SECONDS, ResultFile, Stopping, StorageError, UnknownJob
from ..offers import ServedModel
from ..settings import ServiceSettings
from ..types import ENDED, Event, EventName, Job, JobError, JobRequest, Status
from ..worker.protocol import Cancel, Frames
from ..worker.replicas import Replica
from .events import EventLog
from .queue import Queue
from .results import ResultFiles

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Seconds between attempts to write a change, between reports of queue positions, and between clean-ups.
RETRY, LOOK, SWEEP = 0.5, 0.5, 60.0
# Maximum number of ended jobs with events in memory.
ENDED_KEPT = 128
# Event numbers per run of the server: a client of an earlier run gets all events of this run.
RUN = 2**32
# Weight of the latest step in the mean of step times.
LATEST = 0.2


@dataclass(eq=False)
class JobState:
    """A job in memory, with its state and events.

    Attributes:
        steps: of each image, as far as known.
        progress: steps that are done, by image; stepped: when the last one was, on the monotonic clock.
        tasks: where its images are under way.
        position: that clients were told last.
    """

    job: Job
    owner: str
    log: EventLog
    steps: int | None = None
    progress: dict[int, int] = field(default_factory=dict)
    stepped: dict[int, float] = field(default_factory=dict)
    tasks: dict[int, Replica] = field(default_factory=dict)
    position: int | None = None

    @property
    def id(self) -> str:
        """Id of the job."""
        return self.job.id

    @property
    def model(self) -> str:
        """Name of its model."""
        return self.job.request.model

    @property
    def ended(self) -> bool:
        """True if the job has ended."""
        return self.job.status in ENDED

    @property
    def parts(self) -> list[float]:
        """The finished share of each running image, from 0 to 1."""
        return [min(1.0, self.progress.get(picture, 0) / self.steps) if self.steps else 0.0 for picture in self.tasks]

    def task(self, picture: int) -> str:
        """The id of an image's task."""
        return f"{self.id}/{picture}"


class JobStore:
    """All jobs that have not ended, and the latest ended ones.

    Every change that has to survive is written by one thread before a client is told of it, and changes happen one
    after the other, under ``change``. While the folder cannot be written (a full disk, a locked database), what clients
    ask for fails with `StorageError`; what ranks have caused (an image is done, a job has failed) is tried again until
    it is written. A damaged database will never take it: its job fails.

    ``owner`` is the hash of a client's API key, or empty. Calls may overlap.

    Attributes:
        change: the lock of changes, and of reads for a change.
        wake: set when there may be something to do for replicas.
        live_jobs: jobs in memory, by id.
        write_error: why the folder cannot be written now; None: it can.
        stops: no change is tried again that cannot be written.
        on_event: called with every event of a job; None: events are not reported.
    """

    def __init__(self, served: Mapping[str, ServedModel], folder: str | Path, settings: ServiceSettings) -> None:
        """Prepare; `open` opens the queue and the files of results in a folder."""
        self._served, self._folder, self._settings = served, Path(folder), settings
        self.live_jobs: OrderedDict[str, JobState] = OrderedDict()
        # Seconds per step, by model.
        self._pace: dict[str, float] = {}
        self._places: dict[str, int] = {}
        self.write_error: StorageError | None = None
        self.on_event: Callable[[Job, Event], None] | None = None
        self._background: set[asyncio.Future[Any]] = set()
        self._closed = self.stops = False

    async def open(self) -> None:
        """Open the folder, and resume the jobs of an earlier run. Raises `ConfigError`, `StorageError`."""
        self._disk = ThreadPoolExecutor(1, "ditmesh-disk")
        self._closed = self.stops = False
        try:
            self.queue = await self.on_disk(Queue, self._folder, self._settings)
            try:
                self.results = await self.on_disk(ResultFiles, self._folder, self._settings)
                await self.on_disk(self._sweep)
                live = await self.on_disk(self.queue.live)
            except BaseException:
                await self.on_disk(self.queue.close)
                raise
        except BaseException:
            self._disk.shutdown(wait=False)
            raise
        self.change, self.wake = asyncio.Lock(), asyncio.Event()
        self.wake.set()
        for job, owner in live:
            self._add_live(job, owner)
        # They would wait for ever.
        there = ", ".join(self._served)
        for live_job in [live_job for live_job in self.live_jobs.values() if live_job.model not in self._served]:
            message = f"this server has no model {live_job.model!r} any more; submit the job again for one of: {there}"
            logger.error("%s: %s", live_job.id, message)
            error = JobError(code="invalid_request", message=message)
            self.end(live_job, await self.on_disk(self.queue.fail, live_job.id, error))
        await self._update_places()

    async def close(self) -> None:
        """End all event streams, and close the folder."""
        for live in self.live_jobs.values():
            live.log.close()
        # Behind what was asked for before.
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._disk, self.queue.close)
        self._disk.shutdown()

    async def on_disk(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the thread that reads and writes the folder. Raises `Stopping`: it is closed."""
        if self._closed:
            # Clients with open connections ask on.
            raise Stopping("the server is stopping; ask again in a moment", RESTART_SECONDS)
        return await asyncio.get_running_loop().run_in_executor(self._disk, partial(function, *args))

    # ---- what becomes of jobs

    async def accept(
        self,
        id: str,
        request: JobRequest,
        owner: str,
        work: float,
        files: Mapping[str, bytes],
    ) -> Job:
        """Accept a new job; it is on disk when this returns.

        Args:
            work: of one image.
            files: the input images that came with the request, by digest.

        Raises:
            InputError, QueueFull, StorageError: as `Queue.submit`.
        """

        def submit() -> Job:
            self.results.check_space()
            try:
                for digest in {given.digest for given in request.inputs}:
                    # For images of other owners a digest is not enough.
                    earlier = None if digest in files else self.queue.job_with_input(digest, owner)
                    path = None if earlier is None else self.results.path(earlier, f"{digest}.png")[0]
                    if digest not in files and (path is None or not path.exists()):
                        raise InputError(f"input {digest[:16]}… is not on the server any more; send the image again")
                    self.results.write(id, f"{digest}.png", path.read_bytes() if path else files[digest])
                return self.queue.submit(id, request, owner, work)
            except BaseException:
                self.results.remove(id)
                raise

        if self.write_error is not None:
            raise self.write_error
        async with self.change:
            job = await self.on_disk(submit)
            live = self._add_live(job, owner)
            await self._update_places()
            live.position = self._places.get(id, 0)
            self.publish(live, "queued", {"position": live.position})
        self.wake.set()
        return self.view(live)

    def _add_live(self, job: Job, owner: str) -> JobState:
        live = JobState(job, owner, EventLog(self.first_event), job.request.steps)
        if job.status == "running":
            for name, data in _past(job):
                live.log.publish(name, data)
        self.live_jobs[job.id] = live
        return live

    def publish(self, live: JobState, name: EventName, data: dict[str, Any]) -> None:
        """Tell a job's followers of an event."""
        event = live.log.publish(name, data)
        if event is not None and self.on_event is not None:
            self.on_event(live.job, event)

    async def cancel(self, id: str, owner: str) -> Job:
        """Cancel a job: it ends immediately, and its ranks stop at the next step. An ended job does not change.

        Raises:
            UnknownJob, StorageError.
        """

        async def ending() -> Job:
            if self.write_error is not None:
                raise self.write_error
            async with self.change:
                live = self.live_jobs.get(id)
                if live is None:
                    raise UnknownJob(f"there is no job {id!r}, or it has expired")
                self.end(live, await self.on_disk(self.queue.cancel, id, live.parts))
            self.wake.set()
            return self.view(live)

        job = await self.job(id, owner)
        return job if job.status in ENDED else await self._to_the_end(ending())

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that continues to its end even if its caller is cancelled."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return await asyncio.shield(task)

    def end(self, live: JobState, job: Job | None) -> None:
        """End a job: notify its followers, stop its running tasks, and drop the oldest ended jobs.

        None: it had ended before.
        """
        if job is None:
            return
        live.job = job
        self.publish(live, cast("EventName", job.status), self.view(live).model_dump(mode="json"))
        for picture, replica in live.tasks.items():
            replica.send(Cancel(live.task(picture)))
        self.live_jobs.move_to_end(job.id)
        ended = [id for id, one in self.live_jobs.items() if one.ended]
        for id in ended[:-ENDED_KEPT]:
            del self.live_jobs[id]

    def begin(self, live: JobState, picture: int, replica: Replica) -> None:
        """Record that an image is assigned to a replica."""
        if live.job.status == "queued":
            started = live.job.started or time.time()
            live.job = live.job.model_copy(update={"status": "running", "started": started})
            self.publish(live, "started", {"attempt": live.job.attempt})
        self._places.pop(live.id, None)
        live.position = None
        live.progress.pop(picture, None)
        live.stepped.pop(picture, None)
        live.tasks[picture] = replica

    def stepped(self, live: JobState, picture: int, step: int, batch: int) -> None:
        """Record that an image has finished a step in a batch of ``batch`` rows."""
        now, before = time.monotonic(), live.stepped.get(picture)
        steps = step - live.progress.get(picture, 0)
        live.stepped[picture] = now
        if before is not None and steps > 0:
            seconds = (now - before) / steps
            self._pace[live.model] = (1 - LATEST) * self._pace.get(live.model, seconds) + LATEST * seconds
        live.progress[picture] = step
        told = {"image": picture, "step": step, "steps": live.steps, "eta": self._eta(live), "batch": batch}
        self.publish(live, "step", told)

    async def add_part(self, live: JobState, picture: int, frames: Frames) -> None:
        """Write the file of some frames of a video, and tell of it. `StorageError`: it cannot be written."""
        await self.on_disk(self.results.write, live.id, _part_of(live.job, picture, frames.part), frames.data)
        url = f"/v1/jobs/{live.id}/images/{picture}?part={frames.part}"
        place = {"part": frames.part, "first": frames.first, "count": frames.count}
        self.publish(live, "frames", {"image": picture, **place, "url": url})

    # ---- how clients see them

    async def job(self, id: str, owner: str) -> Job:
        """A job. Raises `UnknownJob`."""
        live = self.live_jobs.get(id)
        if live is not None and live.owner == owner:
            return self.view(live)
        return await self.on_disk(self.queue.job, id, owner)

    async def jobs(self, owner: str, limit: int = 50, status: Status | None = None) -> list[Job]:
        """The newest first."""
        jobs = await self.on_disk(self.queue.jobs, owner, limit, status)
        return [self.view(live) if (live := self.live_jobs.get(job.id)) else job for job in jobs]

    async def events(self, id: str, owner: str, after: int = 0) -> AsyncGenerator[Event]:
        """Iterate over the events after number ``after``, including future ones, up to the last. Raises `UnknownJob`.

        Of a job of an earlier run only what its state says is repeated; previews are never repeated.
        """
        live = self.live_jobs.get(id)
        if live is not None and live.owner == owner:
            async for event in live.log.follow(after):
                yield event
            return
        # The job ended long ago or in an earlier run: its number of events is unknown, so all are sent.
        job, first = await self.job(id, owner), self.first_event
        told = _past(job) if after < first else []
        if job.status in ENDED:
            told.append((cast("EventName", job.status), job.model_dump(mode="json")))
        for number, (name, data) in enumerate(told, max(after, first - 1) + 1):
            yield Event(id=number, event=name, data=data)

    async def result(self, id: str, index: int, owner: str, part: int | None = None) -> ResultFile:
        """The file of a result, or of a part of a video. Raises `UnknownJob`."""
        job = await self.job(id, owner)
        file = await self.on_disk(self.queue.file, id, index) if part is None else _part_of(job, index, part)
        if file is not None:
            path, media = self.results.path(id, file)
            if path.exists():
                return ResultFile(path, media)
        what = f"image {index}" if part is None else f"part {part} of image {index}"
        raise UnknownJob(f"job {id} has no {what}, or not yet")

    @property
    def first_event(self) -> int:
        """Number of the first event of this run."""
        return (self.queue.run - 1) * RUN + 1

    def view(self, live: JobState) -> Job:
        """The current state of a job for its owner."""
        job = live.job
        done = [live.steps if image.url is not None else live.progress.get(image.index, 0) for image in job.images]
        update: dict[str, Any] = {
            "step": sum(filter(None, done)),
            "steps": live.steps * job.request.n if live.steps else None,
        }
        if not live.ended:
            update["position"] = self._places.get(job.id, 0) if job.status == "queued" else None
            update["eta"] = self._eta(live)
        return job.model_copy(update=update)

    def _eta(self, live: JobState) -> float | None:
        """Seconds until a running job is done if its images go on as many at a time as now."""
        pace, running = self._pace.get(live.model), len(live.tasks)
        if pace is None or not live.steps or not running:
            return None
        undone = sum(image.url is None for image in live.job.images)
        left = max(live.steps - live.progress.get(picture, 0) for picture in live.tasks)
        return round(pace * (left + live.steps * ceil((undone - running) / running)), 2)

    async def _update_places(self) -> None:
        self._places = await self.on_disk(self.queue.places) if self.queue.queued else {}

    # ---- the disk

    async def write(self, live: JobState, change: Callable[[], Job | None]) -> Job | None:
        """Write a change of a job to disk, under ``change``; waits while the folder cannot be written.

        Returns:
            What the change returned; None if it was not written: the database is damaged, or the server has stopped.
        """
        while True:
            try:
                job = await self.on_disk(change)
            except StorageError as error:
                logger.error("%s", error)
                if error.broken:
                    failure = JobError(code="storage", message=str(error))
                    self.end(live, live.job.model_copy(update={"status": "failed", "error": failure}))
                if error.broken or self.stops:
                    self.write_error = None
                    return None
                if self.write_error is None:
                    self.publish(live, "paused", {"reason": str(error)})
                self.write_error = error
                # Old results may make room.
                with contextlib.suppress(StorageError):
                    await self.sweep()
                await asyncio.sleep(RETRY)
            else:
                self.write_error = None
                return job

    async def maintain(self) -> None:
        """Report queue positions and remove expired jobs at intervals, until cancelled."""
        swept = time.monotonic()
        while True:
            await asyncio.sleep(LOOK)
            try:
                async with self.change:
                    await self._update_places()
                    for id, place in self._places.items():
                        live = self.live_jobs.get(id)
                        if live is not None and live.position != place and live.log.readers:
                            live.position = place
                            self.publish(live, "queued", {"position": place})
                    if time.monotonic() - swept > SWEEP:
                        swept = time.monotonic()
                        await self.sweep()
            except StorageError as error:
                logger.error("%s", error)
            except Exception:
                logger.exception("looking after the queue failed")
            self.wake.set()

    async def sweep(self) -> None:
        """Remove expired jobs, and the oldest jobs beyond the limits; under ``change``."""
        for id in await self.on_disk(self._sweep):
            self.live_jobs.pop(id, None)

    def _sweep(self) -> list[str]:
        gone: list[str] = []
        while more := (self.queue.expired() or (self.queue.oldest(8) if self.results.over else [])):
            self.queue.forget(more)
            for id in more:
                self.results.remove(id)
            gone += more
        self.results.sweep(self.queue.ids())
        return gone


def _part_of(job: Job, index: int, part: int) -> str:
    return f"{index}.part{part}.{job.request.format}"


def _past(job: Job) -> list[tuple[EventName, dict[str, Any]]]:
    told: list[tuple[EventName, dict[str, Any]]] = []
    if job.started is not None:
        told.append(("started", {"attempt": job.attempt}))
    for image in job.images:
        if image.url is not None:
            told.append(("image", image.model_dump(mode="json")))
    return told
