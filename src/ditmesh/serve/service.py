"""The server's engine: one queue, and replicas that its tasks are shared out to."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from .._version import __version__
from ..errors import ConfigError, InputError, did_you_mean
from ..launch import DeviceChoice, Launcher, default_threads, launcher, resolve_device
from ..launch.pool import PRELOAD
from .backend import NoSpace, ResultFile, Stopping, UnknownJob
from .events import EventLog
from .offers import Offer
from .protocol import (
    Beat,
    Began,
    Cancel,
    Cancelled,
    Finished,
    Load,
    Message,
    ModelFailed,
    ModelReady,
    ModelSpec,
    Paused,
    Preview,
    Start,
    Stepped,
    Task,
    TaskFailed,
)
from .queue import Head, Place, Queue
from .replicas import Down, Limits, Replica, Said, Up
from .results import Results
from .types import (
    ENDED,
    Event,
    EventName,
    Job,
    JobError,
    JobImage,
    JobRequest,
    ModelCard,
    ReplicaState,
    ServerState,
    Status,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Seconds: between looks at what waits, at what has expired; for which a replica goes on with the models it has before
# it gives way to a job that needs another; for which a client that asks while the server stops should wait.
LOOK, SWEEP, SWITCH, AWAY = 0.5, 60.0, 2.0, 10.0
# Ended jobs whose events are kept in memory; attempts to load a model, and to start ranks before others do not wait.
ENDED_KEPT, LOADS, STARTS = 128, 2, 3
# Numbers of events in one run of the server: a client that was cut off from an earlier run gets all of this one's.
RUN = 2**32
# Weight of the latest step in the mean of steps' seconds; pictures over which the ranks' speed is measured.
LATEST, MEASURED = 0.2, 64


@dataclass
class Live:
    """A job in memory, with what has happened to it.

    Attributes:
        steps: of each picture, as far as known.
        progress: steps that are done, by picture; stepped: when the last one was, on the monotonic clock.
        position: that clients were told last.
    """

    job: Job
    owner: str
    work: float
    log: EventLog
    steps: int | None = None
    progress: dict[int, int] = field(default_factory=dict)
    stepped: dict[int, float] = field(default_factory=dict)
    position: int | None = None

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def ended(self) -> bool:
        return self.job.status in ENDED

    def part(self, picture: int) -> float:
        """How much of a picture is done, from 0 to 1."""
        return min(1.0, self.progress.get(picture, 0) / self.steps) if self.steps else 0.0


@dataclass
class Group:
    """A replica as the service sees it.

    Attributes:
        up: it takes commands.
        models: loaded.
        loading: the model that it was told to load.
        running: its tasks, by id: jobs and numbers of pictures.
        alone: the job that has it for itself, since ranks have failed under it.
        reserved: no task is given to it until it has none: then such a job gets it.
        failures: how often its ranks have failed since they last did something.
    """

    replica: Replica
    state: ReplicaState
    up: bool = False
    models: dict[str, ModelReady] = field(default_factory=dict)
    loading: str = ""
    running: dict[str, tuple[Live, int]] = field(default_factory=dict)
    alone: str = ""
    reserved: bool = False
    failures: int = 0

    @property
    def idle(self) -> bool:
        return self.up and not self.running and not self.loading


class Speed:
    """Work that all ranks together do in a second, over the last pictures, while anything was under way."""

    def __init__(self) -> None:
        self._done: deque[tuple[float, float]] = deque(maxlen=MEASURED)
        self._busy, self._since = 0.0, None

    def running(self, tasks: int) -> None:
        """So many tasks run from now on."""
        now = time.monotonic()
        if self._since is not None:
            self._busy += now - self._since
        self._since: float | None = now if tasks else None

    def done(self, work: float) -> None:
        """A picture is done."""
        self._done.append((self._busy, work))

    @property
    def rate(self) -> float | None:
        """Work per second; None: nothing has been done yet."""
        if not self._done:
            return None
        first = self._done[0][0] if len(self._done) > 1 else 0.0
        works = [work for _, work in self._done][len(self._done) > 1 :]
        return sum(works) / max(self._done[-1][0] - first, 1e-3)


class Service:
    """Jobs in a queue on disk, shared out to replicas; implements `backend.Backend`.

    The event loop of `start` has all state; every change of it that has to survive is written by one other thread
    before anybody is told. Tasks of different jobs run on a replica at the same time, up to ``most_running``. When
    ranks fail, the jobs that had tasks there begin those again, once, each without company: so the one under which they
    fail again is the one to blame, and fails with the reason.

    A picture that is done while the disk is full waits in memory and is written as soon as there is room; meanwhile
    no task begins and no job is accepted. When the server is stopped or killed before that, the job is still in the
    queue, and the same picture is made again.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        folder: str | Path,
        *,
        devices: int = 1,
        replicas: int = 1,
        device: DeviceChoice = "auto",
        threads: int | None = None,
        timeout: float = 600.0,
        launcher: str | None = None,
        most_loaded: int = 1,
        most_running: int = 8,
        limits: Limits | None = None,
        keep: float = 86400.0,
        most_bytes: int = 10 * 2**30,
        reserve: int = 64 * 2**20,
        most_waiting: int = 1000,
        most_per_owner: int = 250,
        weights: Mapping[str, float] | None = None,
        function: Callable[..., None] | None = None,
    ) -> None:
        """Look at the models; `start` starts.

        Args:
            specs: the models; the first is the default, and is loaded at the start.
            folder: for the queue and the results; no other server may use it.
            devices: ranks of each replica.
            replicas: number of groups of ranks.
            device, threads, timeout: as of `RankPool`; ``threads`` default: all cores shared out to all ranks.
            launcher: by name; see `launch.launcher`.
            most_loaded: models that a replica holds at a time.
            most_running: tasks that a replica runs at a time.
            limits: when ranks are given up.
            keep: seconds for which results are kept.
            most_bytes: of all results and inputs; the oldest ended jobs are forgotten early where it takes that.
            reserve: bytes of the disk that have to be free for a job to be accepted.
            most_waiting, most_per_owner, weights: see `Queue`.
            function: what ranks run; see `Replica`.

        Raises:
            InputError: there is no such model, or two of the same name.
        """
        if not specs:
            raise InputError("a server needs a model; give one")
        self._offers = {spec.name: Offer.of(spec) for spec in specs}
        if len(self._offers) < len(specs):
            raise InputError(f"{len(specs)} models have {len(self._offers)} names; give each its own")
        for spec in specs:
            if not isinstance(spec.config, str):
                spec.config.check_world_size(devices)
        for name, number in (("devices", devices), ("replicas", replicas), ("most_running", most_running)):
            if number < 1:
                raise ConfigError(f"{name} {number} is not possible; use at least 1")
        self._devices, self._most_loaded, self._most_running = devices, most_loaded, most_running
        self._open = partial(
            Queue, folder, keep=keep, most=most_waiting, most_per_owner=most_per_owner, weights=weights
        )
        self._open_results = partial(Results, folder, keep=keep, most_bytes=most_bytes, reserve=reserve)
        limits = limits or Limits()
        self._groups = [
            Group(
                Replica(
                    f"replica-{number}",
                    partial(_ranks, launcher, devices, device, threads, timeout, number, replicas, limits.stopped),
                    self._heard,
                    limits,
                    function,
                ),
                ReplicaState(name=f"replica-{number}", state="starting"),
            )
            for number in range(replicas)
        ]
        self._group_of = {group.replica: group for group in self._groups}
        self._lives: OrderedDict[str, Live] = OrderedDict()
        # Loads that have failed, by model.
        self._failed_loads: dict[str, int] = {}
        # Seconds per step, by model; the ranks' speed.
        self._pace: dict[str, float] = {}
        self._speed = Speed()
        self._places: dict[str, Place] = {}
        # Changes that the disk has not taken yet, in order.
        self._owed: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self._stopping = False
        self._loops: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Future[Any]] = set()

    # ---- start and stop

    async def start(self) -> None:
        """Start the replicas, and take up the jobs of an earlier run. Returns before models are loaded.

        Pictures that were under way when that run ended are begun again, which counts as no attempt.

        Raises:
            ConfigError: another server uses the folder, or its queue is of another version.
            NoSpace: the folder cannot be written.
        """
        self._loop = asyncio.get_running_loop()
        self._disk = ThreadPoolExecutor(1, "ditmesh-disk")
        try:
            self._queue = await self._on_disk(self._open)
            self._results = await self._on_disk(self._open_results)
            if self._queue.aside is not None:
                logger.error("the queue could not be read and was moved to %s; a new one begins", self._queue.aside)
            await self._on_disk(self._sweep_files)
        except BaseException:
            self._disk.shutdown(wait=False)
            raise
        # Every change of jobs and of what is known of them, one after the other.
        self._change = asyncio.Lock()
        self._inbox: asyncio.Queue[tuple[Group, Said] | None] = asyncio.Queue()
        self._wake = asyncio.Event()
        self._wake.set()
        for job, owner in await self._on_disk(self._queue.live):
            self._take_up(job, owner)
        await self._find_places()
        for group in self._groups:
            group.replica.start()
        self._loops = [asyncio.create_task(loop()) for loop in (self._listen, self._dispatch, self._look)]

    async def stop(self, grace: float) -> None:
        """Take no more jobs, end the pictures under way within ``grace`` seconds; what is left stays queued."""
        self._stopping = True
        limit = time.monotonic() + grace
        while time.monotonic() < limit and (self._owed or any(group.running for group in self._groups)):
            await asyncio.sleep(0.05)
        for group in self._groups:
            group.replica.stop()
        await asyncio.gather(*(asyncio.to_thread(group.replica.join) for group in self._groups))
        # Behind all that the replicas have said.
        self._loop.call_soon(self._inbox.put_nowait, None)
        listen, *others = self._loops
        await asyncio.gather(listen, return_exceptions=True)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, *self._background, return_exceptions=True)
        for live in self._lives.values():
            live.log.close()
        await self._on_disk(self._queue.close)
        self._disk.shutdown()

    # ---- what clients ask for

    async def submit(self, request: JobRequest, owner: str) -> Job:
        """Accept a job; see `Backend.submit`."""
        if self._stopping:
            raise Stopping("the server is stopping and takes no more jobs; ask again in a moment", AWAY)
        name = request.model or next(iter(self._offers))
        offer = self._offers.get(name)
        if offer is None:
            raise InputError(
                f"model {name[:80]!r} is none of the server's ({', '.join(self._offers)})"
                f"{did_you_mean(name, self._offers)}"
            )
        seed = secrets.randbelow(2**32) if request.seed is None else request.seed
        request = request.model_copy(update={"model": name, "seed": seed})
        offer.check(request, self._devices)
        # A client that leaves must not leave half of a job.
        return await self._whole(self._accept(request, owner, offer.work(request)))

    async def _accept(self, request: JobRequest, owner: str, work: float) -> Job:
        id = f"job_{secrets.token_hex(16)}"
        async with self._change:
            if self._owed:
                raise NoSpace("the server's disk is full; ask again when room has been made")
            job = await self._on_disk(self._write_down, id, request, owner, work, self._speed.rate)
            live = self._take_up(job, owner)
            await self._find_places()
            live.position = self._places[id].position if id in self._places else 0
            live.log.publish("queued", {"position": live.position})
        self._wake.set()
        return self._view(live)

    def _write_down(self, id: str, request: JobRequest, owner: str, work: float, rate: float | None) -> Job:
        self._results.check_space()
        for one in request.inputs:
            if self._results.input(one.digest) is None:
                raise InputError(f"input {one.digest[:16]}… is not here, or no longer; send the picture again")
        return self._queue.submit(id, request, owner, work, rate)

    async def put_input(self, data: bytes) -> str:
        """Keep an input picture; its digest. Raises `NoSpace`."""
        return await self._on_disk(self._results.put_input, data)

    async def job(self, id: str, owner: str) -> Job:
        """A job. Raises `UnknownJob`."""
        live = self._lives.get(id)
        if live is not None and live.owner == owner:
            return self._view(live)
        return await self._on_disk(self._queue.job, id, owner)

    async def jobs(self, owner: str, limit: int = 50, status: Status | None = None) -> list[Job]:
        """The newest first."""
        jobs = await self._on_disk(self._queue.jobs, owner, limit, status)
        return [self._view(self._lives[job.id]) if job.id in self._lives else job for job in jobs]

    async def cancel(self, id: str, owner: str) -> Job:
        """Cancel a job: it has ended at once, and its ranks stop at the next step. Raises `UnknownJob`, `NoSpace`."""
        job = await self.job(id, owner)
        return job if job.status in ENDED else await self._whole(self._cancel(id))

    async def _cancel(self, id: str) -> Job:
        async with self._change:
            live = self._lives[id]
            done = [live.part(picture) for _, one, picture in self._tasks() if one is live]
            job = await self._on_disk(self._queue.cancel, id, done)
            if job is not None:
                self._end(live, job)
        self._wake.set()
        return self._view(live)

    async def events(self, id: str, owner: str, after: int = 0) -> AsyncIterator[Event]:
        """Events behind number ``after``; see `Backend.events`. Raises `UnknownJob`."""
        live = self._lives.get(id)
        if live is not None and live.owner == owner:
            async for event in live.log.follow(after):
                yield event
            return
        # It has ended long ago, or in an earlier run.
        for event in _told_by(await self.job(id, owner), max(after, self._first - 1), after < self._first):
            yield event

    async def result(self, id: str, index: int, owner: str) -> ResultFile:
        """A result's file. Raises `UnknownJob`."""
        await self._on_disk(self._queue.job, id, owner)
        file = await self._on_disk(self._queue.file, id, index)
        if file is not None:
            path, media = self._results.path(id, file)
            if path.exists():
                return ResultFile(path, media)
        raise UnknownJob(f"job {id} has no picture {index}, or not yet")

    def models(self) -> list[ModelCard]:
        """The models, as far as they are known."""
        loaded = {name for group in self._groups for name in group.models}
        return [offer.card.model_copy(update={"loaded": name in loaded}) for name, offer in self._offers.items()]

    def state(self) -> ServerState:
        """The server as it is; ``ready``: a replica has a model loaded."""
        for group in self._groups:
            group.state.running = sorted({live.id for live, _ in group.running.values()})
        return ServerState(
            version=__version__,
            ready=not self._stopping and any(group.state.state == "ready" for group in self._groups),
            queued=self._queue.queued,
            running=self._queue.running,
            replicas=[group.state.model_copy() for group in self._groups],
        )

    # ---- jobs in memory

    @property
    def _first(self) -> int:
        """Number of the first event of this run."""
        return (self._queue.run - 1) * RUN + 1

    def _take_up(self, job: Job, owner: str) -> Live:
        """Keep a job in memory."""
        offer = self._offers.get(job.request.model)
        live = Live(job, owner, offer.work(job.request) if offer else 1.0, EventLog(self._first), job.request.steps)
        if job.status == "running":
            live.log.publish("started", {"attempt": job.attempt})
            for image in job.images:
                if image.url is not None:
                    live.log.publish("image", image.model_dump(mode="json"))
        self._lives[job.id] = live
        return live

    def _tasks(self) -> list[tuple[Group, Live, int]]:
        """All tasks under way: replica, job, number of the picture."""
        return [(group, *task) for group in self._groups for task in group.running.values()]

    def _end(self, live: Live, job: Job) -> None:
        """A job has ended: tell who follows it, stop what runs of it, and forget the oldest ones that have."""
        live.job = job
        live.log.publish(_event_of(job.status), self._view(live).model_dump(mode="json"))
        for group, one, picture in self._tasks():
            if one is live:
                group.replica.send(Cancel(_task_id(live, picture)))
        self._lives.move_to_end(job.id)
        ended = [id for id, one in self._lives.items() if one.ended]
        for id in ended[:-ENDED_KEPT]:
            del self._lives[id]

    def _view(self, live: Live) -> Job:
        """A job as its owner sees it now."""
        job, n = live.job, live.job.request.n
        done = [live.steps if image.url is not None else live.progress.get(image.index, 0) for image in job.images]
        update: dict[str, Any] = {
            "step": sum(filter(None, done)),
            "steps": live.steps * n if live.steps else None,
            "position": None,
            "eta": None,
        }
        if not live.ended:
            place = self._places.get(job.id) if job.status == "queued" else None
            update["position"] = place.position if place else (0 if job.status == "queued" else None)
            update["eta"] = self._eta(live, place)
        return job.model_copy(update=update)

    def _eta(self, live: Live, place: Place | None) -> float | None:
        """Seconds until a job is done, as far as that can be told."""
        pace, rate = self._pace.get(live.job.request.model), self._speed.rate
        running = [picture for _, one, picture in self._tasks() if one is live]
        undone = sum(image.url is None for image in live.job.images)
        waiting = (undone - len(running)) * live.work
        seconds = 0.0
        if waiting or place is not None:
            if rate is None:
                return None
            seconds = ((place.work if place else 0.0) + waiting) / rate
        if running:
            if pace is None or not live.steps:
                return None
            seconds += max(live.steps - live.progress.get(picture, 0) for picture in running) * pace
        return round(max(0.0, seconds), 2)

    # ---- the disk

    async def _on_disk(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the one thread that reads and writes the folder."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, partial(function, *args))

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that goes on to its end even if whoever waits for it goes away."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return await asyncio.shield(task)

    async def _keep(self, live: Live, change: Callable[[], T], then: Callable[[T], None]) -> None:
        """Write a change down, then go on; while the disk is full both wait for room."""
        if not self._owed:
            try:
                then(await self._on_disk(change))
                return
            except NoSpace as error:
                logger.error("%s", error)
                live.log.publish("paused", {"reason": str(error)})
        self._owed.append((change, then))

    async def _pay(self) -> None:
        """Write down what is owed, as far as there is room."""
        while self._owed:
            change, then = self._owed[0]
            try:
                result = await self._on_disk(change)
            except NoSpace:
                return
            self._owed.popleft()
            then(result)
            self._wake.set()

    async def _look(self) -> None:
        """Look now and then at what is owed, what waits and what has expired."""
        swept = time.monotonic()
        while True:
            await asyncio.sleep(LOOK)
            try:
                async with self._change:
                    await self._pay()
                    await self._find_places()
                    self._tell_positions()
                    if time.monotonic() - swept > SWEEP:
                        swept = time.monotonic()
                        for id in await self._on_disk(self._sweep_files):
                            self._lives.pop(id, None)
                self._wake.set()
            except NoSpace as error:
                logger.error("%s", error)
            except Exception:
                logger.exception("looking after the queue failed")

    def _sweep_files(self) -> list[str]:
        """Forget jobs whose time is over, and the oldest ones when there is too much; which."""
        gone = self._queue.expired()
        while True:
            self._queue.forget(gone)
            for id in gone:
                self._results.remove(id)
            more = self._queue.oldest(8) if self._results.over else []
            if not more:
                break
            gone = [*gone, *more]
        self._results.sweep(self._queue.ids(), self._queue.inputs())
        return gone

    async def _find_places(self) -> None:
        self._places = await self._on_disk(self._queue.places) if self._queue.queued else {}

    def _tell_positions(self) -> None:
        for id, place in self._places.items():
            live = self._lives.get(id)
            if live is not None and live.position != place.position and live.log.readers:
                live.position = place.position
                live.log.publish("queued", {"position": place.position})

    # ---- tasks to replicas

    async def _dispatch(self) -> None:
        """Give tasks to replicas whenever something has changed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._stopping:
                continue
            try:
                async with self._change:
                    # One at a time to the replica that has the fewest.
                    fed = {group.replica for group in self._groups}
                    while fed and not self._owed:
                        group = min(
                            (one for one in self._groups if one.replica in fed), key=lambda one: len(one.running)
                        )
                        if not await self._feed(group):
                            fed.discard(group.replica)
            except NoSpace as error:
                # `_look` tries again.
                logger.error("%s", error)
            except Exception:
                logger.exception("giving tasks to replicas failed")

    async def _feed(self, group: Group) -> bool:
        """Give a replica its next task, if it may have one; whether it got one."""
        if not group.up or group.loading or len(group.running) >= 2 * self._most_running:
            return False
        if group.reserved and group.running:
            return False
        head = await self._on_disk(self._choose(group))
        if head is None:
            return False
        if len(group.running) >= self._most_running:
            # Only the more urgent: less urgent tasks pause for them.
            priorities = [live.job.request.priority for live, _ in group.running.values()]
            if sum(head.priority <= priority for priority in priorities) >= self._most_running:
                return False
        if head.again:
            if not (group.idle or group.alone == head.id):
                group.reserved = True
                return False
            group.alone = head.id
        group.reserved = False
        if head.model not in group.models:
            # Whatever it may unload must not be at work.
            if len(group.models) < self._most_loaded or not group.running:
                self._load(group, head.model)
            return False
        picture = await self._on_disk(self._queue.begin, head.id)
        if picture is None:
            return False
        self._begin(group, self._lives[head.id], picture)
        return True

    def _choose(self, group: Group) -> Callable[[], Head | None]:
        """What finds the job for a replica, on the disk's thread."""
        if group.alone and group.running:
            return partial(self._queue.head, job=group.alone)
        group.alone = ""
        others = [one for one in self._groups if one is not group]
        # A job that wants ranks for itself need not wait for this replica's when others are free, or about to be.
        elsewhere = any(one.idle or one.reserved or (not one.up and 0 < one.failures < STARTS) for one in others)
        again = group.idle or not elsewhere
        models, offered = set(group.models), set(self._offers)
        there = {name for one in others for name in (*one.models, one.loading)}

        def choose() -> Head | None:
            head = self._queue.head(offered, again=again)
            if head is None or head.model in models:
                return head
            own = self._queue.head(models, again=again)
            if own is not None and (head.model in there or time.time() - head.since < SWITCH):
                return own
            return head

        return choose

    def _load(self, group: Group, name: str) -> None:
        group.loading = name
        group.replica.send(Load(self._offers[name].spec, self._most_loaded))

    def _begin(self, group: Group, live: Live, picture: int) -> None:
        """A task begins."""
        if live.job.status == "queued":
            live.job = live.job.model_copy(update={"status": "running", "started": live.job.started or time.time()})
            live.log.publish("started", {"attempt": live.job.attempt})
        self._places.pop(live.id, None)
        live.position = None
        live.progress.pop(picture, None)
        live.stepped.pop(picture, None)
        id = _task_id(live, picture)
        group.running[id] = (live, picture)
        self._speed.running(len(self._tasks()))
        files = {one.digest: str(self._results.input(one.digest) or "") for one in live.job.request.inputs}
        group.replica.send(Start(Task(id, live.job.request.model, live.job.request, picture, files)))

    # ---- what replicas say

    def _heard(self, replica: Replica, said: Said) -> None:
        """Called in a replica's thread."""
        with suppress(RuntimeError):
            # The loop may be closed when this process ends.
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, (self._group_of[replica], said))

    async def _listen(self) -> None:
        while (item := await self._inbox.get()) is not None:
            group, said = item
            try:
                async with self._change:
                    if isinstance(said, Up):
                        await self._up(group)
                    elif isinstance(said, Down):
                        await self._down(group, said)
                    elif isinstance(said, ModelReady):
                        self._loaded(group, said)
                    elif isinstance(said, ModelFailed):
                        group.loading = ""
                        await self._load_failed(said.name, JobError(code="internal", message=said.message), LOADS)
                    elif isinstance(said, Beat):
                        self._beat(group, said)
                    elif said.id in group.running:
                        await self._of_task(group, *group.running[said.id], said)
            except Exception:
                logger.exception("what %s said was not understood", group.replica.name)
            if not isinstance(said, (Beat, Began, Stepped, Preview, Paused)):
                self._wake.set()

    async def _up(self, group: Group) -> None:
        group.up = True
        head = await self._on_disk(self._queue.head, set(self._offers))
        name = head.model if head is not None else next(iter(self._offers))
        if self._failed_loads.get(name, 0) < LOADS:
            self._load(group, name)

    def _loaded(self, group: Group, said: ModelReady) -> None:
        group.loading, group.failures = "", 0
        self._failed_loads.pop(said.name, None)
        for name in said.unloaded:
            group.models.pop(name, None)
        group.models[said.name] = said
        self._offers[said.name].loaded(said.card)
        group.state.state, group.state.models = "ready", list(group.models)
        group.state.mesh, group.state.strategy = dict(said.mesh), said.strategy

    def _beat(self, group: Group, said: Beat) -> None:
        state = group.state
        state.ranks, state.bytes = list(said.ranks), dict(said.bytes)
        state.batch, state.calls, state.rows = said.batch, said.calls, said.rows
        state.synchronous_steps, state.drift = said.synchronous_steps, said.drift

    async def _of_task(self, group: Group, live: Live, picture: int, said: Message) -> None:
        """What a replica says of a task."""
        if isinstance(said, (Finished, TaskFailed, Cancelled)):
            del group.running[said.id]
            self._speed.running(len(self._tasks()))
        if live.ended:
            return
        if isinstance(said, Began):
            live.steps = said.steps or live.steps
        elif isinstance(said, Stepped):
            live.steps = said.steps
            self._stepped(live, picture, said)
        elif isinstance(said, Preview):
            jpeg = base64.b64encode(said.jpeg).decode()
            shown = {"image": picture, "step": said.step, "width": said.width, "height": said.height}
            live.log.publish("preview", {**shown, "b64_json": jpeg})
        elif isinstance(said, Paused):
            live.log.publish("paused", {"reason": said.reason})
        elif isinstance(said, Finished):
            await self._finished(live, picture, said)
        elif isinstance(said, TaskFailed):
            await self._task_failed(group, live, picture, said)
        elif isinstance(said, Cancelled):
            # Nobody has asked for that.
            await self._again(live, [picture], "the ranks have given it back", counts=False)

    def _stepped(self, live: Live, picture: int, said: Stepped) -> None:
        now, steps = time.monotonic(), said.step - live.progress.get(picture, 0)
        before = live.stepped.get(picture)
        live.stepped[picture] = now
        if before is not None and steps > 0:
            model, seconds = live.job.request.model, (now - before) / steps
            self._pace[model] = (1 - LATEST) * self._pace.get(model, seconds) + LATEST * seconds
        live.progress[picture] = said.step
        live.log.publish(
            "step",
            {
                "image": picture,
                "step": said.step,
                "steps": said.steps,
                "batch": said.batch,
                "eta": self._eta(live, None),
            },
        )

    async def _finished(self, live: Live, picture: int, said: Finished) -> None:
        """A picture is done: its file is written, then that it is there."""
        url = f"/v1/jobs/{live.id}/images/{picture}"
        image = JobImage(
            index=picture,
            seed=(live.job.request.seed or 0) + picture,
            url=url,
            width=said.width,
            height=said.height,
            receipt=dict(said.receipt),
        )
        self._speed.done(live.work)

        def change() -> Job | None:
            file = self._results.write(live.id, picture, said.data)
            job = self._queue.finish(live.id, picture, file, image)
            if job is None:
                self._results.remove(live.id, file)
            return job

        def then(job: Job | None) -> None:
            if job is not None and not live.ended:
                live.job = job
                live.log.publish("image", image.model_dump(mode="json"))
                if job.status in ENDED:
                    self._end(live, job)

        await self._keep(live, change, then)

    async def _task_failed(self, group: Group, live: Live, picture: int, said: TaskFailed) -> None:
        company = any(one is not live for one, _ in group.running.values())
        if said.code == "out_of_memory" and company and live.job.attempt == 1:
            # There may be enough for it alone.
            await self._again(live, [picture], said.message)
        else:
            await self._fail(live, JobError(code=said.code, message=said.message))

    async def _fail(self, live: Live, error: JobError) -> None:
        await self._keep(live, lambda: self._queue.fail(live.id, error), lambda job: job and self._end(live, job))

    async def _again(self, live: Live, pictures: Iterable[int], why: str, counts: bool = True) -> None:
        """Pictures have to be begun again."""
        pictures = list(pictures)

        def then(job: Job | None) -> None:
            if job is None:
                return
            live.job = job
            for picture in pictures:
                live.progress.pop(picture, None)
            live.log.publish("restarted", {"attempt": job.attempt, "reason": why})

        await self._keep(live, lambda: self._queue.interrupt(live.id, pictures, counts), then)

    async def _down(self, group: Group, said: Down) -> None:
        """A replica's ranks are gone: what they were at begins again, or fails when they have failed under it alone."""
        tasks, loading = list(group.running.values()), group.loading
        group.up, group.loading, group.alone, group.reserved = False, "", "", False
        group.running, group.models = {}, {}
        self._speed.running(len(self._tasks()))
        state = group.state
        state.state = "stopped" if said.final else "restarting"
        state.message, state.models, state.batch, state.ranks = said.why, [], 0, []
        if said.why:
            group.failures += 1
            state.restarts += not said.final
            logger.error("%s: %s", group.replica.name, said.why, extra={"facts": {"replica": group.replica.name}})
        pictures: dict[str, list[int]] = {}
        lives = {live.id: live for live, _ in tasks if not live.ended}
        for live, picture in tasks:
            pictures.setdefault(live.id, []).append(picture)
        for live in lives.values():
            # Company, or a model that was being loaded, may be to blame.
            if live.job.attempt > 1 and len(lives) == 1 and said.why and not loading:
                again = f"{said.why}; it was the second time for this job"
                await self._fail(live, JobError(code=said.code, message=again))
            else:
                await self._again(live, pictures[live.id], said.why, counts=bool(said.why) and not loading)
        if loading and said.why:
            await self._load_failed(loading, JobError(code=said.code, message=said.why), 1)

    async def _load_failed(self, name: str, error: JobError, attempts: int) -> None:
        """A model could not be loaded: after `LOADS` attempts the jobs that wait for it fail."""
        self._failed_loads[name] = self._failed_loads.get(name, 0) + attempts
        if self._failed_loads[name] < LOADS:
            return
        error = JobError(code=error.code, message=f"model {name} could not be loaded: {error.message}")
        logger.error("%s", error.message)
        running = {live.id for _, live, _ in self._tasks()}
        for live in list(self._lives.values()):
            if live.job.request.model == name and not live.ended and live.id not in running:
                await self._fail(live, error)


