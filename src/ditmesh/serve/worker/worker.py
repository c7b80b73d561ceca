"""The loop of every rank of a replica: it receives commands, runs tasks step by step, and reports."""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from ...comm import PeerError
from ...comm.backends import device_of_rank
from ...core.gpus import has_own_memory
from ...errors import DitmeshError, InputError
from ...generate.arguments import CALLBACK
from ...generate.chunks import ChunkFrames
from ...generate.modular import call_parameters
from ...generate.outputs import Picture, outputs_of
from ...generate.receipt import PNG_KEYWORD, Receipt, text_chunk
from ...generate.runner import Prepared, quieten
from ...generate.steps import SchedulerStep, StepEvents, loop_steps
from ...generate.video import write_mp4
from ...launch.heap import return_free_memory
from ..offers import ModelSpec
from ..types import RankState
from .batching import Batcher
from .coroutines import PendingCall, PipelineTask
from .loaded import LoadedModel
from .previews import estimated_image, preview_jpeg
from .private_texts import hidden_texts
from .protocol import (
    Beat,
    Cancel,
    Cancelled,
    Finished,
    Frames,
    ModelFailed,
    ModelReady,
    Preview,
    Start,
    Stop,
    TaskFailed,
    TaskStepped,
)
from .rendezvous import FailureReason, RankRendezvous, RoundMessage, failure_of

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

# Seconds between heartbeats of idle ranks, between two states of a rank, and between two collections of its garbage.
HEARTBEAT_INTERVAL, STATE_INTERVAL, TRIM_INTERVAL = 1.0, 0.5, 30.0
# Added to the niceness of a thread that computes.
NICENESS = 10


def serve_rank(specs: Sequence[ModelSpec], *, report: Any) -> None:
    """Serve until a `Stop` command. Every rank of a replica runs this, with the same ``specs``.

    Args:
        report: takes rank 0's reports (`protocol.Message`), and has the owner's commands (``report.reply()``).

    Raises:
        DitmeshError, MemoryError: a model cannot be loaded.
        PeerError, RuntimeError: another rank is gone: this replica is to be started again.
    """
    quieten()
    worker = RankWorker(report)
    with torch.no_grad(), hidden_texts(lambda: worker.private):
        try:
            worker.run(specs)
        finally:
            worker.close()


@dataclass(eq=False)
class RunningTask:
    """A task on this rank.

    Attributes:
        order: number of its command.
        due: its deadline, on the clock of `RoundMessage`.
        prepared, run: once it has begun.
        step, steps: denoising steps that are done, and that there are, see `loop_steps`.
        seen: the latest step, if its latents are to be shown; rank 0's.
    """

    task: Start
    order: int
    due: float | None = None
    prepared: Prepared | None = None
    run: PipelineTask | None = None
    step: int = 0
    steps: int = 0
    began: float = 0.0
    seen: SchedulerStep | None = None
    undo: ExitStack = field(default_factory=ExitStack)

    @property
    def model(self) -> str:
        """Name of its model."""
        return self.task.request.model

    def hurries(self, now: float) -> bool:
        """True if it can still be in time for its deadline."""
        left = 1 - self.step / self.steps if self.steps else 1.0
        return self.due is not None and now + left * self.task.seconds < self.due

    def urgency(self, now: float) -> tuple[int, float, int]:
        """The sort key of tasks: smaller values go first."""
        due = self.due if self.due is not None and self.hurries(now) else math.inf
        return -self.task.request.priority, due, self.order


