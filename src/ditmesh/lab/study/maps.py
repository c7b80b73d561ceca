"""Maps of a study's errors, by layer and by place in the image; and the load of real ranks in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
from PIL import Image

from ...quality.pictures import eight_bits
from ...report.formatting import number_text
from ..pages.charts import Chart, coloured, heat_map, line_chart, scale_maximum
from ..pages.curves import Series, grid
from ..pages.page import GridImage, Page

# Pixels of a map's side on the page, about.
MAP_SIDE = 192

# By block path and step (counted from 0, as JSON has it): relative errors; None where all was zero.
Errors = Mapping[str, Mapping[str, float | None]]


def layer_charts(errors: Errors, evaluations: int, of: str) -> list[tuple[Chart, str]]:
    """The two margins of the map of attention's errors: by block over all stale steps, and by step over all blocks."""
    known = {
        block: {int(step): value for step, value in by.items() if value is not None} for block, by in errors.items()
    }
    blocks = [(number, list(by.values())) for number, by in enumerate(known.values()) if by]
    steps = [
        (step, found) for step in range(evaluations) if (found := [by[step] for by in known.values() if step in by])
    ]
    charts = []
    for some, what, axis in ((blocks, "block", "block, from 0"), (steps, "step", "step")):
        first = 0 if what == "block" else 1
        line = spread_line("mean", [(place + first, values) for place, values in some])
        beside = "step" if what == "block" else "block"
        chart = line_chart([line], f"Error of attention by {what}, {of}", axis, "relative error")
        charts.append((chart, f"{of}: mean over every {beside}, and from its smallest to its largest value."))
    return charts


def spread_line(name: str, places: Sequence[tuple[int, Sequence[float]]]) -> Series:
    """A line of means with the range of the values that they are of."""
    xs, values = tuple(float(x) for x, _ in places), [some for _, some in places]
    return Series(
        name,
        xs,
        tuple(float(np.mean(some)) for some in values),
        tuple(min(some) for some in values),
        tuple(max(some) for some in values),
    )


def place_maps(
    report: Page, tokens: Sequence[Sequence[Sequence[float]]], devices: int, stale: Sequence[int], of: str
) -> None:
    """Maps of the prediction's error in the image: rows over steps, and all stale steps together.

    Args:
        tokens: `running.token_errors`, (evaluations, rows, columns).
        devices: N; ranks have runs of tokens, row after row.
        stale: steps, from 0.
        of: its subject, in words.
    """
    values = np.array(tokens, dtype=float)
    rows = np.sqrt((values**2).mean(2))
    count = values.shape[1]
    found = grid(
        {(str(row + 1), str(step + 1)): float(rows[step, row]) for row in range(count) for step in range(len(rows))}
    )
    meet = [f"{count * rank / devices:g}" for rank in range(1, devices)]
    chart = heat_map(found, f"Error of the prediction by row, {of}", "step", "row of the latents")
    said = f" The ranks' shares meet below {'row' if len(meet) == 1 else 'rows'} {', '.join(meet)}, if they are even."
    report.chart(
        chart, f"{of}: root mean square error of a row of the latents over that of the whole prediction.{said}"
    )
    if not len(stale):
        return
    whole = np.sqrt((values[list(stale)] ** 2).mean(0))[:, :, None]
    factor = max(1, MAP_SIDE // max(whole.shape[:2]))
    large = whole.repeat(factor, 0).repeat(factor, 1)
    bright = scale_maximum([whole])
    borders = [rank / devices for rank in range(1, devices)]
    image = Image.fromarray(eight_bits(coloured(large, bright, borders)))
    seam, inside = seam_ratio(whole[:, :, 0], devices)
    ratio = "" if seam is None else f"; at the ranks' borders {number_text(seam)}, elsewhere {number_text(inside)}"
    report.images(
        [
            [
                GridImage(
                    image, f"stale steps, largest {number_text(float(whole.max()), 2)}", f"{of}: error by place", bright
                )
            ]
        ],
        f"{of}: where in the image the predictions of stale steps are wrong, over the whole prediction's root mean "
        f"square{ratio}. Dashes: where the ranks' shares meet, if they are even.",
    )


def seam_ratio(places: np.ndarray, devices: int) -> tuple[float | None, float | None]:
    """Root mean square error of the rows on both sides of the ranks' borders, and of all others; None: no others."""
    count = len(places)
    if count % devices or count // devices < 3:
        return None, None
    rows = np.zeros(count, dtype=bool)
    for rank in range(1, devices):
        rows[[count * rank // devices - 1, count * rank // devices]] = True
    return tuple(float(np.sqrt((places[some] ** 2).mean())) for some in (rows, ~rows))  # pyright: ignore[reportReturnType]


def load_charts(ranks: Sequence[Mapping[str, Any]], of: str) -> list[tuple[Chart, str]]:
    """Charts of every rank's load in every step of a request: seconds of work, and of collectives."""
    if not all(rank.get("steps") for rank in ranks):
        # Of a study that was made before steps were timed.
        return []
    charts = []
    for what, name, said in (
        (
            lambda step: step["seconds"] - step["in_collectives"],
            "Working",
            "seconds outside of collectives",
        ),
        (lambda step: step["in_collectives"], "Inside collectives", "seconds of sending and waiting"),
    ):
        values = {
            (f"rank {number}", str(place + 1)): float(what(step))
            for number, rank in enumerate(ranks)
            for place, step in enumerate(rank["steps"])
        }
        if all(isfinite(value) for value in values.values()):
            chart = heat_map(grid(values), f"{name} by rank and step, {of}", "step", "rank")
            charts.append((chart, f"{of}: {said}, by rank and step; the second request of two."))
    return charts
