"""The server's engine: one queue, and replicas that its tasks are shared out to."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .._version import __version__
from ..errors import ConfigError, InputError, did_you_mean
from ..launch import DeviceChoice, Launcher, connection, device_of_launcher, launcher, threads_of_launcher
from ..launch.pool import PRELOAD
from .backend import IdempotencyKey, NoRanks, ResultFile, Stopping, UnknownJob
from .dispatch import Dispatcher
from .jobs import Jobs, events_of
from .offers import ServedModel
from .protocol import ModelSpec
from .replicas import LONGEST_BACKOFF, RankLimits
from .types import ENDED, Event, Job, JobRequest, ModelCard, ServerState, Status

T = TypeVar("T")

# Seconds after which a client that comes while the server stops should ask again.
AWAY = 10.0


class Service:
    """Jobs in a queue on disk, shared out to replicas; implements `backend.JobBackend`.

    Ranks that fail are started again, and what they were at begins again, once (see `Dispatcher`). What cannot be
    written down while the disk is full waits for room (see `Jobs`).
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
        limits: RankLimits | None = None,
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
            launcher: by name; see `launch.launcher`. It has to be `Conversing`.
            most_loaded: models that a replica holds at a time.
            most_running: tasks that a replica runs at a time, and as many that pause for more urgent ones.
            limits: when ranks are given up.
            keep: seconds for which results are kept.
            most_bytes: of all results and inputs; the oldest ended jobs are forgotten early where it takes that.
            reserve: bytes of the disk that have to be free for a job to be accepted.
            most_waiting, most_per_owner, weights: see `Queue`.
            function: what ranks run in the place of `worker.serve_rank`.

        Raises:
            InputError: there is no such model, or two of the same name.
        """
        if not specs:
            raise InputError("a server needs a model; give one")
        self._offers = {spec.name: ServedModel.of(spec) for spec in specs}
        if len(self._offers) < len(specs):
            raise InputError(f"{len(specs)} models have {len(self._offers)} names; give each its own")
        for spec in specs:
            if not isinstance(spec.config, str):
                spec.config.check_world_size(devices)
        for name, number in (("devices", devices), ("replicas", replicas), ("most_running", most_running)):
            if number < 1:
                raise ConfigError(f"{name} {number} is not possible; use at least 1")
        self._devices = devices
        self._connection = partial(connection, launcher)
        self._undo = ExitStack()
        self._jobs = Jobs(
            self._offers,
            folder,
            keep=keep,
            most_bytes=most_bytes,
            reserve=reserve,
            most=most_waiting,
            most_per_owner=most_per_owner,
            weights=weights,
        )
        limits = limits or RankLimits()
        ranks = partial(_ranks, launcher, devices, device, threads, timeout, limits.stopped, replicas)
        self._dispatcher = Dispatcher(
            self._jobs,
            self._offers,
            [partial(ranks, number) for number in range(replicas)],
            limits,
            most_loaded=most_loaded,
            most_running=most_running,
            function=function,
        )
        self._stopping = False
        self._background: set[asyncio.Future[Any]] = set()

    async def start(self) -> None:
        """Start the replicas, and take up the jobs of an earlier run. Returns before models are loaded.

        Pictures that were under way when that run ended are begun again, which counts as no attempt.

        Raises:
            ConfigError: another server uses the folder, or its queue is of another version; a cluster does not answer.
            StorageError: the folder cannot be written.
        """
        # Replicas whose ranks are started again share it.
        await asyncio.to_thread(lambda: self._undo.enter_context(self._connection()))
        try:
            await self._jobs.open()
        except BaseException:
            self._undo.close()
            raise
        await self._dispatcher.start()
        self._looking = asyncio.create_task(self._jobs.maintain())

    async def stop(self, grace: float) -> None:
        """Take no more jobs, end the pictures under way within ``grace`` seconds; what is left stays queued."""
        self._stopping = True
        await self._dispatcher.stop(grace)
        self._looking.cancel()
        await asyncio.gather(self._looking, *self._background, return_exceptions=True)
        await self._jobs.close()
        await asyncio.to_thread(self._undo.close)

    async def given_up(self) -> str:
        """Returns when no ranks will ever serve, with the reason; see `Dispatcher.given_up`."""
        return await self._dispatcher.given_up()

    async def submit(self, request: JobRequest, owner: str, once: IdempotencyKey | None = None) -> Job:
        """Accept a job; see `JobBackend.submit`. Raises `Stopping` as well."""
        if self._stopping:
            raise Stopping("the server is stopping and takes no more jobs; ask again in a moment", AWAY)
        if why := self._dispatcher.failure_reason:
            raise NoRanks(f"{why}; ask again in a minute", LONGEST_BACKOFF)
        name = request.model or next(iter(self._offers))
        offer = self._offers.get(name)
        if offer is None:
            known = ", ".join(self._offers)
            raise InputError(f"model {name[:80]!r} is none of the server's ({known}){did_you_mean(name, self._offers)}")
        seed = secrets.randbelow(2**32) if request.seed is None else request.seed
        request = request.model_copy(update={"model": name, "seed": seed})
        offer.check(request, self._devices)
        id = f"job_{secrets.token_hex(16)}"
        return await self._whole(self._jobs.accept(id, request, owner, offer.work(request), once))

    async def repeated(self, owner: str, once: IdempotencyKey) -> Job | None:
        """The job of a request that has come before. Raises `KeyReused`."""
        job = await self._jobs.on_disk(self._jobs.queue.repeated, owner, once)
        return job and self._jobs.seen(job)

    async def put_input(self, data: bytes) -> str:
        """Keep an input picture; its digest. Raises `StorageError`."""
        return await self._jobs.put_input(data)

    async def release_input(self, digest: str) -> None:
        """Remove an input picture that no job needs."""
        await self._jobs.release_input(digest)

    async def job(self, id: str, owner: str) -> Job:
        """A job. Raises `UnknownJob`."""
        live = self._jobs.live_jobs.get(id)
        if live is not None and live.owner == owner:
            return self._jobs.view(live)
        return await self._jobs.on_disk(self._jobs.queue.job, id, owner)

    async def jobs(self, owner: str, limit: int = 50, status: Status | None = None) -> list[Job]:
        """The newest first."""
        return [self._jobs.seen(job) for job in await self._jobs.on_disk(self._jobs.queue.jobs, owner, limit, status)]

    async def cancel(self, id: str, owner: str) -> Job:
        """Cancel a job: it has ended at once, its ranks stop at the next step. Raises `UnknownJob`, `StorageError`."""
        job = await self.job(id, owner)
        return job if job.status in ENDED else self._jobs.view(await self._whole(self._jobs.cancel(id)))

    async def events(self, id: str, owner: str, after: int = 0) -> AsyncIterator[Event]:
        """Events behind number ``after``; see `JobBackend.events`. Raises `UnknownJob`."""
        live = self._jobs.live_jobs.get(id)
        if live is not None and live.owner == owner:
            async for event in live.log.follow(after):
                yield event
            return
        # It has ended long ago, or in an earlier run.
        first = self._jobs.first_event
        for event in events_of(await self.job(id, owner), max(after, first - 1), after < first):
            yield event

    async def result(self, id: str, index: int, owner: str) -> ResultFile:
        """A result's file. Raises `UnknownJob`."""
        await self.job(id, owner)
        file = await self._jobs.on_disk(self._jobs.queue.file, id, index)
        if file is not None:
            path, media = self._jobs.results.path(id, file)
            if path.exists():
                return ResultFile(path, media)
        raise UnknownJob(f"job {id} has no picture {index}, or not yet")

    def models(self) -> list[ModelCard]:
        """The models, as far as they are known."""
        loaded = {name for slot in self._dispatcher.slots for name in slot.models}
        return [offer.card.model_copy(update={"loaded": name in loaded}) for name, offer in self._offers.items()]

    def state(self, owner: str | None = None) -> ServerState:
        """The server as it is; ``ready``: a replica has a model loaded; ``owner``: ids of others' jobs are left out."""
        states = []
        for slot in self._dispatcher.slots:
            lives = (live for live, _ in slot.running.values())
            running = list(dict.fromkeys(live.id for live in lives if owner in (None, live.owner)))
            states.append(slot.state.model_copy(update={"running": running}))
        return ServerState(
            version=__version__,
            ready=not self._stopping and any(state.state == "ready" for state in states),
            queued=self._jobs.queue.queued,
            running=self._jobs.queue.running,
            replicas=states,
        )

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that goes on to its end even if whoever waits for it goes away: half of it would not do."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return await asyncio.shield(task)


def _ranks(
    name: str | None,
    devices: int,
    device: DeviceChoice,
    threads: int | None,
    timeout: float,
    stopped: float,
    replicas: int,
    number: int,
) -> Launcher:
    """Ranks of replica ``number``, on devices of its own."""
    kind = device_of_launcher(name, device, devices * replicas)
    if threads is None:
        threads = threads_of_launcher(name, kind, devices * replicas)
    gpus = range(number * devices, (number + 1) * devices)
    preload = (*PRELOAD, "ditmesh.serve.replicas", "ditmesh.serve.worker")
    return launcher(name, devices, kind, threads, timeout, gpus=gpus, stop_limit=stopped, preload=preload)
