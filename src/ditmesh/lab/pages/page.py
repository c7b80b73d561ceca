"""A page: a report with charts and images, as one HTML file that asks nothing of the network.

::

    page = Page("What was measured", "on one machine, in one run")
    page.section("Growth")
    page.text("The difference grows with every step.")
    page.chart(line_chart(...), "Relative difference of the latents")
    page.write("report.html")

Its parts are `page.html` and `style.css` beside this. Light or dark as the reader's system is, from the width of a
phone up: charts scale, wide tables become cards where there is no room for them, and what is wider still scrolls in a
box of its own. Every image has a text of its own, every chart its numbers as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...core.files import written_whole
from ...errors import InputError, reason_of
from ...report.report import Report, ReportTable, filled_table
from .charts import RAMP, Chart, image_source, number_text

# Sections of a page that is worth a list of them.
LISTED = 4
# Maximum columns of a table at page width; tables with more become cards on a tablet.
ROOM = 7

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
STYLE = _TEMPLATES.get_template("style.css").render(ramp=RAMP)


@dataclass(frozen=True)
class GridImage:
    """An image of a grid.

    Attributes:
        image: as `quality.pictures.as_picture` takes it; None: its place stays empty.
        caption: the text under it; also for screen readers, unless ``alt`` is given.
        alt: what the image shows, in words.
        bright: the value at the bright end of a difference's colours: a scale is drawn; None: no scale.
    """

    image: Any
    caption: str = ""
    alt: str = ""
    bright: float | None = None


@dataclass(frozen=True)
class Charts:
    """Charts with their captions, side by side where there is room; each with its numbers to unfold."""

    charts: tuple[tuple[Chart, str], ...]


@dataclass(frozen=True)
class ImageGrid:
    """Images in rows and columns."""

    rows: tuple[tuple[GridImage, ...], ...]
    caption: str

    @property
    def columns(self) -> int:
        """The number of images in the longest row."""
        return max(map(len, self.rows), default=1)


@dataclass(frozen=True)
class Section:
    """The start of a section; numbers begin at 1."""

    title: str
    number: int


class Page(Report):
    """A report with a title, a lead, sections, charts and images."""

    def __init__(self, title: str = "", lead: str = "") -> None:
        super().__init__()
        self.title, self.lead = title, lead

    @property
    def sections(self) -> list[Section]:
        """The place where its sections begin."""
        return [block for block in self.blocks if isinstance(block, Section)]

    def section(self, title: str) -> None:
        """Begin a section; a page of several has them listed at its top."""
        self.blocks.append(Section(title, len(self.sections) + 1))

    def chart(self, chart: Chart, caption: str) -> None:
        """A chart with its legend, and its numbers to unfold."""
        self.charts([(chart, caption)])

    def charts(self, charts: Sequence[tuple[Chart, str]]) -> None:
        """Charts with their captions, side by side where there is room."""
        if charts:
            self.blocks.append(Charts(tuple(charts)))

    def images(self, rows: Sequence[Sequence[GridImage]], caption: str) -> None:
        """Images in rows and columns."""
        self.blocks.append(ImageGrid(tuple(map(tuple, rows)), caption))

    def as_html(self) -> str:
        """The whole page."""

        def numbers(chart: Chart, caption: str) -> ReportTable:
            return filled_table(chart.header, chart.rows, caption)

        def left(table: ReportTable, column: int) -> str:
            """The meaning by which a column is set to the left, if it has one."""
            kinds = [row[column].kind for row in table.rows if row[column].kind in ("words", "name")]
            return kinds[-1] if kinds else ""

        def look(table: ReportTable) -> str:
            return "many" if table.look == "cards" and len(table.header) > ROOM else table.look

        return _TEMPLATES.get_template("page.html").render(
            report=self,
            sections=self.sections,
            listed=LISTED,
            style=STYLE,
            source=image_source,
            number=number_text,
            numbers=numbers,
            left=left,
            look=look,
        )

    def write(self, path: str | Path) -> Path:
        """Write the report as a page, atomically. Raises `InputError`: the file cannot be written."""
        path = Path(path)
        try:
            with written_whole(path) as temporary:
                temporary.write_text(self.as_html(), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {str(path)!r} ({reason_of(error)}); choose another file") from None
        return path
