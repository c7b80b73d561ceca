"""Ranks of a server without a model: they follow the protocol, and fail when a prompt says so."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import queue
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from ditmesh.errors import InputError, RankFailed
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.service import Service
from ditmesh.serve.settings import ServiceSettings
from ditmesh.serve.types import Job, RankState
from ditmesh.serve.worker.protocol import (
    Beat,
    Cancelled,
    Finished,
    ModelFailed,
    ModelReady,
    Preview,
    Start,
    Stop,
    TaskFailed,
    TaskStepped,
)

STEP = 0.01
PNG = b"\x89PNG\r\n\x1a\n"


def picture(prompt: str, seed: int, steps: int = 4) -> bytes:
    """The picture of a prompt and a seed, alone."""
    state = f"{prompt} {seed}".encode()
    for step in range(steps):
        state = hashlib.sha256(state + bytes([step % 256])).digest()
    return PNG + state


class Running:
    """A task under way."""

    def __init__(self, task: Start) -> None:
        request = task.request
        self.task, self.step, self.steps = task, 0, request.steps or 4
        self.seed = (request.seed or 0) + task.index
        self.state = f"{request.prompt} {self.seed}".encode()

    def advance(self, rank: int, running: dict[str, Running], say: Callable[[Any], None]) -> None:
        """Do a step, and report it; the last one ends the task."""
        id, every = self.task.id, self.task.request.previews
        act(self.task.request.prompt, rank, self.step)
        self.state = hashlib.sha256(self.state + bytes([self.step % 256])).digest()
        self.step += 1
        say(TaskStepped(id, self.step, self.steps, len(running)))
        if every and self.step % every == 0:
            say(Preview(id, self.step, 8, 8, b"\xff\xd8\xffjpeg"))
        if self.step == self.steps:
            say(Finished(id, PNG + self.state, 64, 64, {"seed": self.seed, "company": len(running)}))
            del running[id]


def act(prompt: str, rank: int, step: int) -> None:
    """What a prompt such as ``"! raise rank=1 step=2 once=/tmp/x"`` lets a rank do: once, or every time."""
    if not prompt.startswith("! "):
        return
    how, *more = prompt[2:].split()
    options = dict(word.split("=", 1) for word in more if "=" in word)
    if int(options.get("rank", 0)) != rank or int(options.get("step", 2)) != step:
        return
    if (once := options.get("once")) is not None:
        if Path(once).exists():
            return
        Path(once).touch()
    if how == "raise":
        raise ArithmeticError("on purpose")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(600)


def shared(commands: list[Any], world: int) -> list[Any]:
    """The commands of rank 0, on every rank."""
    if world == 1:
        return commands
    import torch.distributed as dist

    box = [commands]
    dist.broadcast_object_list(box, 0)
    return box[0]


def serve_fake(specs: Sequence[ModelSpec], *, report: Any) -> None:
    """`protocol` on every rank, without torch where there is one only. A model in "bfloat16" is refused."""
    rank, world = (0, 1) if isinstance(report, ThreadReport) else place_of_rank()
    say: Callable[[Any], None] = report if rank == 0 else lambda message: None
    inbox: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        command = None
        while not isinstance(command, Stop):
            try:
                command = report.reply()
            except EOFError:
                return
            inbox.put(command)

    threading.Thread(target=read, daemon=True).start()
    for spec in specs:
        if spec.dtype == "bfloat16":
            say(ModelFailed(spec.name, "this model is broken"))
            raise InputError("this model is broken")
        card = {"pipeline": "Fake", "batching": True, "steps": 4, "inputs": ["image"]}
        say(ModelReady(spec.name, card, {"ulysses": 2}, "ulysses=2"))
    running: dict[str, Running] = {}
    calls = rows = 0
    beat = 0.0
    while True:
        for command in shared([inbox.get() for _ in range(inbox.qsize())], world):
            if isinstance(command, Stop):
                return
            if isinstance(command, Start) and command.request.prompt.startswith("! refuse"):
                say(TaskFailed(command.id, "invalid_request", "the pipeline cannot do that"))
            elif isinstance(command, Start):
                running[command.id] = Running(command)
            elif command.id in running:
                say(Cancelled(command.id, running.pop(command.id).step))
        time.sleep(STEP if running else STEP / 2)
        if running:
            calls, rows = calls + 1, rows + len(running)
            for run in [*running.values()]:
                run.advance(rank, running, say)
        if running or time.monotonic() - beat > 0.2:
            beat = time.monotonic()
            ranks = tuple(RankState(rank=number, device="cpu") for number in range(world))
            say(Beat(tuple(running), len(running), calls, rows, ranks, {"ring": calls}))


def place_of_rank() -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


class ThreadReport:
    """What a rank in a thread reports to, and has replies from."""

    def __init__(self, on_message: Callable[[int, Any], None]) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.gone = False
        self._on_message = on_message

    def __call__(self, message: Any) -> None:
        if self.gone:
            raise SystemExit
        self._on_message(0, message)

    def reply(self) -> Any:
        command = self.inbox.get()
        if command is None:
            raise EOFError
        return command


class ThreadRanks:
    """A launcher of one rank: a thread of this process."""

    device = "cpu"
    is_reporter = True
    threads = 1

    def __init__(self, world_size: int, device: str, threads: int | None, timeout: float, **options: Any) -> None:
        assert world_size == 1
        self.world_size = 1
        self._report: ThreadReport | None = None

    def run(self, fn: Callable[..., Any], *args: Any, on_message: Any, watch: Any, **kwargs: Any) -> list[Any]:
        self._report = report = ThreadReport(on_message)
        ended: list[Any] = []

        def rank() -> None:
            try:
                ended.append((fn(*args, report=report, **kwargs), None))
            except BaseException as error:
                ended.append((None, error))

        thread = threading.Thread(target=rank, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.05)
                if thread.is_alive() and (missed := watch()) is not None:
                    raise RankFailed(f"rank 0 of 1 had not {missed}", 0)
            result, error = ended[0]
            if error is not None:
                raise RankFailed(f"rank 0 of 1 raised {type(error).__name__}: {error}", 0) from error
            return [result]
        finally:
            report.gone = True
            report.inbox.put(None)

    def reply(self, content: Any, ranks: Any = None) -> None:
        if self._report is not None:
            self._report.inbox.put(content)

    def close(self) -> None:
        pass

    def __enter__(self) -> ThreadRanks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# ---- the service


@contextlib.asynccontextmanager
async def serving(folder: Path, *, grace: float = 5.0, models: Any = None, **options: Any) -> AsyncIterator[Service]:
    specs = models or [ModelSpec("sd3", "emoji-sd3")]
    settings = ServiceSettings(**{"launcher": "support.serve:ThreadRanks", "device": "cpu", **options})
    service = Service(specs, folder, settings, serve_fake)
    await service.start()
    try:
        yield service
    finally:
        await service.stop(grace)


async def ended(service: Service, job: Job, owner: str = "") -> Job:
    async with contextlib.aclosing(service.events(job.id, owner)) as events:
        async for _ in events:
            pass
    return await service.job(job.id, owner)


async def until(condition: Any, seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        await asyncio.sleep(0.005)


async def assert_right(service: Service, job: Job, owner: str = "") -> None:
    """Every image is the one that its prompt and seed give alone."""
    assert job.status == "succeeded", job
    for image in job.images:
        assert image.seed == job.request.seed + image.index
        file = await service.result(job.id, image.index, owner)
        assert file.path.read_bytes() == picture(job.request.prompt, image.seed, job.request.steps or 4)
