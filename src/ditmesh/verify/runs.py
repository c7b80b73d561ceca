"""Verification runs of every configuration and of one device, in order.

One device runs first, and what its scheduler was given and returned (`steps`) goes to all ranks. Then every
configuration runs twice: once recorded and compared with that, and once unrecorded, against the clock.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch.distributed as dist

from ..comm import Link, Traffic
from ..comm.backends import device_of_rank
from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..errors import ConfigError, FewStepsWarning, InputError, LayoutError, UntestedWarning
from ..generate.job import PictureJob, check_config
from ..generate.model_info import ModelInfo, find_model
from ..generate.runner import PipelineRunner, rank_of_process
from ..launch import Launcher, MessageSink
from ..resizing import resized
from .steps import ComparedTensor, StepRecorder, Steps, compare_steps


def reference_config(config: ParallelConfig) -> ParallelConfig | None:
    """The one-device reference: the same settings for a reproducible configuration, its cache, or None (diffusers)."""
    if config.cache is not None:
        return ParallelConfig(cache=config.cache)
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
    images: int,
    guided: bool,
    size: tuple[int, int] | None = None,
    frames: int = 1,
) -> list[ParallelConfig]:
    """Every sensible configuration of ``devices`` devices: exact, then reproducible, then stale.

    Degrees are bounded by the model's heads and tokens, the images of one call, and the branches of guidance. The size
    is in pixels, width and height; None: the model's own.
    """
    most = {"data": images, "cfg": 2 if guided else 1, "tensor": model.heads or 1}

    def grids_of(*axes: str) -> list[dict[str, int]]:
        """Degrees of these axes that use all devices, the simplest first."""
        divisors = [n for n in range(1, devices + 1) if devices % n == 0]
        degrees = ([n for n in divisors if n <= most.get(axis, devices)] for axis in axes)
        some = [dict(zip(axes, grid, strict=True)) for grid in product(*degrees) if prod(grid) == devices]
        return sorted(some, key=lambda grid: (sum(d > 1 for d in grid.values()), [-d for d in grid.values()]))

    rings, pipes = (
        [grid for grid in grids_of(*axes) if grid[axes[0]] > 1]
        for axes in (("ring", "cfg", "data"), ("pipe", "ulysses", "cfg"))
    )
    settings: list[dict[str, Any]] = [
        *grids_of("ulysses", "ring", "cfg", "data", "tensor"),
        *(grid | {"reproducible": True} for grid in grids_of("ulysses", "ring", "cfg", "data")),
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


@dataclass(frozen=True)
class RankRun:
    """One configuration on one rank.

    Attributes:
        images: float32 (B, H, W, C) from 0 to 1, one array for each call; of videos the frames, those of the first
            one first. Of rank 0 only.
        digests: of every call's images on this rank.
        seconds: time that the calls took unrecorded.
        repeats: whether the recorded and the unrecorded run gave the same bits.
        sent: bytes this rank sent in the unrecorded run, by axis.
        steps: the recorded tensors of every call, of the one device only.
        compared: them against those of the one device.
        refused: why this configuration cannot run.
    """

    images: tuple[np.ndarray, ...] = ()
    digests: tuple[str, ...] = ()
    seconds: float = 0.0
    repeats: bool = True
    sent: dict[str, int] = field(default_factory=dict)
    steps: tuple[Steps, ...] = ()
    compared: tuple[ComparedTensor, ...] = ()
    refused: str | None = None


@dataclass(frozen=True)
class RunTask:
    """A run of one device or a configuration; without a configuration nothing is parallelised.

    ``reference``: `RankRun.steps` of the one device; None: this run is the one device, whatever ranks the job has.
    """

    config: ParallelConfig | None
    reference: tuple[Steps, ...] | None = None


def run_tasks(job: PictureJob, tasks: Sequence[RunTask], *, report: MessageSink | None = None) -> list[RankRun]:
    """Run several tasks, with one loaded pipeline for all tasks that need whole weights.

    Every rank calls this, and for the one device the first one alone. The job's own configuration does not count.
    ``report``: takes the name of a configuration from rank 0 before every run. `InputError`: the pipeline cannot run
    the request.
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
            alone = {"world": Link("world", [0], 0, Traffic())} if task.reference is None else None
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
            report(config_name(task.config))
        with warnings.catch_warnings():
            # What few steps do to a stale strategy's image stands in the result.
            warnings.simplefilter("ignore", FewStepsWarning)
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

    recorded, steps, compared = [], [], []
    for number in range(job.calls):
        with StepRecorder(pipe) as recorder:
            recorded.append(digest(_generate(job, pipe, number)))
        if task.reference is None:
            steps.append(recorder.steps())
        else:
            compared += compare_steps(number + 1, recorder.steps(), task.reference[number], rank)
    traffic = engine_of(pipe).mesh.traffic if task.config is not None else Traffic()
    traffic.reset()
    if dist.is_initialized() and task.reference is not None:
        # The clock starts when all ranks are here.
        dist.barrier()
    started = time.perf_counter()
    images = [_generate(job, pipe, number) for number in range(job.calls)]
    seconds = time.perf_counter() - started
    digests = [digest(images_of_call) for images_of_call in images]
    return RankRun(
        images=tuple(images) if rank == 0 else (),
        digests=tuple(digests),
        seconds=seconds,
        repeats=digests == recorded,
        sent=dict(traffic.bytes_sent),
        steps=tuple(steps),
        compared=tuple(compared),
    )


