"""The study's section of predicted costs: quality against seconds on other hardware, and time and memory over size."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...report.formatting import number_text
from ..pages.charts import line_chart, scatter_chart
from ..pages.curves import Point, Series
from ..pages.page import Page
from .analysis import StudyResults
from .predicted import SIDE_FACTORS, CostModel, PredictedCost


class Costs:
    """Predictions for every combination, and for larger images; see `CostModel`.

    Raises:
        InputError, ConfigError: as of `CostModel`.
    """

    def __init__(self, results: StudyResults, hardware: str) -> None:
        self._model = CostModel(results.plan.setup, hardware)
        self._plan = results.plan
        self._rows = [(row, found) for row in results.rows() if (found := self._model.of(row)) is not None]
        self._evaluations = max((row.evaluations for row, _ in self._rows), default=results.plan.setup.steps)

    def data(self) -> dict[str, Any]:
        """As plain data: seconds and bytes."""
        return {
            "hardware": self._model.describe(),
            "rows": [
                {"sampler": row.sampler, "strategy": row.strategy, "devices": row.devices, "warmup": row.warmup}
                | asdict(found)
                for row, found in self._rows
            ],
            "sizes": [
                {"side": side, "devices": devices, **asdict(found)} for (side, devices), found in self._sizes().items()
            ],
        }

    def show(self, report: Page) -> None:
        """Add tables and charts to the page."""
        report.section("Predicted time and memory")
        report.text(
            f"On {self._model.describe()}, one picture a request, by `ditmesh plan`'s model: nothing of this section "
            "was measured. Decoding and text encoding are not part of the seconds.",
            note=True,
        )
        points = [
            Point(
                f"N = {row.devices}, {row.warmup}",
                f"N={row.devices} {row.warmup}",
                f"{row.strategy}, {row.sampler}",
                found.seconds,
                row.psnr.value,
            )
            for row, found in self._rows
            if row.psnr.value is not None
        ]
        if points:
            chart = scatter_chart(points, "PSNR against predicted time", "predicted seconds of a request", "PSNR, dB")
            report.chart(chart, "Measured quality against predicted time; up and left is better.")
        report.table(
            ("configuration", "request, s", "stale step, ms", "memory of a rank, GB"),
            [
                (
                    f"{row.strategy}, {row.sampler}, N = {row.devices}, {row.warmup}",
                    number_text(found.seconds),
                    number_text(1e3 * found.step),
                    number_text(found.memory / 1e9),
                )
                for row, found in self._rows
            ],
            "Predicted, with the synchronous steps that were measured.",
        )
        sizes = self._sizes()
        tokens = {side: side * side for side in SIDE_FACTORS}
        for what, unit, value in (
            ("Time of a step", "seconds", lambda found: found.step),
            ("Memory of a rank", "GB", lambda found: found.memory / 1e9),
        ):
            lines = [
                Series(
                    "one device" if devices == 1 else f"N = {devices}",
                    tuple(float(tokens[side]) for side in SIDE_FACTORS if (side, devices) in sizes),
                    tuple(value(sizes[side, devices]) for side in SIDE_FACTORS if (side, devices) in sizes),
                )
                for devices in (1, *self._plan.devices)
            ]
            name = f"{what}, predicted, {self._plan.strategies[0]}"
            chart = line_chart(lines, name, "tokens, over those of the study's size", unit, log_y=True)
            report.chart(
                chart, f"{name}: of pictures with sides 1, 2, 4 and 8 times as long, whether or not the model can."
            )

    def _sizes(self) -> dict[tuple[int, int], PredictedCost]:
        strategy, warmup = self._plan.strategies[0], self._plan.warmups[0]
        found = {
            (side, devices): self._model.cost(strategy, devices, warmup, 1, self._evaluations, side)
            for side in SIDE_FACTORS
            for devices in (1, *self._plan.devices)
        }
        return {at: one for at, one in found.items() if one is not None}
