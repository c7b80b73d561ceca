"""A report as one HTML file that asks nothing of the network; its parts are `page.html` and `style.css` beside this.

Light or dark as the reader's system is, from the width of a phone up: charts scale, wide tables become cards where
there is no room for them, and what is wider still scrolls in a box of its own. Every image has a text of its own,
every chart its numbers as a table.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...report.formatting import number_text
from ...report.report import Report, ReportTable, filled_table
from .charts import RAMP, Chart, image_source

# Sections of a page that is worth a list of them.
LISTED = 4

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
STYLE = _TEMPLATES.get_template("style.css").render(ramp=RAMP)


def as_html(report: Report) -> str:
    """The whole page."""
    return _TEMPLATES.get_template("page.html").render(
        report=report,
        sections=report.sections,
        listed=LISTED,
        style=STYLE,
        source=image_source,
        number=number_text,
        numbers=_numbers,
    )


def _numbers(chart: Chart, caption: str) -> ReportTable:
    return filled_table(chart.header, chart.rows, caption)
