"""Verification runs of every configuration and of one device.

One device runs first and leaves a trace of everything on disk (`tracing`). Then every configuration runs twice: once
recorded, each rank comparing its own part with the trace, and once unrecorded, against the clock.
"""

from __future__ import annotations

import gc
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from errno import ENOSPC
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ..comm import Link, Traffic
from ..comm.backends import device_of_rank
from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..core.patching import Patch
from ..errors import ConfigError, InputError, LayoutError, UntestedWarning
from ..generate.arguments import call_parameters, steps_of
from ..generate.job import PictureJob, check_config
from ..generate.model_info import find_model
from ..generate.runner import PipelineRunner, rank_of_process
from ..launch import MessageSink
from ..resizing import grids, resized

if TYPE_CHECKING:
    from ..generate.model_info import ModelInfo
    from .tracing import ComparedPart, Recorder, Spot

# Maximum bytes of a trace's values on disk, and minimum free bytes to begin a trace.
TRACE_BUDGET = 4e9
LEAST_BUDGET = 64e6


def reference_config(config: ParallelConfig) -> ParallelConfig | None:
    """The one-device reference: the same settings for a reproducible configuration, else None (plain diffusers)."""
    return resized(config, 1) if config.reproducible else None


def config_name(config: ParallelConfig | None) -> str:
    """A configuration in words, with every non-default setting; None: one device."""
    if config is None:
        return "one device"
    described = config.describe()
    named = {word.partition("=")[0] for word in described.split()} | set(config.degrees)
    settings = config.model_dump(exclude_defaults=True)
    return " ".join([described, *(f"{name}={value}" for name, value in settings.items() if name not in named)])


def sensible(
    devices: int,
    model: ModelInfo,
    pictures: int,
    guided: bool,
    size: tuple[int, int] | None = None,
    frames: int = 1,
) -> list[ParallelConfig]:
    """Every sensible configuration of ``devices`` devices: exact, then reproducible, then stale.

    Degrees are bounded by the model's heads and tokens, the images of one call, and whether there are two branches
    of guidance to share. The size is in pixels, width and height; None: the model's own. Videos have ``frames``.
    """
    most = {"data": pictures, "cfg": 2 if guided else 1, "tensor": model.heads or 1}

    def whole(*axes: str) -> list[dict[str, int]]:
        """Degrees of these axes that use all devices, the simplest first."""
        some = [grid for grid in grids(devices, most, axes) if prod(grid.values()) == devices]
        return sorted(some, key=lambda grid: (sum(d > 1 for d in grid.values()), [-d for d in grid.values()]))

    rings, pipes = (
        [grid for grid in whole(*axes) if grid[axes[0]] > 1]
        for axes in (("ring", "cfg", "data"), ("pipe", "ulysses", "cfg"))
    )
    settings: list[dict[str, Any]] = [
        *whole("ulysses", "ring", "cfg", "data", "tensor"),
        *(grid | {"reproducible": True} for grid in whole("ulysses", "ring", "cfg", "data")),
        *(grid | {"exchange": exchange} for grid in rings for exchange in ("displaced", "naive")),
        *pipes,
    ]
    offered: list[ParallelConfig] = []
    for setting in settings:
        with suppress(ConfigError):
            config = ParallelConfig(**setting)
            check_config(config, model, devices, size, frames)
            offered.append(config)
    return offered


# --------------------------------------------------------------------------------------------------
# The ranks' side


@dataclass(frozen=True)
class RunBegan:
    """The start of a run: of one device or a configuration, recorded or timed."""

    what: str


@dataclass(frozen=True)
class RankRun:
    """One configuration on one rank.

    Attributes:
        pictures: float32 (B, H, W, C) from 0 to 1, one array for each call; of videos the frames, those of the first
            one first. Of rank 0 only.
        digests: of every call's images on this rank.
        seconds: time that the calls took unrecorded.
        repeats: whether the recorded and the unrecorded run gave the same bits.
        sent: bytes this rank sent in the unrecorded run, by axis.
        parts, unknown: results of the comparison, when there was one.
        stride: every ``stride``-th channel is in the trace, when one was written.
        refused: why this configuration cannot run, if it cannot.
        timeline: of the first unrecorded call, when it was asked for.
    """

    pictures: tuple[np.ndarray, ...] = ()
    digests: tuple[str, ...] = ()
    seconds: float = 0.0
    repeats: bool = True
    sent: dict[str, int] = field(default_factory=dict)
    parts: tuple[ComparedPart, ...] = ()
    unknown: tuple[Spot, ...] = ()
    stride: int = 1
    refused: str | None = None
    timeline: Any = None


