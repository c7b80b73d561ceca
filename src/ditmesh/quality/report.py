"""A page of text, tables, charts and pictures: one HTML file that asks nothing of the network.

::

    page = Page("What was measured", "on one machine, in one run")
    page.section("Growth")
    page.text("The difference grows with every step.")
    page.chart(line_chart(...), "Relative difference of the latents")
    page.write("report.html")

Light or dark as the reader's system is. Every picture has a text of its own, every chart its numbers as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..core.files import written_whole
from ..errors import InputError
from .figures import Chart, picture_source

STYLE = (
    """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#57606a;--rule:#d8dee4;--good:#116329;--bad:#a40e26;
--heat:#0550ae;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#9c4f7c;--c4:#8a6d00;--c5:#3d3d3d}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e6e9ed;--soft:#9aa4af;--rule:#373e47;--good:#57ab5a;
--bad:#f47067;--heat:#6cb6ff;--c0:#56b4e9;--c1:#f08a4b;--c2:#35c69b;--c3:#dd97c0;--c4:#e8c34a;--c5:#c4c9cf}}
body{font:16px/1.55 system-ui,sans-serif;background:var(--paper);color:var(--ink);max-width:60rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.7rem;margin:0}h2{font-size:1.25rem;margin:2.2rem 0 .6rem}.lead,figcaption,.note{color:var(--soft)}
table{border-collapse:collapse;font-size:.85rem;margin:.6rem 0}.scroll{overflow-x:auto}
th,td{padding:.3rem .5rem;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
th:first-child,td:first-child,.words,.name{text-align:left}td.words{white-space:normal;min-width:12rem}
caption{caption-side:top;text-align:left;color:var(--soft);padding:.3rem 0}
caption span{display:inline-block;position:sticky;left:0;max-width:min(58rem,100vw - 2rem);white-space:normal}
li{margin:.35rem 0}ul{padding-left:1.2rem}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
figure{margin:1rem 0}.plot{overflow-x:auto}
.plot svg{display:block;width:100%;height:auto;max-width:52rem;min-width:34rem}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;margin:.2rem 0;font-size:.9rem;align-items:center}
.ramp{width:9rem;height:.8rem;background:linear-gradient(90deg,transparent,var(--heat));border:1px solid var(--rule)}
.label{font-size:11px;fill:var(--soft)}.axis{stroke:var(--soft);fill:none}.rule{stroke:var(--rule);fill:none}
.line{fill:none;stroke-width:1.8}.mark{stroke:none}.bar-line{fill:none;stroke-width:1.2}.cell{fill:var(--heat)}
.ink{stroke:var(--ink)}
"""
    + "".join(
        f".line.s{n},.bar-line.s{n}{{stroke:var(--c{n})}}.mark.s{n},.bar.s{n}{{fill:var(--c{n})}}" for n in range(6)
    )
    + """
.grid{display:grid;gap:.8rem;overflow-x:auto}.grid figure{margin:0;min-width:6rem}
.grid img{width:100%;height:auto;image-rendering:pixelated;border:1px solid var(--rule)}
details{margin:.3rem 0 1rem}summary{cursor:pointer;color:var(--soft)}
"""
)


@dataclass(frozen=True)
class Cell:
    """A table's cell with a meaning.

    ``"good"`` or ``"bad"`` also in colour, ``"words"`` set as running text, ``"name"`` to the left.
    """

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Shown:
    """A picture of a grid.

    Attributes:
        image: as `quality.pictures.as_picture` takes it.
        caption: what stands under it; also what a screen reader says, unless ``alt`` does.
        alt: what the picture shows, in words.
    """

    image: Any
    caption: str
    alt: str = ""


class Page:
    """A page that grows from top to bottom.

    Args:
        title: of the page.
        lead: a line under it; may be empty.
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self.title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]
        if lead:
            self._parts.append(f'<p class="lead">{escape(lead)}</p>')

    def section(self, title: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(title)}</h2>")

    def text(self, text: str, note: bool = False) -> None:
        """A paragraph; a note is set lighter."""
        self._parts.append(f'<p class="note">{escape(text)}</p>' if note else f"<p>{escape(text)}</p>")

    def points(self, texts: Sequence[str], folded: str = "") -> None:
        """A list of sentences; with a word to unfold it by, if there is one."""
        items = f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"
        self._parts.append(f"<details><summary>{escape(folded)}</summary>{items}</details>" if folded else items)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str | Cell]], caption: str) -> None:
        """A table; the first cell of a row names it."""
        self._parts.append(_table(header, rows, caption))

    def chart(self, chart: Chart, caption: str) -> None:
        """A chart with its legend, and its numbers to unfold."""
        self._parts.append(
            f'<figure><div class="plot" tabindex="0">{chart.svg}</div>{chart.legend}'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            f"<details><summary>Numbers</summary>{_table(chart.header, chart.rows, caption)}</details>"
        )

    def pictures(self, rows: Sequence[Sequence[Shown]], caption: str) -> None:
        """Pictures in rows and columns."""
        columns = max((len(row) for row in rows), default=1)
        cells = []
        for row in rows:
            for shown in row:
                alt = escape(shown.alt or shown.caption, quote=True)
                cells.append(
                    f'<figure><img src="{picture_source(shown.image)}" alt="{alt}">'
                    f"<figcaption>{escape(shown.caption)}</figcaption></figure>"
                )
            cells += ["<span></span>"] * (columns - len(row))
        self._parts.append(
            f'<figure><div class="grid" style="grid-template-columns:repeat({columns},minmax(6rem,14rem))">'
            f"{''.join(cells)}</div><figcaption>{escape(caption)}</figcaption></figure>"
        )

    def html(self) -> str:
        """The whole page."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
            + "\n".join(self._parts)
            + "\n</main></body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Write the page; the file appears whole or not at all.

        Raises:
            InputError: the file cannot be written.
        """
        path = Path(path)
        try:
            with written_whole(path) as temporary:
                temporary.write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {str(path)!r} ({error.strerror or error}); choose another file") from None
        return path


def _table(header: Sequence[str], rows: Sequence[Sequence[str | Cell]], caption: str) -> str:
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    left = {column: cell.kind for row in cells for column, cell in enumerate(row) if cell.kind in ("words", "name")}
    head = "".join(
        f'<th scope="col"{f" class={left[column]}" if column in left else ""}>{escape(name)}</th>'
        for column, name in enumerate(header)
    )
    body = []
    for row in cells:
        body.append("<tr>")
        for column, cell in enumerate(row):
            start, end = ('th scope="row"', "th") if column == 0 else ("td", "td")
            kind = f' class="{cell.kind}"' if cell.kind else ""
            body.append(f"<{start}{kind}>{escape(cell.text)}</{end}>")
        body.append("</tr>")
    return (
        f'<div class="scroll" tabindex="0"><table><caption><span>{escape(caption)}</span></caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