def _generate(job: PictureJob, pipe: Any, number: int) -> np.ndarray:
    """The images of one prompt, or the frames of its videos, before they are rounded to 8 bits."""
    runner = PipelineRunner(pipe, device_of_rank())
    samples = runner.run(runner.prepare(job, number, {}, output_type="np"))
    return np.concatenate([sample.frames for sample in samples])


# Runs of all ranks, by configuration; None: plain diffusers.
Runs = dict[ParallelConfig | None, list[RankRun]]


@dataclass(frozen=True)
class VerifyRanks:
    """The ranks of verify: ``start`` gives those for a number of devices, or all that torchrun has started.

    ``is_reporter``: whether this process has the results, and prints the verdicts.
    """

    start: Callable[[int], AbstractContextManager[Launcher]]
    threads: int
    is_reporter: bool = True

    def run(
        self, devices: int, job: PictureJob, tasks: Sequence[RunTask], on_message: Callable[[int, Any], None]
    ) -> list[list[RankRun]]:
        """The runs of ``devices`` ranks, in rank order; see `run_tasks`."""
        # Of torchrun's ranks the first also runs the one device, while the others wait.
        here = tasks if devices > 1 or self.is_reporter else ()
        with self.start(devices) as ranks:
            return ranks.run(run_tasks, job, here, on_message=on_message)[:devices]


def compared_runs(
    job: PictureJob,
    configs: Sequence[ParallelConfig],
    ranks: VerifyRanks,
    progress: Callable[[str, int, int], None],
) -> Runs:
    """The runs of configurations and, first, of their one-device references. Every rank of torchrun calls this.

    A request that fails on one device is not run on several: the reference's runs stand for it. ``progress``: takes the
    present action, how many runs have begun, and how many there will be.
    """
    references = list(dict.fromkeys(map(reference_config, configs)))
    total = len(references) + len(configs)

    def run(devices: int, tasks: Sequence[RunTask]) -> list[list[RankRun]]:
        """For each task the runs of its ranks."""
        progress(f"starting {devices} rank{'s' if devices > 1 else ''}", 0, total)

        def begin(rank: int, began: Any) -> None:
            progress(began, 1, total)

        by_rank = ranks.run(devices, job, tasks, begin)
        return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]

    runs: Runs = dict(zip(references, run(1, [RunTask(reference) for reference in references]), strict=True))
    alone = {config: runs[reference_config(config)][0] for config in configs}
    for devices in sorted({config.world_size for config in configs}):
        able = [config for config in configs if config.world_size == devices and not alone[config].refused]
        tasks = [RunTask(config, alone[config].steps) for config in able]
        runs |= zip(able, run(devices, tasks) if able else [], strict=True)
    return runs | {config: [alone[config]] for config in configs if alone[config].refused}
