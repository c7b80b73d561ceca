"""The best few of a plan on real ranks: some steps of each, with random weights; the fastest is kept."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ...config import ParallelConfig
from ...core.clock import timestep_among
from ...engine import engine_of, parallelized
from ...launch import Launcher
from ...layout.conventions import Conventions, Size
from ...layout.describe import model_class
from .. import measurements as kept
from ..costs.hardware import Hardware
from ..fit import fit_profile
from ..prediction import Prediction, predict
from .subject import PlanSubject

# Steps of each configuration, of which the first two do not count.
MEASURED_STEPS = 5


def measured(
    pool: Launcher, subject: PlanSubject, some: Sequence[Prediction], hardware: Hardware, rounds: int = 2
) -> list[tuple[Prediction, float]]:
    """Seconds of a step of each prediction's configuration, the fastest first.

    Configurations take turns, and the best of several rounds counts. Branches of guidance are rows of one call, also
    where the pipeline has a call for each.

    Args:
        pool: as many ranks as every configuration has.
        subject: the model; its transformer runs with random weights and inputs.
        some: predictions.
        hardware: of the predictions.
        rounds: turns of each.
    """
    workload, times = subject.workload, [float("inf")] * len(some)
    side = max(1, round(workload.image**0.5))
    for _ in range(rounds):
        for at, one in enumerate(some):
            settings = one.config.model_dump(exclude_defaults=True)
            sizes = (side, max(1, workload.image // side), workload.text, workload.pictures * workload.branches)
            seconds = max(pool.run(_seconds, subject.transformer, subject.config, sizes, settings))
            times[at] = min(times[at], seconds)
    return sorted(zip(some, times, strict=True), key=lambda pair: pair[1])


def keep_fastest(
    subject: PlanSubject, results: Sequence[tuple[Prediction, float]], hardware: Hardware, exactness: str
) -> tuple[Hardware, float]:
    """Keep the fastest configuration, and the profile that the measured steps fit; returns that and its mean error."""
    refined = fit_profile(hardware, [(one.stale, one.config.world_size, seconds) for one, seconds in results])
    errors = [
        abs(predict(one.config, subject.model.work, subject.workload, refined).step / seconds - 1)
        for one, seconds in results
    ]
    error = sum(errors) / len(errors)
    refined = refined.model_copy(update={"error": round(error, 4)})
    best, seconds = results[0]
    key = kept.key_of(subject.model.work, subject.workload, hardware.device.name, best.config.world_size)
    kept.write_entry(
        key,
        {
            "model": subject.name,
            "image": subject.workload.image,
            "text": subject.workload.text,
            "branches": subject.workload.branches,
            "device": hardware.device.name,
            "devices": best.config.world_size,
            "exactness": exactness,
            "config": best.config.model_dump(exclude_defaults=True),
            "step_seconds": seconds,
            "hardware": refined.model_dump(),
        },
    )
    return refined, error


@cache
def _model(transformer: str, config: str) -> Any:
    torch.manual_seed(0)
    model = model_class(transformer).from_config(json.loads(config)).eval()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        model = model.to("cuda", torch.bfloat16)
    return model


def _seconds(
    transformer: str, config: dict[str, Any], sizes: tuple[int, int, int, int], settings: dict[str, Any]
) -> float:
    model = _model(transformer, json.dumps(config))
    rows, cols, text, batch = sizes
    inputs = Conventions(model, _way(model)).inputs(Size(rows, cols, text, batch=batch))
    parallel = ParallelConfig(**{**settings, **({"warmup": "fixed(1)"} if _late(settings) else {})})
    times = []
    with parallelized(model, parallel), torch.no_grad():
        engine_of(model).begin_request(MEASURED_STEPS)
        for step in range(MEASURED_STEPS):
            made = dict(inputs)
            name = timestep_among(made)
            if name is not None:
                made[name] = made[name] * (1 - 0.01 * step)
            if dist.is_initialized():
                dist.barrier()
            started = time.perf_counter()
            model(**made)
            if next(model.parameters()).is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        engine_of(model).end_request()
    return min(times[2:])


def _late(settings: dict[str, Any]) -> bool:
    return settings.get("exchange", "exact") != "exact" or settings.get("pipe", 1) > 1


@cache
def _way(model: Any) -> Any:
    from ...layout.probe import _first_way

    return _first_way(model, type(model).__name__).way
