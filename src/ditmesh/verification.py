"""Does a configuration draw what one device draws? What ranks do to find out, and what is said about it.

One device draws first and leaves a trace of everything on disk (`tracing`). Then every configuration draws twice: once
watched, each rank comparing its own part with the trace, and once unwatched, against the clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .config import ParallelConfig
from .drawing import Job, call_arguments, check_config, device_of_rank, load
from .errors import ConfigError, InputError, LayoutError
from .launch import Report
from .quality import metrics

if TYPE_CHECKING:
    import numpy as np

    from .model_info import ModelInfo
    from .tracing import Compared, Part, Recorder, Spot

# Largest relative difference of latents and pictures that rounding explains, by type of the weights. Steps multiply
# what the first ones differ by, so these are far above a single step's rounding (1e-6 in float32).
TOLERANCES = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}

# Bytes that the values of one trace may take on disk.
TRACE_BUDGET = 4e9

Promise = Literal["bits", "tolerance", "none"]


# --------------------------------------------------------------------------------------------------
# What is promised


def promise_of(config: ParallelConfig) -> Promise:
    """What a configuration promises: the same ``"bits"``, a difference within ``"tolerance"``, or nothing.

    Stale strategies promise nothing about any one picture.
    """
    if config.reproducible:
        return "bits"
    return "none" if config.exchange != "exact" or config.stages_or_patches else "tolerance"


def reference_of(config: ParallelConfig) -> ParallelConfig | None:
    """What one device runs for comparison; None: the pipeline as diffusers has it, nothing parallelised.

    Of a reproducible configuration: the same settings on one device.
    """
    if not config.reproducible:
        return None
    settings = config.model_dump() | dict.fromkeys(config.degrees, 1)
    if config.stages_or_patches:
        settings["patches"] = config.patches or config.pipe
    return ParallelConfig(**{**settings, "weights": None})


def sensible(devices: int, model: ModelInfo, pictures: int, guided: bool, size: tuple[int, int] | None = None) -> list[ParallelConfig]:
    """Every configuration of ``devices`` devices that is worth trying: exact, then reproducible, then stale.

    Args:
        devices: number of ranks.
        model: its heads and tokens bound the degrees.
        pictures: pictures of one call; more data ranks have nothing to do.
        guided: whether there are two branches of guidance to share.
        size: width and height in pixels; None: the model's own.
    """
    found: list[ParallelConfig] = []
    degrees = [degree for degree in range(1, devices + 1) if devices % degree == 0]

    def offer(**settings: Any) -> None:
        try:
            config = ParallelConfig(**settings)
            check_config(config, model, devices, size)
        except ConfigError:
            return
        if config.data <= pictures and config.cfg <= (2 if guided else 1) and config.tensor <= (model.heads or 1):
            found.append(config)

    def grids(*axes: str) -> Iterator[dict[str, int]]:
        for chosen in product(*(degrees for _ in axes)):
            settings = dict(zip(axes, chosen, strict=True))
            total = 1
            for degree in chosen:
                total *= degree
            if total == devices:
                yield settings

    for grid in sorted(grids("ulysses", "ring", "cfg", "data", "tensor"), key=_simple_first):
        offer(**grid)
    for grid in sorted(grids("ulysses", "ring", "cfg", "data"), key=_simple_first):
        offer(**grid, reproducible=True)
    for grid in sorted(grids("ring", "cfg", "data"), key=_simple_first):
        if grid["ring"] > 1:
            offer(**grid, exchange="displaced")
            offer(**grid, exchange="naive")
    for grid in sorted(grids("pipe", "ulysses", "cfg"), key=_simple_first):
        if grid["pipe"] > 1:
            offer(**grid)
    return found


def _simple_first(grid: dict[str, int]) -> tuple[int, list[int]]:
    return sum(degree > 1 for degree in grid.values()), [-degree for degree in grid.values()]


# --------------------------------------------------------------------------------------------------
# What ranks do


@dataclass(frozen=True)
class Began:
    """A run begins: of one device or of a configuration, watched or against the clock."""

    what: str


@dataclass(frozen=True)
class Run:
    """One configuration on one rank.

    Attributes:
        pictures: float32 (B, H, W, C) from 0 to 1, one array for each call; of rank 0 only.
        digests: of every call's pictures on this rank.
        seconds: time that the calls took unwatched.
        repeats: whether the watched and the unwatched run gave the same bits.
        sent: bytes this rank sent in the unwatched run, by axis.
        parts, unknown: what the watched run found, when it was compared.
        stride: every so manieth channel is in the trace, when one was written.
        refused: why this configuration cannot run, if it cannot.
    """

    pictures: tuple[np.ndarray, ...] = ()
    digests: tuple[str, ...] = ()
    seconds: float = 0.0
    repeats: bool = True
    sent: dict[str, int] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    unknown: tuple[Spot, ...] = ()
    stride: int = 1
    refused: str | None = None


@dataclass(frozen=True)
class Task:
    """A run to make.

    Attributes:
        config: None: nothing parallelised.
        trace: folder of one device's trace: written by the one device, read by all others.
        writes: whether this run is the one device.
    """

    config: ParallelConfig | None
    trace: str
    writes: bool = False


def run_tasks(job: Job, tasks: Sequence[Task], *, report: Report | None = None) -> list[Run]:
    """Make several runs with one loaded pipeline. Every rank calls this; what they return belongs together.

    Args:
        job: what to draw; its own configuration does not count.
        tasks: the runs, in order.
        report: takes a `Began` from rank 0 before every run.

    Raises:
        InputError: the pipeline cannot do what is asked.
    """
    import torch.distributed as dist

    from .engine import parallelize, restore
    from .mesh import Mesh

    grouped = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if grouped else 0
    device = device_of_rank()
    pipe = load(job, device)
    runs = []
    for task in tasks:
        mesh = None
        if task.config is not None:
            mesh = Mesh(task.config, device=device, timeout=job.timeout)
            try:
                parallelize(pipe, task.config, mesh=mesh)
            except (InputError, LayoutError) as error:
                # Every rank refuses alike, before it has changed anything.
                mesh.close()
                runs.append(Run(refused=str(error)))
                continue
        if report is not None and rank == 0:
            report(Began(task.config.describe() if task.config is not None else "one device"))
        runs.append(_run(job, pipe, task, rank, grouped))
        if task.config is not None:
            restore(pipe)
        if mesh is not None:
            mesh.close()
    return runs


def _run(job: Job, pipe: Any, task: Task, rank: int, grouped: bool) -> Run:
    """Watched, then against the clock."""
    import torch.distributed as dist

    from .engine import engine_of
    from .tracing import Recorder, Trace, TraceComparer, TraceWriter

    steps = call_arguments(job, pipe, 0)["num_inference_steps"]
    if task.writes:
        # Guidance calls the transformer once or twice a step.
        sink: Any = TraceWriter(task.trace, TRACE_BUDGET, steps * len(job.prompts) * 2)
    else:
        sink = TraceComparer(Trace(task.trace), rank)
    with Recorder(pipe, sink) as recorder:
        watched = [_draw(job, pipe, number, recorder) for number in range(len(job.prompts))]
    if task.writes:
        sink.close()
    traffic = engine_of(pipe).mesh.traffic if task.config is not None else None
    if traffic is not None:
        traffic.reset()
    if grouped:
        # The clock starts when all are here.
        dist.barrier()
    started = time.perf_counter()
    pictures = [_draw(job, pipe, number) for number in range(len(job.prompts))]
    seconds = time.perf_counter() - started
    digests = tuple(map(metrics.digest, pictures))
    return Run(
        pictures=tuple(pictures) if rank == 0 else (),
        digests=digests,
        seconds=seconds,
        repeats=digests == tuple(map(metrics.digest, watched)),
        sent=dict(traffic.bytes_sent) if traffic is not None else {},
        parts=() if task.writes else tuple(sink.parts),
        unknown=() if task.writes else tuple(sink.unknown),
        stride=(sink.stride or 1) if task.writes else 1,
    )


def _draw(job: Job, pipe: Any, number: int, recorder: Recorder | None = None) -> np.ndarray:
    """The pictures of one prompt, before they are rounded to 8 bits."""
    if recorder is not None:
        recorder.begin(number)
    images = pipe(**call_arguments(job, pipe, number), output_type="np").images
    if recorder is not None:
        recorder.end()
    return images


# --------------------------------------------------------------------------------------------------
# What is said about it


@dataclass(frozen=True)
class Found:
    """The first place where a configuration differs from one device.

    Attributes:
        picture: number of the prompt, from 1.
        step, call: denoising step, and the transformer's call within it, from 1; step 0 is what the first step starts
            from; call 0 belongs to the scheduler.
        block: path of the block, or ``"scheduler"``.
        tensor: the stream, or ``"prediction"`` or ``"latents"``.
        token: first token of it that differs, in the scheduler's tensors the first row of values.
        ranks: who computed what differs.
        error, largest: relative and absolute difference.
    """

    picture: int
    step: int
    call: int
    block: str
    tensor: str
    token: int | None
    ranks: tuple[int, ...]
    error: float
    largest: float

    def describe(self) -> str:
        """Such as ``step 2, transformer_blocks.1, image (from token 128 on, rank 1)``."""
        where = f"step {self.step}, {self.block}, {self.tensor}"
        if self.picture > 1:
            where = f"prompt {self.picture}, {where}"
        who = "ranks " + ", ".join(map(str, self.ranks)) if len(self.ranks) > 1 else f"rank {(*self.ranks, 0)[0]}"
        at = f"token {self.token}, " if self.token is not None and self.block != "scheduler" else ""
        return f"{where} ({at}{who})"


@dataclass(frozen=True)
class Step:
    """Largest relative difference in one step, over all prompts: of the latents, of the prediction, of any block."""

    step: int
    latents: float
    prediction: float
    blocks: float


@dataclass(frozen=True)
class Verdict:
    """A configuration against one device.

    Attributes:
        config: in words; settings: as given to `ParallelConfig`.
        devices: number of ranks.
        reference: what it was compared with, in words.
        promise: what it promises (`promise_of`).
        tolerance: what it was judged by; None: not judged.
        passed: whether it kept its promise, or the tolerance; a refused one has not failed.
        refused: why it could not run, if it could not.
        equal: pictures and all of the scheduler's tensors have the same bits as on one device.
        blocks_equal: so have all blocks.
        seen: share of the trace that was compared.
        repeats: two runs of it gave the same bits.
        error: what is judged: the largest of the relative differences of latents (any step) and pictures.
        largest, mean, psnr, ssim, perceptual: of the worst picture; see `quality.metrics.Difference`.
        pictures: the same for every picture.
        latents: relative difference of the last step's latents.
        seconds, one_device_seconds: unwatched, without loading.
        bytes_sent: by axis, all ranks together, in the unwatched run.
        first_bit, first_beyond: where it first differs at all, and beyond the tolerance.
        growth: difference per step.
        heat: largest relative difference by block and step, over all prompts and streams.
    """

    config: str
    settings: dict[str, Any]
    devices: int
    reference: str
    promise: Promise
    tolerance: float | None
    passed: bool
    refused: str | None = None
    equal: bool = False
    blocks_equal: bool = False
    seen: float = 0.0
    repeats: bool = True
    error: float = 0.0
    largest: float = 0.0
    mean: float = 0.0
    psnr: float | None = None
    ssim: float = 1.0
    perceptual: float | None = None
    pictures: tuple[metrics.Difference, ...] = ()
    latents: float | None = None
    seconds: float = 0.0
    one_device_seconds: float = 0.0
    bytes_sent: dict[str, int] = field(default_factory=dict)
    first_bit: Found | None = None
    first_beyond: Found | None = None
    growth: tuple[Step, ...] = ()
    heat: dict[str, dict[int, float]] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """As JSON can hold it: infinite differences are null."""
        return _finite(asdict(self))


def judge(
    job: Job,
    config: ParallelConfig,
    runs: Sequence[Run],
    alone: Run,
    trace: str | Path,
    tolerance: float | None = None,
    perceptual: bool = False,
) -> Verdict:
    """Put together what all ranks found about one configuration.

    Args:
        job: what was drawn.
        config: the configuration.
        runs: every rank's, in rank order.
        alone: the one device's.
        trace: folder of its trace.
        tolerance: largest relative difference allowed; None: that of `TOLERANCES`, and none for stale strategies.
        perceptual: measure the learned perceptual distance too, where its weights are.
    """
    from .tracing import SCHEDULER, Trace, merge

    reference = reference_of(config)
    promise = promise_of(config)
    if tolerance is None and promise == "tolerance":
        tolerance = TOLERANCES[job.dtype]
    verdict = Verdict(
        config=config.describe(),
        settings=config.model_dump(mode="json"),
        devices=config.world_size,
        reference=reference.describe() if reference is not None else "one device",
        promise=promise,
        tolerance=tolerance,
        passed=True,
        refused=runs[0].refused,
    )
    if verdict.refused:
        return verdict
    opened = Trace(trace)
    compared = merge(opened, [part for run in runs for part in run.parts])
    pictures = tuple(
        metrics.compare(ours, theirs, perceptual)
        for mine, whole in zip(runs[0].pictures, alone.pictures, strict=True)
        for ours, theirs in zip(mine, whole, strict=True)
    )
    states = [one for one in compared if one.spot.path == SCHEDULER]
    latents = [one for one in states if one.spot.tensor == "latents"]
    unknown = {spot for run in runs for spot in run.unknown}
    agreed = all(run.digests == runs[0].digests for run in runs)
    equal = agreed and all(picture.equal for picture in pictures) and all(one.equal for one in states)
    error = max([one.error for one in latents] + [picture.largest for picture in pictures] + [0.0 if agreed else inf])
    if promise == "bits":
        passed = equal
    else:
        passed = tolerance is None or error <= tolerance
    last = [one.error for one in latents if one.spot.step == max(other.spot.step for other in latents)]
    learned = [picture.perceptual for picture in pictures if picture.perceptual is not None]
    sent: dict[str, int] = {}
    for run in runs:
        for axis, count in run.sent.items():
            sent[axis] = sent.get(axis, 0) + count
    beyond = tolerance if tolerance is not None else TOLERANCES[job.dtype]
    return replace(
        verdict,
        passed=passed,
        equal=equal,
        blocks_equal=all(one.equal for one in compared) and not unknown,
        seen=sum(one.seen for one in compared) / len(compared) if compared else 0.0,
        repeats=all(run.repeats for run in runs),
        error=error,
        largest=max(picture.largest for picture in pictures),
        mean=max(picture.mean for picture in pictures),
        psnr=min((picture.psnr for picture in pictures if picture.psnr is not None), default=None),
        ssim=min(picture.ssim for picture in pictures),
        perceptual=max(learned, default=None),
        pictures=pictures,
        latents=max(last, default=None),
        seconds=max(run.seconds for run in runs),
        one_device_seconds=alone.seconds,
        bytes_sent=sent,
        first_bit=_first(compared, lambda one: not one.equal),
        first_beyond=_first(compared, lambda one: not one.error <= beyond),
        growth=_growth(compared),
        heat=_heat(compared),
    )


def _first(compared: Sequence[Compared], differs: Any) -> Found | None:
    for one in compared:
        if differs(one):
            spot = one.spot
            return Found(
                spot.request + 1, spot.step, spot.call, spot.path, spot.tensor, one.token, one.ranks, one.error, one.largest
            )
    return None


def _growth(compared: Sequence[Compared]) -> tuple[Step, ...]:
    kinds = ("latents", "prediction", "blocks")
    errors: dict[int, dict[str, float]] = {}
    for one in compared:
        step = errors.setdefault(one.spot.step, dict.fromkeys(kinds, 0.0))
        kind = "blocks" if one.spot.call else one.spot.tensor
        step[kind] = max(step[kind], one.error)
    return tuple(Step(step, **found) for step, found in sorted(errors.items()) if step > 0)


def _heat(compared: Sequence[Compared]) -> dict[str, dict[int, float]]:
    heat: dict[str, dict[int, float]] = {}
    for one in compared:
        if one.spot.call:
            row = heat.setdefault(one.spot.path, {})
            row[one.spot.step] = max(row.get(one.spot.step, 0.0), one.error)
    return heat


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
