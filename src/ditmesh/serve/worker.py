"""What every rank of a replica runs: the loop that takes commands, runs pictures step by step, and reports."""

from __future__ import annotations

import gc
import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import PeerError
from ..errors import DitmeshError, LayoutError
from ..generate.receipt import Receipt, text_chunk
from ..generate.run import call_parameters, device_of_rank, loop_steps, quieten, receipt_of
from .batching import FailedCalls, PipelineTask
from .loaded import LoadedModel, Prepared, images_of
from .previews import Latents, grid, watch_steps
from .protocol import (
    Beat,
    Cancel,
    Cancelled,
    Command,
    Finished,
    Load,
    Message,
    ModelFailed,
    ModelReady,
    ModelSpec,
    Paused,
    PictureTask,
    Preview,
    Stop,
    TaskBegan,
    TaskFailed,
    TaskStepped,
    under_way,
)
from .types import RankState

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

Code = Literal["invalid_request", "out_of_memory", "internal"]

# Seconds between beats while there is nothing to do, and between two looks at all ranks.
HEARTBEAT_INTERVAL, STATE_INTERVAL = 1.0, 0.5
# Seconds for which a rank that cannot load a model waits for the others to say the same.
LOAD_VOTE_SECONDS = 2.0
# Bytes of what ranks exchange before a round that travel at once; more than that travels in a second message.
INLINE_BYTES = 2048
# What a new measurement of a call's seconds counts for.
EWMA = 0.3
# What is said of a failure, at most.
MAX_MESSAGE = 500


def serve_rank(specs: Sequence[ModelSpec], *, report: Any) -> None:
    """Serve until a `Stop` command. Every rank of a replica runs this, with the same ``specs``.

    Commands (`protocol.Command`) come as replies of the owner (`RankPool.reply`), to all ranks; rank 0 takes them and
    gives them to all before the next round, so that all ranks obey before the same step. Rank 0 reports
    `protocol.Message` objects.

    Args:
        specs: models to load first.
        report: takes reports, and has the owner's replies (``report.reply()``).

    Raises:
        PeerError, RuntimeError: another rank is gone: this replica is to be started again.
    """
    quieten()
    with torch.no_grad():
        loop = RankWorker(report)
        try:
            loop.run(specs)
        finally:
            loop.close()


class HostAllGather:
    """What all ranks tell one another before every round, over a process group of the host."""

    def __init__(self) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self._group: Any = dist.new_group(backend="gloo") if self.size > 1 else None
        # Somebody has not come: to destroy the group would wait for them.
        self._lost = False

    def __call__(self, value: Any, seconds: float | None = None) -> list[Any]:
        """Every rank's value, in rank order: anything that can be pickled. A collective call.

        Args:
            value: this rank's.
            seconds: for which others are waited for; None: the group's timeout.

        Raises:
            TimeoutError: somebody has not come. The group cannot be used any more.
        """
        if self._group is None:
            return [value]
        data = pickle.dumps(value)
        mine = torch.zeros(INLINE_BYTES, dtype=torch.uint8)
        mine[:8] = _bytes(len(data).to_bytes(8, "little"))
        if len(data) <= INLINE_BYTES - 8:
            mine[8 : 8 + len(data)] = _bytes(data)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        gathering: Any = dist.all_gather(every, mine, group=self._group, async_op=True)
        limit = None if seconds is None else time.monotonic() + seconds
        while limit is not None and not gathering.is_completed():
            if time.monotonic() > limit:
                self._lost = True
                raise TimeoutError
            time.sleep(0.01)
        gathering.wait()
        values = []
        for rank, box in enumerate(every):
            size = int.from_bytes(bytes(box[:8].tolist()), "little")
            whole = box[8 : 8 + size]
            if size > INLINE_BYTES - 8:
                whole = _bytes(data) if rank == self.rank else torch.empty(size, dtype=torch.uint8)
                dist.broadcast(whole, rank, group=self._group)
            values.append(value if rank == self.rank else pickle.loads(whole.numpy().tobytes()))
        return values

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None and not self._lost:
            dist.destroy_process_group(self._group)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class CommandReader:
    """The owner's commands, read by a thread: the loop never waits for one that does not come."""

    def __init__(self, report: Any, kept: bool) -> None:
        self._report, self._kept = report, kept
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="ditmesh-commands", daemon=True).start()

    def _read(self) -> None:
        stopping = False
        while not stopping:
            try:
                command = self._report.reply()
            except (EOFError, OSError):
                command = Stop()
            # The next message after a stop is not a command.
            stopping = isinstance(command, Stop)
            if self._kept:
                self._queue.put(command)

    def take(self, wait: float) -> tuple[Command, ...]:
        """All there are; waits for the first one, for so many seconds at most."""
        found: list[Command] = []
        with suppress(queue.Empty):
            found.append(self._queue.get(timeout=wait) if wait else self._queue.get_nowait())
            while True:
                found.append(self._queue.get_nowait())
        return tuple(found)


