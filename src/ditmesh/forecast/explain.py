"""The reasons why a configuration is the best, and why the others are not, a sentence each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import AXES
from .costs.hardware import Hardware
from .costs.step import Term
from .prediction import Prediction
from .search import Objective, SearchResult, score

# Configurations that a table shows besides the obvious ones that lose.
MAX_ROWS = 5


@dataclass(frozen=True)
class Line:
    """One line of a table: a prediction and its comment."""

    prediction: Prediction
    sentence: str
    fits: bool = True


def comparison_table(found: SearchResult, hardware: Hardware, objective: Objective) -> list[Line]:
    """The best configurations, then common alternatives with their disadvantages."""
    best = found.best[0]
    shown = [one for at, one in enumerate(found.best) if at < MAX_ROWS or _obvious(one, hardware)]
    lines: dict[str, Line] = {}
    for one in (*shown, *(one for one in found.too_large if _obvious(one, hardware))):
        if one.memory > found.room:
            line = Line(one, too_large(one, hardware), fits=False)
        else:
            line = Line(one, best_reasons(one, hardware) if one is best else against(one, best, hardware, objective))
        lines.setdefault(one.config.describe(), line)
    return sorted(lines.values(), key=lambda line: not line.fits)


def _obvious(one: Prediction, hardware: Hardware) -> bool:
    """True if one axis has all devices, or there is one device."""
    config = one.config
    several = [axis for axis in AXES if config.degrees[axis] > 1]
    usual = config.patches in (None, config.pipe * 2)
    return config.world_size in (1, hardware.world_size) and len(several) <= 1 and usual


def best_reasons(one: Prediction, hardware: Hardware) -> str:
    """The terms of the best configuration's time."""
    most = max((term for term in one.stale if term.kind not in ("transfer", "idle", "request")), key=_of_seconds)
    sentence = f"{_ms(most.seconds)} of {_ms(one.step)} a step are {most.name}"
    if one.waiting > 0:
        longest = max((term for term in one.stale if term.kind in ("transfer", "idle")), key=_of_seconds)
        sentence += f", {_ms(one.waiting)} wait, most for {_waits(longest)}"
    hidden = sum(term.hidden for term in one.stale if term.kind == "transfer")
    return sentence + (f", {_ms(hidden)} of transfers are hidden" if hidden > one.step / 100 else "")


def against(one: Prediction, best: Prediction, hardware: Hardware, objective: Objective) -> str:
    """The reason why a configuration is slower than the best one."""
    value = score(objective, hardware.world_size)
    ratio = abs(value(one) / value(best)) if objective != "throughput" else abs(value(best) / value(one))
    lead = f"{ratio:.2f} x the best: " if ratio > 1.005 else "as good: "
    if objective != "latency" and one.latency <= best.latency:
        return f"{lead}faster ({one.latency:.3g} s), on {one.config.world_size} devices"
    if one.config.world_size < best.config.world_size:
        return f"{lead}computes on {one.config.world_size} of {hardware.world_size} devices"
    exact = one.exact_steps * (one.first_step - one.step)
    if one.exact_steps < one.workload.steps and exact > one.latency / 4:
        return f"{lead}{one.exact_steps} of {one.workload.steps} steps are synchronous, {_ms(one.first_step)} each"
    ours, theirs = {term.name: term.seconds for term in best.stale}, one.stale
    timed = [term for term in theirs if term.kind != "request"]
    more = max(timed, key=lambda term: term.seconds - ours.get(term.name, 0.0))
    if more.kind in ("transfer", "idle"):
        what = f"wait for {_waits(more)}"
    else:
        what = f"are {more.name}, of which the best has {_ms(ours.get(more.name, 0.0))}"
    return f"{lead}{_ms(more.seconds)} of {_ms(one.step)} a step {what}"


def too_large(one: Prediction, hardware: Hardware) -> str:
    """The reason why a configuration does not fit."""
    most = max(one.kept, key=lambda term: term.memory)
    return (
        f"does not fit: {one.memory / 1e9:.3g} GB on a rank of {hardware.device.memory / 1e9:.3g} GB, "
        f"{most.memory / 1e9:.3g} GB of it {most.name}"
    )


def as_data(one: Prediction, hardware: Hardware) -> dict[str, Any]:
    """A prediction as plain data, with every term."""

    def terms(some: Sequence[Term]) -> list[dict[str, Any]]:
        return [{key: value for key, value in vars(term).items() if value not in ("", 0.0, ())} for term in some]

    return {
        "config": one.config.model_dump(exclude_defaults=True),
        "words": one.config.describe(),
        "devices": one.config.world_size,
        "step_seconds": one.step,
        "synchronous_step_seconds": one.first_step,
        "synchronous_steps": one.exact_steps,
        "denoising_seconds": one.latency,
        "error": hardware.error,
        "pictures_per_hour": one.throughput(hardware.world_size),
        "device_seconds_per_picture": one.device_seconds,
        "memory_bytes": one.memory,
        "terms": terms(one.stale),
        "memory": terms(one.kept),
    }


def _of_seconds(term: Term) -> float:
    return term.seconds


def _waits(term: Term) -> str:
    return f"{term.through} ({term.name})" if term.through else term.name


def _ms(seconds: float) -> str:
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * 1e3)} ms"


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