class Timeline(Protocol):
    """Records when a rank computes and waits, while its context is open."""

    def __enter__(self) -> Timeline: ...

    def __exit__(self, *error: object) -> None: ...

    def result(self) -> Any:
        """What was recorded; ranks send it, pickled."""
        ...


class MakeTimeline(Protocol):
    """Makes the timeline of a rank's run; a class or a function of a module, because it is sent to ranks."""

    def __call__(
        self, pipe: Any, models: Sequence[tuple[nn.Module, Sequence[str]]], traffic: Traffic | None, alone: bool
    ) -> Timeline:
        """See `ditmesh.lab.verify.timeline.TimelineRecorder`."""
        ...


@dataclass(frozen=True)
class RunTask:
    """A run of one device or a configuration.

    Attributes:
        config: None: nothing parallelised.
        trace_folder: of one device's trace: written by the one device, read by all others.
        writes: whether this run is the one device, whatever other ranks the job has.
        trace_bytes: bytes that the values of the trace may take, about.
        timeline: records the timed run of this rank, such as `ditmesh.lab.verify.timeline.TimelineRecorder`.
    """

    config: ParallelConfig | None
    trace_folder: str
    writes: bool = False
    trace_bytes: float = TRACE_BUDGET
    timeline: MakeTimeline | None = None


def budget_of(folder: str | Path, traces: int, wanted: float = TRACE_BUDGET) -> float:
    """Bytes that the values of each of ``traces`` traces may take in a folder: at most half of what is free there.

    Raises:
        InputError: there is no room for traces.
    """
    free = shutil.disk_usage(folder).free
    budget = min(wanted, free / 2 / traces)
    if budget < min(wanted, LEAST_BUDGET):
        raise InputError(
            f"{str(folder)!r} has {free / 1e6:.0f} MB free, too little to keep what one device computes; name another "
            "folder with --trace-dir"
        )
    return budget


def run_tasks(job: PictureJob, tasks: Sequence[RunTask], *, report: MessageSink | None = None) -> list[RankRun]:
    """Run several tasks, with one loaded pipeline for all tasks that need whole weights.

    Every rank calls this, and of a task that writes the first one alone.

    Their results belong together.

    Args:
        job: what to generate; its own configuration does not count.
        tasks: the runs, in order.
        report: takes a `RunBegan` from rank 0 before every run.

    Raises:
        InputError: the pipeline cannot run the request.
    """

    from ..engine import parallelize, restore
    from ..generate.loading import partial_read_refusal

    rank, device = rank_of_process(), device_of_rank()
    pipe: Any = None
    runs = []
    for task in tasks:
        mesh = None
        # A share of the weights is loaded for this run alone.
        share = task.config is not None and task.config.cuts_weights
        share = share and partial_read_refusal(find_model(job.model), job.variant) is None
        if share:
            pipe = None
            gc.collect()
        elif pipe is None:
            pipe = PipelineRunner.load(job, device).pipe
        if task.config is not None:
            # One device needs no other rank.
            alone = {"world": Link("world", [0], 0, Traffic())} if task.writes else None
            mesh = Mesh(task.config, device=device, timeout=job.timeout, links=alone)
            try:
                if share:
                    pipe = PipelineRunner.load(job, device, mesh).pipe
                with warnings.catch_warnings():
                    # Hide the warning about untested combinations: this is the test.
                    warnings.simplefilter("ignore", UntestedWarning)
                    parallelize(pipe, task.config, mesh=mesh)
            except (InputError, LayoutError) as error:
                # Every rank raises the same error, before it has changed anything.
                mesh.close()
                runs.append(RankRun(refused=str(error)))
                pipe = None if share else pipe
                continue
        if report is not None and rank == 0:
            report(RunBegan(config_name(task.config)))
        runs.append(_run(job, pipe, task, rank))
        if mesh is not None:
            if share:
                # To make it whole takes room for all of it.
                pipe = None
            else:
                restore(pipe)
            mesh.close()
    return runs