class RankWorker:
    """One rank of a replica. Its decisions depend only on data that all ranks have."""

    def __init__(self, report: Any) -> None:
        self._ranks = RankRendezvous(report)
        self._device = device_of_rank()
        self._models: dict[str, LoadedModel] = {}
        self._scheduler = TaskScheduler(self._ranks, self._models, self._device)
        self._state_time = self._beat_time = 0.0
        self._trim_time = time.monotonic()
        self._calls = 0

    def run(self, specs: Sequence[ModelSpec]) -> None:
        """Serve until a `Stop` command."""
        ranks, scheduler = self._ranks, self._scheduler
        if self._device.type == "cpu":
            # The server's other threads need a core for a fraction of a millisecond several times a request.
            give_way()
        for spec in specs:
            self._load(spec)
        while True:
            messages = ranks.meet(0.0 if scheduler.tasks else HEARTBEAT_INTERVAL, self._state())
            scheduler.apply_outcomes(messages)
            for command in messages[0].commands:
                if isinstance(command, Stop):
                    return
                if isinstance(command, Cancel):
                    scheduler.cancel(command.id)
                else:
                    scheduler.add(command, messages[0].now)
            scheduler.round(messages[0].now)
            self._beat()
            self._trim()

    def _load(self, spec: ModelSpec) -> None:
        """Load a model, and report that it is loaded, or why it cannot be. Collective.

        A rank that fails alone raises: the others may wait for it in the middle of loading, and all are ended at once.
        """
        try:
            model = LoadedModel.open(spec, self._device, self._ranks.gather)
        except (DitmeshError, MemoryError, torch.OutOfMemoryError) as error:
            if not isinstance(error, PeerError):
                self._ranks.send(ModelFailed(spec.name, failure_of(error).message))
            raise
        self._models[spec.name] = model
        config = model.engine.config
        mesh = {axis: degree for axis, degree in config.degrees.items() if degree > 1}
        self._ranks.send(ModelReady(spec.name, model.card, mesh, config.describe()))

    @property
    def private(self) -> bool:
        """True if a library may know of a prompt that the log must not have."""
        return self._scheduler.began and not any(model.spec.log_prompts for model in self._models.values())

    def close(self) -> None:
        """Drop all tasks and unload the models."""
        self._scheduler.close()
        # Each may need the other ranks, which do not answer after a failure.
        with suppress(Exception):
            for model in self._models.values():
                model.close()
        self._models.clear()
        self._ranks.close()
        gc.collect()

    def _trim(self) -> None:
        """Collect cyclic garbage, and return the C library's free memory to the system, twice a minute.

        Python starts a full collection by the number of objects, not by their size, and glibc returns only what is
        free at the end of its heap.
        """
        if time.monotonic() - self._trim_time >= TRIM_INTERVAL:
            self._trim_time = time.monotonic()
            gc.collect()
            return_free_memory()

    def _state(self) -> RankState | None:
        """The state of this rank, at most twice a second."""
        now = time.monotonic()
        if now - self._state_time < STATE_INTERVAL:
            return None
        self._state_time, device = now, self._device
        if has_own_memory(device):
            memory = torch.accelerator.memory_allocated(device)
        else:
            import psutil

            memory = int(psutil.Process().memory_info().rss)
        return RankState(
            rank=self._ranks.rank,
            device=str(device),
            step_seconds=self._scheduler.step_seconds,
            waiting_seconds=self._scheduler.waited,
            memory_bytes=memory,
        )

    def _beat(self) -> None:
        models, current = self._models.values(), self._scheduler.current
        steps, now = sum(model.batcher.counts.calls for model in models), time.monotonic()
        if self._ranks.rank > 0 or (steps == self._calls and now - self._beat_time < HEARTBEAT_INTERVAL):
            return
        self._calls, self._beat_time = steps, now
        log = None if current is None else current.engine.staleness
        drifts = [] if log is None else [step.mean_drift for step in log.steps if step.mean_drift is not None]
        sent: Counter[str] = Counter()
        for model in models:
            # The link over data and cfg, by the axis that has several ranks.
            rows = "data" if model.engine.config.data > 1 else "cfg"
            for axis, count in model.engine.mesh.traffic.bytes_sent.items():
                sent[rows if axis == "batch" else axis] += count
        self._ranks.send(
            Beat(
                running=tuple(name for name, work in self._scheduler.tasks.items() if work.run is not None),
                batch=current.batcher.counts.batch if current is not None else 0,
                calls=steps,
                rows=sum(model.batcher.counts.rows for model in models),
                ranks=tuple(state for _, state in sorted(self._ranks.states.items())),
                bytes=dict(sent),
                synchronous_steps=0 if log is None else log.synchronous,
                drift=drifts[-1] if drifts else None,
            )
        )