def _ranks(
    name: str | None,
    devices: int,
    device: DeviceChoice,
    threads: int | None,
    timeout: float,
    number: int,
    replicas: int,
    stopped: float,
) -> Launcher:
    """Ranks of replica ``number``, on devices of its own."""
    kind = resolve_device(device, devices * replicas) if name in (None, "local") else device
    if threads is None and kind == "cpu":
        threads = default_threads(devices * replicas, "cpu")
    gpus = range(number * devices, (number + 1) * devices)
    preload = (*PRELOAD, "ditmesh.serve.replicas", "ditmesh.serve.worker")
    return launcher(name, devices, kind, threads, timeout, gpus=gpus, stop_limit=stopped, preload=preload)


def _task_id(live: Live, picture: int) -> str:
    return f"{live.id}/{picture}"


def _event_of(status: Status) -> Literal["succeeded", "failed", "cancelled"]:
    assert status in ("succeeded", "failed", "cancelled")
    return status


def _told_by(job: Job, after: int, all: bool) -> list[Event]:
    """The events that a job's state tells of, numbered from ``after`` on; ``all``: not only the last one."""
    told: list[tuple[EventName, dict[str, Any]]] = []
    if all:
        if job.started is not None:
            told.append(("started", {"attempt": job.attempt}))
        for image in job.images:
            if image.url is not None:
                told.append(("image", image.model_dump(mode="json")))
    if job.status in ENDED:
        told.append((_event_of(job.status), job.model_dump(mode="json")))
    return [Event(id=number, event=name, data=data) for number, (name, data) in enumerate(told, after + 1)]