@dataclass(frozen=True)
class FailureReason:
    """Why a task cannot be done, on one rank; ``consequence``: another rank knows the cause."""

    code: Code
    message: str
    consequence: bool = False


@dataclass
class RoundMessage:
    """What a rank tells the others before a round.

    Attributes:
        commands, seconds: rank 0's: what is to be done, and what calls take.
        stuck: tasks whose call has failed, and why.
        failed: tasks that have ended in an error.
        state: how the rank is, now and then.
    """

    commands: tuple[Command, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    stuck: dict[str, FailureReason] = field(default_factory=dict)
    failed: dict[str, FailureReason] = field(default_factory=dict)
    state: RankState | None = None


@dataclass(eq=False)
class RunningTask:
    """A task on this rank.

    Attributes:
        order: number of its command.
        prepared, run: once it has begun.
        step, steps: denoising steps that are done, and that there are, see `loop_steps`.
        latents: of the latest step, if anybody wants to see them; rank 0's.
    """

    task: PictureTask
    order: int
    prepared: Prepared | None = None
    run: PipelineTask | None = None
    step: int = 0
    steps: int = 0
    began: float = 0.0
    paused: bool = False
    latents: Callable[[], Latents | None] = lambda: None
    undo: ExitStack = field(default_factory=ExitStack)

    @property
    def urgency(self) -> tuple[int, int]:
        """Smaller ones go first."""
        return -self.task.request.priority, self.order


class RankWorker:
    """The loop of one rank. What it decides depends on what all ranks know alone."""

    def __init__(self, report: Any) -> None:
        # Of rounds, and of whether a model could be loaded: while it is, ranks may be at different exchanges.
        self.exchange, self._outcomes = HostAllGather(), HostAllGather()
        self.rank, self.size = self.exchange.rank, self.exchange.size
        self.device = device_of_rank()
        self._report = report
        self._orders = CommandReader(report, kept=self.rank == 0)
        self._models: dict[str, LoadedModel] = {}
        self._loads: list[Load] = []
        self._work: dict[str, RunningTask] = {}
        self._number = 0
        # The model whose request is open, and when each was served last.
        self._current: LoadedModel | None = None
        self._served: dict[str, int] = {}
        self._stop = False
        self._word = RoundMessage()
        # Rank 0 measures; all ranks go by what it says.
        self._measured: dict[str, float] = {}
        self._said: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._states: dict[int, RankState] = {}
        self._looked = self._beaten = 0.0
        self._step_seconds = self._waited = 0.0
        # Pictures are encoded beside the steps.
        self._writer = ThreadPoolExecutor(1, "ditmesh-pictures")
        self._calls = 0

    def run(self, specs: Sequence[ModelSpec]) -> None:
        self._loads = [Load(spec, len(specs)) for spec in specs]
        while True:
            busy = bool(self._work or self._ready_load())
            if self.rank == 0:
                self._word.commands = self._orders.take(0.0 if busy else HEARTBEAT_INTERVAL)
                self._word.seconds = self._news()
            self._word.state = self._state()
            words = self.exchange(self._word)
            self._word = RoundMessage()
            self._apply_outcomes(words)
            for command in words[0].commands:
                self._handle(command)
            if self._stop:
                return
            if (load := self._ready_load()) is not None:
                self._loads.remove(load)
                self._load(load)
            self._round()
            self._beat()

    def close(self) -> None:
        """Leave everything that is under way, and let go of the models."""
        for work in [*self._work.values()]:
            self._leave(work)
        self._writer.shutdown()
        # Each may need the others; after a failure nobody answers.
        with suppress(Exception):
            for model in self._models.values():
                model.close()
        self._models.clear()
        self._current = None
        self.exchange.close()
        self._outcomes.close()
        gc.collect()

    def _say(self, message: Message) -> None:
        if self.rank == 0:
            self._report(message)

    # --- commands ----------------------------------------------------------------------------------------------

    def _handle(self, command: Command) -> None:
        if isinstance(command, Load):
            self._loads.append(command)
        elif isinstance(command, Stop):
            self._stop = True
        elif isinstance(command, Cancel):
            work = self._work.get(command.id)
            if work is not None:
                step = work.step
                self._leave(work)
                self._say(Cancelled(command.id, step))
        elif command.task.id not in self._work:
            task = command.task
            known = {*self._models, *(load.spec.name for load in self._loads)}
            if task.model in known:
                self._number += 1
                self._work[task.id] = RunningTask(task, self._number)
            else:
                self._say(TaskFailed(task.id, "invalid_request", f"model {task.model!r} is not loaded; load it first"))

    def _ready_load(self) -> Load | None:
        """The next model to load, if there is room for it or will be."""
        load = next(iter(self._loads), None)
        if load is None or load.spec.name in self._models or len(self._models) < max(1, load.most):
            return load
        return load if self._idle_model() is not None else None

    def _idle_model(self) -> str | None:
        """The model that was used longest ago, of those that no task needs."""
        needed = {work.task.model for work in self._work.values()}
        idle = [name for name in self._models if name not in needed]
        return min(idle, key=lambda name: self._served.get(name, 0), default=None)

    def _load(self, load: Load) -> None:
        spec, unloaded = load.spec, []
        if self._current is not None:
            self._current.batcher.close_request()
            self._current = None
        if spec.name not in self._models:
            while len(self._models) >= max(1, load.most) and (name := self._idle_model()) is not None:
                self._models.pop(name).close()
                unloaded.append(name)
            answer = self._loaded(spec)
            if isinstance(answer, str):
                self._say(ModelFailed(spec.name, answer, tuple(unloaded)))
                for work in [one for one in self._work.values() if one.task.model == spec.name]:
                    self._drop(work)
                    self._say(TaskFailed(work.task.id, "invalid_request", answer))
                return
            self._models[spec.name] = answer
        self._served[spec.name] = self._number
        model = self._models[spec.name]
        config = model.engine.config
        mesh = {axis: degree for axis, degree in config.degrees.items() if degree > 1}
        self._say(ModelReady(spec.name, model.card, mesh, config.describe(), tuple(unloaded)))

    def _loaded(self, spec: ModelSpec) -> LoadedModel | str:
        """A model, or why it cannot be loaded: on all ranks alike.

        A rank that fails alone raises: the others may wait for it in the middle of loading, and all are ended at once.
        """
        model: LoadedModel | None = None
        undo = ExitStack()
        try:
            model = LoadedModel(spec, self.device, self.exchange, self.rank, self.size, undo)
            every = self._outcomes("")
        except (DitmeshError, MemoryError, torch.OutOfMemoryError) as error:
            if isinstance(error, PeerError):
                raise
            try:
                every = self._outcomes(_failure(error).message, LOAD_VOTE_SECONDS)
            except TimeoutError:
                raise error from None
        if model is not None and not any(every):
            return model
        if model is not None:
            model.close()
        # Groups are the process's: the next attempt would make them once more.
        undo.close()
        gc.collect()
        return next(filter(None, every))

    # --- what has happened -------------------------------------------------------------------------------------

    def _apply_outcomes(self, words: Sequence[RoundMessage]) -> None:
        """End and report what has ended, in the same way on every rank."""
        self._seconds.update(words[0].seconds)
        self._states.update({word.state.rank: word.state for word in words if word.state is not None})
        if any(word.stuck for word in words):
            if self._current is not None:
                self._current.batcher.close_request()
            self._again(words)
        failed = dict.fromkeys(name for word in words for name in word.failed)
        for name in failed:
            self._fail(name, [word.failed[name] for word in words if name in word.failed])
        for work in [*self._work.values()]:
            if work.run is not None and work.run.ended:
                self._finish(work)

    def _again(self, words: Sequence[RoundMessage]) -> None:
        """Calls have failed. Those that no rank has an answer to are made again, each alone; others are lost."""
        names = dict.fromkeys(name for word in words for name in word.stuck)
        for name in names:
            work = self._work.get(name)
            reasons = [word.stuck[name] for word in words if name in word.stuck]
            pending = None if work is None or work.run is None else work.run.pending
            if len(reasons) < len(words) or pending is None or pending.alone:
                self._fail(name, reasons)
            else:
                pending.alone = True
                if any(reason.code == "out_of_memory" for reason in reasons) and self._current is not None:
                    batcher = self._current.batcher
                    batcher.most = max(1, min(batcher.most, len(names)) // 2)

    def _fail(self, name: str, reasons: Iterable[FailureReason]) -> None:
        work = self._work.get(name)
        if work is not None:
            self._leave(work)
            cause = min(reasons, key=lambda reason: reason.consequence)
            self._say(TaskFailed(name, cause.code, cause.message))

    def _finish(self, work: RunningTask) -> None:
        assert work.run is not None
        assert work.prepared is not None
        prepared, model, output = work.prepared, self._models[work.task.model], work.run.output
        self._drop(work)
        if self.rank > 0:
            return
        # This rank alone looks at what came out: whatever is wrong with it is the task's, and not the ranks'.
        try:
            seconds = time.perf_counter() - work.began
            latents = work.latents()
            if latents is not None and not bool(torch.isfinite(latents.noisy).all()):
                raise FloatingPointError(
                    f"the latents of the last step are not finite in {model.spec.dtype}; serve the model in another "
                    "dtype, or ask for another guidance"
                )
            images = images_of(output)
            facts = model.facts(prepared, seconds)
            job, made = prepared.job, images[0]
            if len(images) > 1:
                job, made = replace(job, fps=float(prepared.fps)), images
            receipt = receipt_of(job, 0, made, prepared.arguments, facts)
            if latents is not None:
                model.projection.learn_from(latents, images[len(images) // 2])
        except Exception as error:
            failure = _failure(error)
            self._say(TaskFailed(work.task.id, failure.code, failure.message))
            return
        form = work.task.request.format
        self._writer.submit(self._write, work.task.id, images, form, prepared.fps, receipt)

    def _write(self, name: str, images: list[Image], form: str, fps: int, receipt: Receipt) -> None:
        """Encode a picture and report it; in a thread."""
        try:
            data = encoded(images, form, fps, receipt)
            self._say(Finished(name, data, images[0].width, images[0].height, receipt.model_dump(mode="json")))
        except Exception as error:
            failure = _failure(error)
            self._say(TaskFailed(name, failure.code, failure.message))

    def _leave(self, work: RunningTask) -> None:
        """Stop a task where it is, and forget it."""
        if work.run is not None:
            work.run.leave()
        self._drop(work)

    def _drop(self, work: RunningTask) -> None:
        work.undo.close()
        self._work.pop(work.task.id, None)

    # --- a round -----------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """A step of the tasks that are next, or some smaller calls of theirs."""
        model = self._next_model()
        if model is None:
            if self._current is not None:
                self._current.batcher.close_request()
                self._current = None
            return
        if self._current is not model and self._current is not None:
            self._current.batcher.close_request()
        self._current = model
        self._number += 1
        self._served[model.spec.name] = self._number
        if model.batcher.why:
            self._plain_round(model)
        else:
            self._batched_round(model)

    def _next_model(self) -> LoadedModel | None:
        """The model of the most urgent task of one owner; of several the one that was served longest ago."""
        waiting = [work for work in self._work.values() if work.task.model in self._models]
        for work in waiting:
            # Its request is open until it ends.
            if work.run is not None and not work.run.delegates:
                return self._models[work.task.model]

        # Of several owners none may hold up the models of the others.
        alone = len({work.task.owner for work in waiting}) == 1

        def before(work: RunningTask) -> tuple[int, int, int]:
            urgency = -work.task.request.priority if alone else 0
            return urgency, self._served.get(work.task.model, 0), work.order

        first = min(waiting, key=before, default=None)
        return None if first is None else self._models[first.task.model]

    def _of(self, model: LoadedModel) -> list[RunningTask]:
        """A model's tasks, the most urgent first."""
        return sorted((w for w in self._work.values() if w.task.model == model.spec.name), key=lambda w: w.urgency)

    def _batched_round(self, model: LoadedModel) -> None:
        batcher = model.batcher
        came = sorted(self._of(model), key=lambda work: work.order)
        chosen = under_way([(work.task.owner, work.task.request.priority) for work in came], model.spec.together)
        active = sorted((came[place] for place in chosen), key=lambda work: work.urgency)
        for work in came:
            if work not in active and work.run is not None and not work.paused:
                work.paused = True
                self._say(Paused(work.task.id, f"{len(active)} images under way go first"))
        for work in active:
            work.paused = False
            if work.run is None:
                self._begin(work, model)
        active = [work for work in active if work.run is not None]
        runs = {work.run: work for work in active if work.run is not None}
        calls, seen = batcher.counts.calls, dict(batcher.counts.seen)
        trouble = batcher.round([*runs], self._seconds)
        if batcher.counts.calls > calls:
            self._step_seconds, self._waited = batcher.counts.seconds, batcher.counts.waited
            self._measure("", batcher.counts.seconds)
        for name, seconds in batcher.counts.seen.items():
            if seen.get(name) != seconds:
                self._measure(name, seconds)
        self._note(runs, trouble)

    def _note(self, runs: dict[PipelineTask, RunningTask], trouble: FailedCalls | None) -> None:
        """Take down for the others what has failed here."""
        for run, work in runs.items():
            if run.failure is not None:
                self._word.failed[work.task.id] = _failure(run.failure)
        if trouble is not None:
            failure = _failure(trouble.error)
            self._word.stuck = {runs[run].task.id: failure for run in trouble.stuck}
            assert self._current is not None
            self._current.batcher.close_request(trouble.error)

    def _plain_round(self, model: LoadedModel) -> None:
        """A step of the one task that is under way, through the parallel pipeline itself."""
        tasks = self._of(model)
        came = sorted(tasks, key=lambda work: work.order)
        first = under_way([(work.task.owner, work.task.request.priority) for work in came], 1)
        work = next((work for work in tasks if work.run is not None), came[first[0]])
        if work.run is None:
            model.batcher.close_request()
            self._begin(work, model)
        run = work.run
        if run is None:
            return
        started, waited, mesh = time.perf_counter(), model.engine.mesh.waited, model.engine.mesh
        if not run.begun:
            model.batcher.adapt(run.adapters)
        run.resume()
        self._step_seconds, self._waited = time.perf_counter() - started, mesh.waited - waited
        if run.failure is not None:
            self._word.failed[work.task.id] = _failure(run.failure)

    def _begin(self, work: RunningTask, model: LoadedModel) -> None:
        """Prepare a task's run; a task that cannot be done fails at the next round, on all ranks."""
        try:
            prepared = model.prepare(work.task)
        except Exception as error:
            self._word.failed[work.task.id] = _failure(error)
            return
        arguments = dict(prepared.arguments)
        called = "callback_on_step_end" in call_parameters(prepared.pipe)
        if called:
            arguments["callback_on_step_end"] = lambda *of: (self._stepped(work, model), of[-1])[-1]
        self._watch(work, model, prepared.pipe, not called)
        batched = not model.batcher.why
        work.prepared, work.steps, work.began = prepared, prepared.steps, time.perf_counter()
        work.run = PipelineTask(prepared.pipe, arguments, prepared.job.seed, self.device, prepared.adapters, batched)
        self._say(TaskBegan(work.task.id, prepared.steps))

    def _watch(self, work: RunningTask, model: LoadedModel, pipe: Any, counting: bool) -> None:
        """See every step of a pipeline's scheduler."""
        scheduler = getattr(pipe, "scheduler", None)
        if scheduler is None or not hasattr(scheduler, "step"):
            return
        # Patches that are on their way are not waited for.
        looking = self.rank == 0 and not model.engine.config.stages_or_patches

        def seen(latents: Callable[[], Latents | None]) -> None:
            if looking:
                work.latents = latents
            if counting:
                self._stepped(work, model)

        work.undo.callback(watch_steps(scheduler, seen))

    def _stepped(self, work: RunningTask, model: LoadedModel) -> None:
        """A task has done a step; in its coroutine."""
        run, prepared = work.run, work.prepared
        assert run is not None
        assert prepared is not None
        if not work.step:
            # Now its timesteps are set: planned was what was pending for.
            work.steps = loop_steps(getattr(prepared.pipe, "scheduler", None), prepared.steps)
        work.step = min(work.step + 1, work.steps)
        self._say(TaskStepped(work.task.id, work.step, work.steps, run.batch or 1))
        every = work.task.request.previews
        if self.rank == 0 and every and work.step % every == 0 and work.step < work.steps:
            self._preview(work, model)
        if not run.delegates:
            run.ask(None)

    def _preview(self, work: RunningTask, model: LoadedModel) -> None:
        try:
            self._show(work, model)
        except Exception as error:
            # A picture does without.
            logger.warning("a preview could not be made: %s", error)

    def _show(self, work: RunningTask, model: LoadedModel) -> None:
        latents = work.latents()
        assert work.prepared is not None
        width, height = work.prepared.job.size or model.info.default_size or (1, 1)
        shown = None if latents is None else latents.noisy if latents.estimate is None else latents.estimate
        small = None if shown is None else grid(shown, width / height)
        made = None if small is None else model.projection.jpeg(small)
        if made is not None:
            data, width, height = made
            self._say(Preview(work.task.id, work.step, width, height, data))

    # --- how it goes -------------------------------------------------------------------------------------------

    def _measure(self, name: str, seconds: float) -> None:
        before = self._measured.get(name)
        self._measured[name] = seconds if before is None else before + EWMA * (seconds - before)

    def _news(self) -> dict[str, float]:
        """Measured seconds that have changed enough to be said."""
        news = {
            name: seconds
            for name, seconds in self._measured.items()
            if abs(seconds - self._said.get(name, 0.0)) > 0.2 * seconds
        }
        self._said.update(news)
        return news

    def _state(self) -> RankState | None:
        """How this rank is, if that was not said a moment ago."""
        now = time.monotonic()
        if now - self._looked < STATE_INTERVAL:
            return None
        self._looked = now
        tiles = None if self._current is None else self._current.batcher.counts.tiles
        if self._current is not None:
            self._current.batcher.counts.tiles = None
        return RankState(
            rank=self.rank,
            device=str(self.device),
            tiles=tiles,
            step_seconds=self._step_seconds,
            waiting_seconds=self._waited,
            memory_bytes=_memory(self.device),
        )

    def _beat(self) -> None:
        """Say that the ranks are alive: after a step, and once a second without one."""
        steps, now = sum(model.batcher.counts.calls for model in self._models.values()), time.monotonic()
        if self.rank > 0 or (steps == self._calls and now - self._beaten < HEARTBEAT_INTERVAL):
            return
        self._calls, self._beaten = steps, now
        log = None if self._current is None else self._current.engine.staleness
        drifts = [] if log is None else [step.mean_drift for step in log.steps if step.mean_drift is not None]
        models = [model.batcher.counts for model in self._models.values()]
        sent: dict[str, int] = {}
        for model in self._models.values():
            for axis, count in model.engine.mesh.traffic.bytes_sent.items():
                sent[axis] = sent.get(axis, 0) + count
        self._say(
            Beat(
                running=tuple(name for name, work in self._work.items() if work.run is not None),
                batch=self._current.batcher.counts.batch if self._current is not None else 0,
                calls=sum(counts.calls for counts in models),
                rows=sum(counts.rows for counts in models),
                ranks=tuple(self._states[rank] for rank in sorted(self._states)),
                bytes=sent,
                synchronous_steps=0 if log is None else log.synchronous,
                drift=drifts[-1] if drifts else None,
            )
        )


def encoded(images: Sequence[Image], form: str, fps: int, receipt: Receipt) -> bytes:
    """A picture, or a video's frames, as a file: a PNG holds its receipt; frames are an MP4, or animated PNG or WebP.

    Raises:
        InputError: the format cannot hold what is to be in there.
    """
    from ..errors import InputError
    from ..generate.receipt import CHUNK
    from ..generate.video import write_mp4

    if form == "mp4":
        # A file: its index goes first, so that players begin before they have all of it, and is known last.
        with TemporaryDirectory(prefix="ditmesh-") as folder:
            path = Path(folder) / "video.mp4"
            write_mp4(images, path, fps, {CHUNK: receipt.model_dump_json()})
            return path.read_bytes()
    more: dict[str, Any] = {}
    if len(images) > 1:
        if form == "jpeg":
            raise InputError("a JPEG holds one picture, and this is a video; ask for format mp4, png or webp")
        more = {"save_all": True, "append_images": list(images[1:]), "duration": round(1000 / fps), "loop": 0}
    if form == "png":
        more["pnginfo"] = text_chunk(receipt)
    data = BytesIO()
    first = images[0] if form != "jpeg" else images[0].convert("RGB")
    first.save(data, format=form.upper(), **more)
    return data.getvalue()


def _failure(error: BaseException) -> FailureReason:
    """An error in the words of a report."""
    said = " ".join(str(error).split())[:MAX_MESSAGE] or type(error).__name__
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in said
    if memory:
        return FailureReason(
            "out_of_memory", f"there is not enough memory for this picture ({said}); ask for a smaller one"
        )
    if isinstance(error, PeerError):
        return FailureReason("internal", said, consequence=True)
    if isinstance(error, FloatingPointError):
        return FailureReason("internal", said)
    if isinstance(error, (ValueError, TypeError, NotImplementedError, LayoutError)):
        return FailureReason("invalid_request", said)
    return FailureReason("internal", f"{type(error).__name__}: {said}")


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    import psutil

    return int(psutil.Process().memory_info().rss)