class TaskScheduler:
    """The tasks of a rank, and the decision which of them take the next step. The same on all ranks.

    Attributes:
        tasks: by id.
        step_seconds, waited: of the latest step: in all, and waiting for other ranks.
        began: whether there has been a task.
        current: the model with an open request.
    """

    def __init__(self, ranks: RankRendezvous, models: Mapping[str, LoadedModel], device: torch.device) -> None:
        self.tasks: dict[str, RunningTask] = {}
        self.step_seconds = self.waited = 0.0
        self.began = False
        self.current: LoadedModel | None = None
        self._ranks, self._models, self._device = ranks, models, device
        # Numbers of tasks and rounds so far, and of the latest one of each model.
        self._turn, self._used = 0, Counter[str]()
        # Images are encoded in a thread while steps run.
        self._writer = ThreadPoolExecutor(1, "ditmesh-pictures")

    def close(self) -> None:
        """Drop all tasks; finished images are still written."""
        for work in [*self.tasks.values()]:
            self._leave(work)
        self._writer.shutdown()

    def add(self, task: Start, now: float) -> None:
        """Accept a task; it begins in one of the next rounds."""
        if task.id not in self.tasks:
            self._turn += 1
            self.began = True
            due = None if task.left is None else now + task.left
            self.tasks[task.id] = RunningTask(task, self._turn, due)

    def cancel(self, id: str) -> None:
        """Stop a task, unless it has ended."""
        work = self.tasks.get(id)
        if work is not None:
            step = work.step
            self._leave(work)
            self._ranks.send(Cancelled(id, step))

    def apply_outcomes(self, messages: Sequence[RoundMessage]) -> None:
        """End and report tasks according to the messages of all ranks, in the same way on every rank."""
        if any(message.stuck for message in messages):
            if self.current is not None:
                self.current.batcher.close_request()
            self._retry_failed_calls(messages)
        failed = dict.fromkeys(name for message in messages for name in message.failed)
        for name in failed:
            self._fail(name, [message.failed[name] for message in messages if name in message.failed])
        for work in [*self.tasks.values()]:
            if work.run is not None and work.run.ended:
                self._finish(work)

    def _retry_failed_calls(self, messages: Sequence[RoundMessage]) -> None:
        """Repeat calls that failed on all ranks; fail the tasks of the other failed calls.

        Each call is repeated alone, because one of them may have failed the others; after an out-of-memory error calls
        are repeated in batches of at most half the size.
        """
        names = dict.fromkeys(name for message in messages for name in message.stuck)
        again: list[PendingCall] = []
        full = False
        for name in names:
            work = self.tasks.get(name)
            reasons = [message.stuck[name] for message in messages if name in message.stuck]
            pending = None if work is None or work.run is None else work.run.pending
            if len(reasons) < len(messages) or pending is None or pending.alone:
                self._fail(name, reasons)
            else:
                again.append(pending)
                full = full or any(reason.code == "out_of_memory" for reason in reasons)
        batcher = None if self.current is None else self.current.batcher
        if full and batcher is not None:
            batcher.most = max(1, min(batcher.most, len(names)) // 2)
        for pending in again:
            pending.alone = not full or batcher is None or batcher.most == 1

    def _report(self, name: str, reason: FailureReason) -> None:
        self._ranks.send(TaskFailed(name, reason.code, reason.message))

    def _fail(self, name: str, reasons: Iterable[FailureReason]) -> None:
        work = self.tasks.get(name)
        if work is not None:
            # A rank that has failed sends nothing more: a request that is open on the others must not wait for it.
            self._leave(work, PeerError("a call has failed on another rank"))
            self._report(name, min(reasons, key=lambda reason: reason.consequence))

    def _finish(self, work: RunningTask) -> None:
        assert work.run is not None
        assert work.prepared is not None
        prepared, model, output = work.prepared, self._models[work.model], work.run.output
        self._leave(work)
        if self._ranks.rank > 0:
            return
        # Only one rank checks the output: an error in it fails the task, not the ranks.
        try:
            seconds = time.perf_counter() - work.began
            latents = None if work.seen is None else work.seen.latents()
            if latents is not None and not bool(torch.isfinite(latents).all()):
                raise FloatingPointError(
                    f"the latents of the last step are not finite in {model.spec.dtype}; serve the model in another "
                    "dtype, or ask for another guidance"
                )
            made = outputs_of(output)[0]
            images = [*made.frames]
            receipt = model.receipt(prepared, made if len(images) > 1 else Picture(images[0]), seconds)
        except Exception as error:
            self._report(work.task.id, failure_of(error))
            return
        form = work.task.request.format
        self._writer.submit(self._write, work.task.id, images, form, prepared.fps, receipt)

    def _framed(self, task: Start, prepared: Prepared, part: int, first: int, video: torch.Tensor) -> None:
        """Have the frames of a chunk of a video encoded and reported."""
        if self._ranks.rank == 0:
            frames = prepared.pipe.video_processor.postprocess_video(video, output_type="pil")[0]
            self._writer.submit(self._write, task.id, frames, task.request.format, prepared.fps, (part, first))

    def _write(self, name: str, images: list[Image], form: str, fps: float, what: Receipt | tuple[int, int]) -> None:
        """Encode an image, or some frames of a video, and report it; runs in a thread."""
        try:
            if isinstance(what, tuple):
                self._ranks.send(Frames(name, *what, len(images), encoded(images, form, fps)))
            else:
                data = encoded(images, form, fps, what)
                self._ranks.send(Finished(name, data, *images[0].size, what.model_dump(mode="json")))
        except Exception as error:
            self._report(name, failure_of(error))

    def _leave(self, work: RunningTask, error: BaseException | None = None) -> None:
        """Drop a task; ``error``: why the pipeline's own request, if it has one, cannot end well."""
        if work.run is not None:
            work.run.leave(None if work.run.delegates else error)
        work.undo.close()
        self.tasks.pop(work.task.id, None)

    # --- a round -----------------------------------------------------------------------------------------------

    def round(self, now: float) -> None:
        """Run one step of the next tasks, or some shorter calls of theirs; ``now``: the same on all ranks."""
        awake = self._awake(now)
        model = self._next_model(awake)
        if self.current is not None and self.current is not model:
            self.current.batcher.close_request()
        self.current = model
        if model is None:
            return
        self._turn += 1
        self._used[model.spec.name] = self._turn
        works = [work for work in awake if work.model == model.spec.name]
        if model.batcher.why:
            works = [self._next_alone(model, works, now)]
        for work in works:
            if work.run is None:
                self._begin(work, model)
        self._run(model.batcher, {work.run: work for work in works if work.run is not None})

    def _awake(self, now: float) -> list[RunningTask]:
        """Tasks whose steps may run now, the most urgent first: one that can be in time pauses its owner's others."""
        awake: list[RunningTask] = []
        paused: set[str] = set()
        for work in sorted(self.tasks.values(), key=lambda work: work.urgency(now)):
            if work.task.owner not in paused:
                awake.append(work)
            if work.hurries(now):
                paused.add(work.task.owner)
        return awake

    def _next_alone(self, model: LoadedModel, awake: Sequence[RunningTask], now: float) -> RunningTask:
        """The next task of a model that runs a task at a time; at most one begun task pauses with its keys."""
        begun = [work for work in self.tasks.values() if work.model == model.spec.name and work.run is not None]
        if model.batcher.delegates and len(begun) == 1:
            begun = [work for work in begun if work in awake]
        return min(begun or awake, key=lambda work: work.urgency(now))

    def _next_model(self, awake: Sequence[RunningTask]) -> LoadedModel | None:
        """The least recently used model that has tasks."""
        for work in self.tasks.values():
            # Its request is open until it ends.
            if work.run is not None and not work.run.delegates:
                return self._models[work.model]
        first = min(awake, key=lambda work: (self._used[work.model], work.order), default=None)
        return None if first is None else self._models[first.model]

    def _run(self, batcher: Batcher, runs: dict[PipelineTask, RunningTask]) -> None:
        """Run calls of some tasks; the other ranks are told of failures in the next round."""
        calls = batcher.counts.calls
        failed = batcher.round([*runs])
        if batcher.counts.calls > calls:
            self.step_seconds, self.waited = batcher.counts.seconds, batcher.counts.waited
        for run, work in runs.items():
            if run.failure is not None:
                self._ranks.message.failed[work.task.id] = failure_of(run.failure)
        if failed is not None:
            reason = failure_of(failed.error)
            self._ranks.message.stuck = {runs[run].task.id: reason for run in failed.stuck}
            batcher.close_request(failed.error)

    def _begin(self, work: RunningTask, model: LoadedModel) -> None:
        try:
            prepared = model.prepare(work.task)
        except Exception as error:
            self._ranks.message.failed[work.task.id] = failure_of(error)
            return
        called = CALLBACK in call_parameters(prepared.kind)
        if called:
            prepared.arguments[CALLBACK] = lambda *of: (self._stepped(work, model), of[-1])[-1]
        # Previews do not wait for patches that have not arrived.
        looking = self._ranks.rank == 0 and not model.engine.config.stages_or_patches

        def seen(step: SchedulerStep) -> None:
            if looking:
                work.seen = step
            if not called:
                self._stepped(work, model)

        scheduler = getattr(prepared.pipe, "scheduler", None)
        if hasattr(scheduler, "step"):
            work.undo.callback(StepEvents(scheduler, seen).undo)
        told = partial(self._framed, work.task, prepared) if model.spec.offload == "none" else None
        chunks = work.undo.enter_context(ChunkFrames(prepared.pipe, prepared.arguments, told))
        work.prepared, work.steps, work.began = prepared, prepared.steps, time.perf_counter()
        work.run = PipelineTask(prepared, self._device, model.batcher.delegates)
        work.run.during = chunks.decoding

    def _stepped(self, work: RunningTask, model: LoadedModel) -> None:
        run, prepared = work.run, work.prepared
        assert run is not None
        assert prepared is not None
        if not work.step:
            # The timesteps are set now; before, only the requested number was known.
            work.steps = loop_steps(prepared.pipe, prepared.steps)
        work.step = min(work.step + 1, work.steps)
        self._ranks.send(TaskStepped(work.task.id, work.step, work.steps, run.batch or 1))
        every = work.task.request.previews
        if every and self._ranks.rank == 0 and work.step % every == 0 and work.step < work.steps:
            self._preview(work, model)
        if not run.delegates:
            run.ask(None)

    def _preview(self, work: RunningTask, model: LoadedModel) -> None:
        if work.seen is None or work.prepared is None or model.colours is None:
            return
        try:
            estimate = estimated_image(work.seen)
            shown = work.seen.latents() if estimate is None else estimate
            size = work.prepared.job.size or model.info.default_size or (0, 0)
            picture = None if shown is None else model.colours.picture(shown, *size)
            if picture is not None:
                data, width, height = preview_jpeg(picture)
                self._ranks.send(Preview(work.task.id, work.step, width, height, data))
        except Exception as error:
            # An image does not need a preview.
            logger.warning("a preview could not be made: %s", type(error).__name__)


def give_way() -> None:
    """Let this thread wait for others of the server that are ready: those that pass requests and results on.

    Threads that this one starts later give way as well. Does nothing where the system does not schedule threads one by
    one (all but Linux), or does not allow it.
    """
    if sys.platform.startswith("linux"):
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))


def encoded(images: Sequence[Image], form: str, fps: float, receipt: Receipt | None = None) -> bytes:
    """Encode an image, a video or a part of one (no receipt): a PNG has its receipt; frames are MP4, PNG or WebP.

    Raises `InputError`: the format cannot hold the images or the receipt.
    """
    if form == "mp4":
        # A file: its index goes first, so that players begin before they have all of it, and is known last.
        with TemporaryDirectory(prefix="ditmesh-") as folder:
            path = Path(folder) / "video.mp4"
            write_mp4(images, path, fps, {PNG_KEYWORD: receipt.model_dump_json()} if receipt else {})
            return path.read_bytes()
    more: dict[str, Any] = {}
    if len(images) > 1:
        if form == "jpeg":
            raise InputError("a JPEG holds one image, and this is a video; use format mp4, png or webp")
        more = {"save_all": True, "append_images": list(images[1:]), "duration": round(1000 / fps), "loop": 0}
    if form == "png" and receipt:
        more["pnginfo"] = text_chunk(receipt)
    data = BytesIO()
    first = images[0] if form != "jpeg" else images[0].convert("RGB")
    first.save(data, format=form.upper(), **more)
    return data.getvalue()
