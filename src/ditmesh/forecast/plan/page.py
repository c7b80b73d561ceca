"""The page that `ditmesh plan --html` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...report import charts as figures
from ...report.curves import Point
from ...report.report import Download, Report, StyledText
from ..costs.hardware import Hardware
from ..explain import Line, number
from ..prediction import Prediction
from ..search import SearchResult
from .subject import PlanSubject

# Configurations of a chart: more are a cloud.
POINTS = 40


def page_of(
    subject: PlanSubject, hardware: Hardware, found: SearchResult, lines: Sequence[Line], data: dict[str, Any]
) -> Report:
    """The page of a plan; every figure on it is predicted.

    Args:
        subject, hardware: the request, and the devices.
        found: all predictions.
        lines: those that the table shows.
        data: everything, as JSON can hold it; it can be saved from the page.
    """
    workload = subject.workload
    report = Report(
        f"Plan for {subject.name}",
        f"Predicted, not measured: {hardware.describe()}, {workload.image:,} image and {workload.text:,} text tokens, "
        f"{workload.steps} steps, {workload.pictures} at once, guidance {'on' if workload.branches > 1 else 'off'}",
    )
    report.section("Configurations")
    report.table(
        ("configuration", "devices", "s, denoising", "ms a step", "GB a rank", "why"),
        [_row(line) for line in lines],
        "The best configurations, and the obvious ones that lose; predicted",
    )
    if hardware.error is not None:
        report.text(f"Predictions with this profile were off by {hardware.error:.0%} on average.", note=True)
    report.downloads([Download("plan.json", json.dumps(data, indent=1) + "\n")])
    report.section("Time and memory")
    some = found.best[:POINTS]
    report.charts(
        [
            (
                figures.scatter_chart(
                    [_point(one, one.config.world_size, one.latency) for one in some],
                    "Predicted seconds of all denoising steps over the devices",
                    "devices",
                    "seconds, predicted",
                ),
                "Time over devices; predicted",
            ),
            (
                figures.scatter_chart(
                    [_point(one, one.memory / 1e9, one.latency) for one in some if one.memory_is_known],
                    "Predicted seconds of all denoising steps over the memory of a rank",
                    "GB of a rank",
                    "seconds, predicted",
                ),
                "Time over memory; predicted",
            ),
        ]
    )
    report.section("The best one, term by term")
    best = found.best[0]
    report.table(
        ("term", "ms a step", "hidden, ms", "MB sent", "through"),
        [
            (t.name, f"{t.seconds * 1e3:.3g}", _number(t.hidden * 1e3), _number(t.sent / 1e6), t.through)
            for t in best.stale
            if t.seconds or t.hidden
        ],
        f"A step of {best.config.describe()}; predicted",
    )
    report.table(
        ("what", "GB"),
        [(term.name, f"{term.memory / 1e9:.3g}") for term in best.kept if term.memory],
        f"Memory of a rank of {best.config.describe()}; predicted",
    )
    report.section("What was planned with")
    report.facts(
        {"model": subject.source, "device": hardware.device.source, "link": hardware.link.source},
        "Sources of the figures",
    )
    return report


def _row(line: Line) -> tuple[str, ...]:
    one = line.prediction
    return (
        one.config.describe(),
        str(one.config.world_size),
        number(one.latency),
        number(one.step * 1e3),
        StyledText(f"{one.memory / 1e9:.3g}", "" if line.fits else "bad"),
        StyledText(line.sentence, "words"),
    )


def _point(one: Prediction, x: float, y: float) -> Point:
    names = one.config.describe()
    return Point(names, names, f"{one.config.world_size} devices", x, y)


def _number(value: float) -> str:
    return number(value) if value else ""
