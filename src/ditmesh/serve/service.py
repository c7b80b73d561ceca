"""The server's engine: one queue, and replicas that run its tasks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from .._version import __version__
from ..errors import InputError, did_you_mean
from ..launch import Launcher, device_of_launcher, launcher, threads_of_launcher
from ..launch.pool import PRELOAD
from .errors import RESTART_SECONDS, Stopping
from .offers import ModelSpec, ServedModel
from .queue.dispatch import Dispatcher
from .queue.jobs import JobStore
from .settings import ServiceSettings
from .types import Job, JobRequest, ModelCard, ServerState


class Service(JobStore):
    """Jobs in a queue on disk and the replicas that run them: the interface of the HTTP side.

    Ranks that fail are started again, and their tasks begin again, once (see `Dispatcher`).
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        folder: str | Path,
        settings: ServiceSettings | None = None,
        function: Callable[..., None] | None = None,
    ) -> None:
        """Read the models' files; `start` starts the replicas.

        Args:
            specs: the models, which every replica loads; the first is the default.
            folder: for the queue and the results; no other server may use it.
            settings: of the ranks, their models and the stored results.
            function: what ranks run in the place of `worker.serve_rank`.

        Raises:
            InputError: there is no such model, or two of the same name.
        """
        settings = self._settings = settings or ServiceSettings()
        if not specs:
            raise InputError("a server needs a model; give one")
        served = {spec.name: ServedModel.of(spec) for spec in specs}
        if len(served) < len(specs):
            raise InputError(f"{len(specs)} models have {len(served)} names; give each its own")
        for spec in specs:
            if not isinstance(spec.config, str):
                spec.config.check_world_size(settings.devices)
        super().__init__(served, folder, settings)
        ranks = [partial(_ranks, settings, number) for number in range(settings.replicas)]
        self._dispatcher = Dispatcher(self, served, ranks, settings, function)
        self.permanent_failure = self._dispatcher.permanent_failure
        self._stopping = False

    async def start(self) -> None:
        """Start the replicas and resume the jobs of an earlier run. Returns before models are loaded.

        Images that were under way when that run ended are begun again, which counts as no attempt.

        Raises:
            ConfigError: another server uses the folder, or its queue is of another version.
            StorageError: the folder cannot be written.
        """
        await self.open()
        await self._dispatcher.start()
        self._looking = asyncio.create_task(self.maintain())

    async def stop(self, grace: float) -> None:
        """Accept no more jobs and finish running images within ``grace`` seconds; the rest stays queued."""
        self._stopping = True
        await self._dispatcher.stop(grace)
        self._looking.cancel()
        await asyncio.gather(self._looking, *self._background, return_exceptions=True)
        await self.close()

    async def submit(self, request: JobRequest, owner: str, files: Mapping[str, bytes] | None = None) -> Job:
        """Accept a job: once this returns it is on disk and not lost any more.

        ``files`` are the input images that came with the request, PNGs by digest.

        Raises:
            InputError: the model cannot do it, in one sentence.
            QueueFull: too many jobs wait, or (`Stopping`) the server stops.
            StorageError: it cannot be written down; `NoSpace`: as the disk is full.
        """
        if self._stopping:
            raise Stopping("the server is stopping and takes no more jobs; ask again in a moment", RESTART_SECONDS)
        name = request.model or next(iter(self._served))
        model = self._served.get(name)
        if model is None:
            known = ", ".join(self._served)
            raise InputError(f"model {name[:80]!r} is none of the server's ({known}){did_you_mean(name, self._served)}")
        seed = secrets.randbelow(2**32) if request.seed is None else request.seed
        request = request.model_copy(update={"model": name, "seed": seed})
        model.check(request, self._settings.devices)
        id = f"job_{secrets.token_hex(16)}"
        return await self._to_the_end(self.accept(id, request, owner, model.work(request), files or {}))

    def models(self) -> list[ModelCard]:
        """The models, as far as they are known."""
        loaded = any(slot.up for slot in self._dispatcher.slots)
        return [model.card.model_copy(update={"loaded": loaded}) for model in self._served.values()]

    def state(self, owner: str | None = None) -> ServerState:
        """The server's state; ``ready``: a replica has a model loaded; ``owner``: other owners' job ids are hidden."""
        states = []
        for slot in self._dispatcher.slots:
            lives = (live for live, _ in slot.running.values())
            running = list(dict.fromkeys(live.id for live in lives if owner in (None, live.owner)))
            states.append(slot.state.model_copy(update={"running": running}))
        return ServerState(
            version=__version__,
            ready=not self._stopping and any(state.state == "ready" for state in states),
            queued=self.queue.queued,
            running=self.queue.running,
            replicas=states,
        )


def _ranks(settings: ServiceSettings, number: int) -> Launcher:
    """The launcher of replica ``number``, with separate devices."""
    name, devices, threads = settings.launcher, settings.devices, settings.threads
    kind = device_of_launcher(name, settings.device, devices * settings.replicas)
    if threads is None:
        threads = threads_of_launcher(name, kind, devices * settings.replicas)
    gpus = range(number * devices, (number + 1) * devices)
    preload = (*PRELOAD, "ditmesh.serve.worker.replicas", "ditmesh.serve.worker.worker")
    return launcher(name, devices, kind, threads, settings.timeout, gpus=gpus, preload=preload)