def _run(job: PictureJob, pipe: Any, task: RunTask, rank: int) -> RankRun:
    """Run a task recorded, then timed."""
    from ..core.digests import digest
    from ..engine import engine_of

    recorded, found = _recorded(job, pipe, task, rank)
    traffic = engine_of(pipe).mesh.traffic if task.config is not None else Traffic()
    traffic.reset()
    pictures, seconds, timeline = _timed(job, pipe, task, traffic)
    digests = tuple(map(digest, pictures))
    return RankRun(
        pictures=tuple(pictures) if rank == 0 else (),
        digests=digests,
        seconds=seconds,
        repeats=digests == tuple(map(digest, recorded)),
        sent=dict(traffic.bytes_sent),
        timeline=timeline,
        **found,
    )


def _recorded(job: PictureJob, pipe: Any, task: RunTask, rank: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The images of every call, and the trace's data, as fields of `RankRun`."""
    from .tracing import Recorder, Trace, TraceComparer, TraceWriter

    if task.writes:
        # Guidance calls the transformer once or twice a step.
        calls = steps_of(job, call_parameters(pipe)) * len(job.prompts) * 2
        sink: Any = TraceWriter(task.trace_folder, task.trace_bytes, calls)
    else:
        sink = TraceComparer(Trace(task.trace_folder), rank)
    try:
        with Recorder(pipe, sink) as recorder, channels_first(pipe):
            pictures = [_generate(job, pipe, number, recorder) for number in range(job.calls)]
    except OSError as error:
        if error.errno != ENOSPC:
            raise
        raise InputError(
            f"no space is left in {str(Path(task.trace_folder).parent)!r} for what one device computes; name another "
            "folder with --trace-dir, or keep less with --trace-gb"
        ) from error
    if task.writes:
        return pictures, {"stride": sink.stride or 1}
    return pictures, {"parts": tuple(sink.parts), "unknown": tuple(sink.unknown)}


def _timed(job: PictureJob, pipe: Any, task: RunTask, traffic: Traffic) -> tuple[list[np.ndarray], float, Any]:
    """The images of every call, the seconds of all, and the timeline of the first when it is asked for."""
    from ..engine import denoisers, find_layout

    if dist.is_initialized() and not task.writes:
        # The clock starts when all ranks are here.
        dist.barrier()
    started = time.perf_counter()
    timeline = None
    with channels_first(pipe):
        if task.timeline is not None:
            models = [(model, [one.blocks for one in find_layout(model).regions]) for model in denoisers(pipe)]
            own = traffic if task.config is not None else None
            with task.timeline(pipe, models, own, task.writes) as recorder:
                pictures = [_generate(job, pipe, 0)]
            timeline = recorder.result()
        else:
            pictures = [_generate(job, pipe, 0)]
        pictures += [_generate(job, pipe, number) for number in range(1, job.calls)]
    return pictures, time.perf_counter() - started, timeline


@contextmanager
def channels_first(pipe: Any) -> Iterator[None]:
    """Encode images with channels first in memory, on one device and on ranks alike.

    Of images with channels last, as diffusers' processors make them, torch's group norm on a CPU sums squares in
    float32 over all pixels, which is far off where they are nearly of one colour.
    """
    vae = getattr(pipe, "vae", None)
    if not hasattr(vae, "encode"):
        yield
        return

    def encode(x: Any, *args: Any, **kwargs: Any) -> Any:
        on_cpu = isinstance(x, torch.Tensor) and x.device.type == "cpu"
        return patch.original(x.contiguous() if on_cpu else x, *args, **kwargs)

    patch = Patch(vae, "encode", encode)
    try:
        yield
    finally:
        patch.undo()


def _generate(job: PictureJob, pipe: Any, number: int, recorder: Recorder | None = None) -> np.ndarray:
    """The images of one prompt, or the frames of its videos, before they are rounded to 8 bits."""
    if recorder is not None:
        recorder.begin(number)
    runner = PipelineRunner(pipe, device_of_rank())
    made = runner.run(runner.prepare(job, number, {}, output_type="np"))
    if recorder is not None:
        recorder.end()
    return np.concatenate([one.frames for one in made])
