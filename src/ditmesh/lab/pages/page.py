"""A page: a report that also holds charts, images and files, written as one HTML file.

::

    page = Page("What was measured", "on one machine, in one run")
    page.section("Growth")
    page.text("The difference grows with every step.")
    page.chart(line_chart(...), "Relative difference of the latents")
    page.downloads([Download("figures.csv", as_csv(rows))])
    page.write("report.html")
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.files import written_whole
from ...errors import InputError, reason_of
from ...report.formatting import size_text
from ...report.report import Report, ReportBlock
from .charts import Chart


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
class Download:
    """A file inside a page: its name, and its text."""

    name: str
    text: str

    @property
    def source(self) -> str:
        """The file as the address of a link."""
        kind = "application/json" if self.name.endswith(".json") else "text/csv;charset=utf-8"
        return f"data:{kind};base64,{base64.b64encode(self.text.encode()).decode()}"

    @property
    def size(self) -> str:
        """Such as ``17.1 MB``."""
        return size_text(len(self.text.encode()))


@dataclass(frozen=True)
class Downloads(ReportBlock):
    """Links that save files which lie in the page itself."""

    files: tuple[Download, ...]


@dataclass(frozen=True)
class Charts(ReportBlock):
    """Charts with their captions, side by side where there is room; each with its numbers to unfold."""

    charts: tuple[tuple[Chart, str], ...]


@dataclass(frozen=True)
class ImageGrid(ReportBlock):
    """Images in rows and columns."""

    rows: tuple[tuple[GridImage, ...], ...]
    caption: str

    @property
    def columns(self) -> int:
        """The number of images in the longest row."""
        return max(map(len, self.rows), default=1)


class Page(Report):
    """A report with charts, images and files."""

    def downloads(self, files: Sequence[Download]) -> None:
        """Links that save files which lie in the page itself."""
        self.blocks.append(Downloads(tuple(files)))

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

    def write(self, path: str | Path) -> Path:
        """Write the report as a page (see `html`), atomically.

        Raises:
            InputError: the file cannot be written.
        """
        from .html import as_html

        path = Path(path)
        try:
            with written_whole(path) as temporary:
                temporary.write_text(as_html(self), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {str(path)!r} ({reason_of(error)}); choose another file") from None
        return path


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, with a column for every name that a row has; None is empty."""
    names: list[str] = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
