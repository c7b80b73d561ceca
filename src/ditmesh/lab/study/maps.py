"""Maps of a study's errors by place in the image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from ..pages.charts import coloured, eight_bits, grid, heat_map, number_text, scale_maximum
from ..pages.page import GridImage, Page

# Pixels of a map's side on the page, about.
MAP_SIDE = 192


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
    table = grid(
        {(str(row + 1), str(step + 1)): float(rows[step, row]) for row in range(count) for step in range(len(rows))}
    )
    meet = [f"{count * rank / devices:g}" for rank in range(1, devices)]
    chart = heat_map(table, f"Error of the prediction by row, {of}", "step", "row of the latents")
    said = f" The ranks' shares meet below {'row' if len(meet) == 1 else 'rows'} {', '.join(meet)}, if they are even."
    report.chart(
        chart, f"{of}: root mean square error of a row of the latents over that of the whole prediction.{said}"
    )
    if not len(stale):
        return
    error = np.sqrt((values[list(stale)] ** 2).mean(0))[:, :, None]
    factor = max(1, MAP_SIDE // max(error.shape[:2]))
    large = error.repeat(factor, 0).repeat(factor, 1)
    bright = scale_maximum([error])
    borders = [rank / devices for rank in range(1, devices)]
    image = Image.fromarray(eight_bits(coloured(large, bright, borders)))
    report.images(
        [
            [
                GridImage(
                    image, f"stale steps, largest {number_text(float(error.max()), 2)}", f"{of}: error by place", bright
                )
            ]
        ],
        f"{of}: where in the image the predictions of stale steps are wrong, over the whole prediction's root mean "
        "square. Dashes: where the ranks' shares meet, if they are even.",
    )
