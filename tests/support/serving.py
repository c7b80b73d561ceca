"""A server without ranks: a backend in memory that draws simple pictures, and servers on ports of their own."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import os
import secrets
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ditmesh._version import __version__
from ditmesh.errors import InputError
from ditmesh.generate.receipt import PNG_KEYWORD, Receipt
from ditmesh.serve.errors import NoSpace, QueueFull, ResultFile, UnknownJob
from ditmesh.serve.http.app import create_app
from ditmesh.serve.http.connections import ConnectionLimits
from ditmesh.serve.http.listen import HttpServer, bound, url_of
from ditmesh.serve.settings import ApiSettings
from ditmesh.serve.types import (
    ENDED,
    Event,
    EventName,
    Job,
    JobError,
    JobImage,
    JobRequest,
    ModelCard,
    RankState,
    ReplicaState,
    ServerState,
    Status,
)

MEDIA = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "mp4": "video/mp4"}


def drawn(prompt: str, seed: int, size: tuple[int, int]) -> Image.Image:
    """The picture of a prompt and a seed: stripes of two colours."""
    colours = hashlib.sha256(f"{seed} {prompt}".encode("utf-8", "replace")).digest()
    image = Image.new("RGB", size, (colours[0], colours[1], colours[2]))
    for column in range(0, size[0], 4):
        image.paste((colours[3], colours[4], colours[5]), (column, 0, min(column + 2, size[0]), size[1]))
    return image


class FakeBackend:
    """Jobs in memory, one after another, as `ditmesh.serve.service.Service` has them.

    Prompts that begin with ``fail:`` fail with the code that follows.

    Args:
        step_seconds: of every step.
        most: jobs that wait, at most.
    """

    def __init__(self, step_seconds: float = 0.001, most: int = 1000) -> None:
        self.step_seconds, self.most = step_seconds, most
        self.cards = [
            ModelCard(id="stripes", created=0, pipeline="StripesPipeline", width=64, height=64, steps=8, loaded=True),
            ModelCard(id="films", created=0, pipeline="FilmsPipeline", width=64, height=64, steps=4, video=True),
        ]
        self.cards[0].size_multiple, self.cards[0].loras, self.cards[0].inputs = 8, ["oil"], ["image", "mask"]
        self.ready, self.full_disk, self.broken = True, False, False
        self.stopped_with: float | None = None
        self.inputs: dict[str, bytes] = {}
        self.open_streams = 0
        self.on_event: Any = None
        self.calls = 0
        self._jobs: dict[str, tuple[str, Job]] = {}
        self._events: dict[str, list[Event]] = {}
        self._news = asyncio.Condition()
        self._queue: list[str] = []
        self._worker: asyncio.Task[None] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="fake-")
        self._hold = asyncio.Event()
        self._hold.set()

    def hold(self, held: bool) -> None:
        """Begin no step, or go on."""
        (self._hold.clear if held else self._hold.set)()

    async def start(self) -> None:
        self._worker = asyncio.create_task(self._work())

    async def stop(self, grace: float) -> None:
        self.stopped_with = grace
        limit = time.monotonic() + grace
        while time.monotonic() < limit and any(job.status not in ENDED for _, job in self._jobs.values()):
            await asyncio.sleep(0.01)
        if self._worker is not None:
            self._worker.cancel()

    async def permanent_failure(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def submit(self, request: JobRequest, owner: str, files: Any = None) -> Job:
        self.inputs |= files or {}
        if self.broken:
            raise RuntimeError("the queue is broken")
        if self.full_disk:
            raise NoSpace("the disk is full; delete something, or wait until results expire")
        if len(self._queue) >= self.most:
            raise QueueFull(f"{self.most} jobs wait already; ask again later", 7.0)
        card = next(card for card in self.cards if card.id == request.model)
        for side in (request.width, request.height):
            if side is not None and side % card.size_multiple:
                raise InputError(f"{side} pixels are no multiple of {card.size_multiple}; use one")
        for lora in request.loras:
            if lora.name not in card.loras:
                raise InputError(f"there is no LoRA {lora.name!r}; use one of {', '.join(card.loras)}")
        seed = secrets.randbelow(2**32) if request.seed is None else request.seed
        request = request.model_copy(update={"seed": seed})
        images = [JobImage(index=i, seed=seed + i) for i in range(request.n)]
        steps = (request.steps or card.steps or 8) * request.n
        id, place = f"job_{secrets.token_hex(16)}", len(self._queue)
        job = Job(id=id, status="queued", request=request, created=time.time(), position=place, steps=steps)
        job.images = images
        self._jobs[job.id], self._events[job.id] = (owner, job), []
        self._queue.append(job.id)
        await self._tell(job, "queued", {"position": job.position})
        return job.model_copy(deep=True)

    async def job(self, id: str, owner: str) -> Job:
        return self._of(id, owner).model_copy(deep=True)

    async def jobs(self, owner: str, limit: int = 50, status: Status | None = None) -> list[Job]:
        mine = [job for whose, job in reversed(self._jobs.values()) if whose == owner and status in (None, job.status)]
        return mine[:limit]

    async def cancel(self, id: str, owner: str) -> Job:
        job = self._of(id, owner)
        if job.status not in ENDED:
            await self._end(job, "cancelled")
        return job.model_copy(deep=True)

    async def events(self, id: str, owner: str, after: int = 0) -> AsyncIterator[Event]:
        job = self._of(id, owner)
        self.open_streams += 1
        try:
            while True:
                for event in self._events[id]:
                    if event.id > after:
                        after = event.id
                        yield event
                if job.status in ENDED and after >= self._events[id][-1].id:
                    return
                async with self._news:
                    while self._events[id][-1].id <= after:
                        await self._news.wait()
        finally:
            self.open_streams -= 1

    async def result(self, id: str, index: int, owner: str, part: int | None = None) -> ResultFile:
        job = self._of(id, owner)
        path = self._path(job, index)
        if index >= len(job.images) or not path.exists():
            raise UnknownJob(f"{id} has no image {index} (yet)")
        return ResultFile(path, MEDIA[job.request.format])

    def models(self) -> list[ModelCard]:
        return self.cards

    def state(self, owner: str | None = None) -> ServerState:
        mine = [(id, job) for id, (whose, job) in self._jobs.items() if owner in (None, whose)]
        running = [id for id, job in mine if job.status == "running"]
        ranks = [RankState(rank=rank, device="cpu", step_seconds=0.01, waiting_seconds=0.002 * rank) for rank in (0, 1)]
        replica = ReplicaState(name="0", state="ready" if self.ready else "starting", ranks=ranks, running=running)
        replica.mesh, replica.bytes, replica.drift = {"ulysses": 2}, {"ulysses": 1000 * self.calls}, 0.01
        counts = {"queued": len(self._queue), "running": len(running)}
        return ServerState(version=__version__, ready=self.ready, **counts, replicas=[replica])

    # --- the work

    def _of(self, id: str, owner: str) -> Job:
        whose, job = self._jobs.get(id, (None, None))
        if job is None or whose != owner:
            raise UnknownJob(f"there is no job {id}; it may have expired")
        return job

    def _path(self, job: Job, index: int) -> Path:
        return Path(self._folder.name) / f"{job.id}-{index}.{job.request.format}"

    async def _tell(self, job: Job, name: EventName, data: dict[str, Any]) -> None:
        async with self._news:
            event = Event(id=len(self._events[job.id]) + 1, event=name, data=data)
            self._events[job.id].append(event)
            self._news.notify_all()
        if self.on_event is not None:
            self.on_event(job, event)

    async def _end(self, job: Job, status: Status, error: JobError | None = None) -> None:
        job.status, job.finished, job.error, job.position = status, time.time(), error, None
        if job.id in self._queue:
            self._queue.remove(job.id)
        assert status in ENDED
        await self._tell(job, status, job.model_dump(mode="json"))  # type: ignore[arg-type]

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            if self._queue:
                job = self._jobs[self._queue.pop(0)][1]
                if job.status == "queued":
                    await self._draw(job)

    async def _draw(self, job: Job) -> None:
        job.status, job.started, job.position = "running", time.time(), None
        await self._tell(job, "started", {"attempt": 1})
        code: Any = job.request.prompt.partition("fail:")[2]
        if code:
            await self._end(job, "failed", JobError(code=code, message=f"it failed of {code}"))
            return
        card = next(card for card in self.cards if card.id == job.request.model)
        size = job.request.width or card.width or 64, job.request.height or card.height or 64
        steps = job.request.steps or card.steps or 8
        for image in job.images:
            picture = drawn(job.request.prompt, image.seed, size)
            for step in range(1, steps + 1):
                await self._hold.wait()
                await asyncio.sleep(self.step_seconds)
                if job.status in ENDED:
                    return
                self.calls, job.step = self.calls + 1, job.step + 1
                job.eta = self.step_seconds * ((job.steps or 0) - job.step)
                data = {"image": image.index, "step": step, "steps": steps, "eta": job.eta, "batch": 1}
                await self._tell(job, "step", data)
                if job.request.previews and step % job.request.previews == 0 and step < steps:
                    await self._tell(job, "preview", self._preview(picture, image.index, step))
            self._write(job, image, picture, steps)
            await self._tell(job, "image", image.model_dump(mode="json"))
        await self._end(job, "succeeded")

    def _preview(self, picture: Image.Image, index: int, step: int) -> dict[str, Any]:
        out = BytesIO()
        picture.resize((16, 16)).save(out, format="JPEG")
        data = base64.b64encode(out.getvalue()).decode()
        return {"image": index, "step": step, "width": 16, "height": 16, "b64_json": data}

    def _write(self, job: Job, image: JobImage, picture: Image.Image, steps: int) -> None:
        request = job.request
        of_request = {"prompt": request.prompt, "negative_prompt": request.negative_prompt, "model": request.model}
        of_image = {"seed": image.seed, "index": image.index, "width": picture.width, "height": picture.height}
        of_run = {"pipeline": "StripesPipeline", "dtype": "float32", "device": "cpu", "devices": 2, "seconds": 0.01}
        receipt = Receipt(**of_request, **of_image, **of_run, steps=steps, guidance=2.0)
        info = PngInfo()
        info.add_itxt(PNG_KEYWORD, receipt.model_dump_json())
        more = {"pnginfo": info} if request.format == "png" else {}
        if request.format == "mp4":
            # Of a film it has the beginning only.
            self._path(job, image.index).write_bytes(b"\0\0\0\x18ftypisom" + picture.tobytes())
        else:
            picture.save(self._path(job, image.index), **more)
        image.url = f"/v1/jobs/{job.id}/images/{image.index}"
        image.width, image.height = picture.size
        image.receipt = receipt.model_dump(mode="json")


@contextlib.contextmanager
def serving(
    backend: Any,
    settings: ApiSettings | None = None,
    grace: float = 0.0,
    port: int = 0,
    limits: ConnectionLimits | None = None,
) -> Iterator[str]:
    """A server in a thread, on a port of its own if none is given; its URL."""
    server, failed = HttpServer(create_app(backend, settings), grace, limits=limits), []
    listening = bound("127.0.0.1", port)

    def run() -> None:
        try:
            asyncio.run(server.run_on(listening))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    limit = time.monotonic() + 90
    while not server.started:
        assert thread.is_alive(), failed
        assert time.monotonic() < limit, stack_of(thread)
        time.sleep(0.01)
    try:
        yield url_of(listening)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not failed
        assert not thread.is_alive(), stack_of(thread)


def stack_of(thread: threading.Thread) -> str:
    """Where a thread is that should be elsewhere, and the threads that it may wait for: an event loop shows nothing."""
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != thread.ident)
    return "\n".join("".join(traceback.format_stack(frame)) for _, frame in frames)


def main() -> None:
    """``python -m support.serving``: such a server in a process of its own; ``--held``: it begins no step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--held", action="store_true")
    arguments = parser.parse_args()
    backend = FakeBackend(step_seconds=0.2)
    backend.hold(arguments.held)
    listening = bound("127.0.0.1", arguments.port)
    server = HttpServer(
        create_app(backend),
        grace=60.0,
        up=lambda: print(url_of(listening), flush=True),
        leave=lambda number: os._exit(128 + number),
    )
    asyncio.run(server.run_on(listening))


if __name__ == "__main__":
    main()
