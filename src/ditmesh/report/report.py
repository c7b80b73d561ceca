"""A page of text, tables, charts and pictures: one HTML file that asks nothing of the network.

::

    page = Page("What was measured", "on one machine, in one run")
    page.section("Growth")
    page.text("The difference grows with every step.")
    page.chart(line_chart(...), "Relative difference of the latents")
    page.downloads([Download("figures.csv", as_csv(rows))])
    page.write("report.html")

Light or dark as the reader's system is, from the width of a phone up: charts scale, wide tables become cards where
there is no room for them, and what is wider still scrolls in a box of its own. Every picture has a text of its own,
every chart its numbers as a table.
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, isfinite, log10
from pathlib import Path
from typing import Any

from ..core.files import written_whole
from ..errors import InputError
from .charts import RAMP, Chart, picture_source

# Columns that a table of this page's width holds; with more it becomes cards on a tablet already.
ROOM = 7
# Sections of a page that is worth a list of them.
LISTED = 4

STYLE = (
    """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#57606a;--rule:#d0d7de;--good:#116329;--bad:#a40e26;
--heat:#0550ae;--shade:#8c959f;--c0:#0072b2;--c1:#c24f00;--c2:#00795a;--c3:#9c4f7c;--c4:#8a6d00;--c5:#3d3d3d}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e6e9ed;--soft:#a3adb8;--rule:#373e47;--good:#57ab5a;
--bad:#f47067;--heat:#6cb6ff;--shade:#000;--c0:#56b4e9;--c1:#f08a4b;--c2:#35c69b;--c3:#dd97c0;--c4:#e8c34a;--c5:#c4c9cf}}
*{box-sizing:border-box}
body{font:16px/1.55 system-ui,sans-serif;background:var(--paper);color:var(--ink);max-width:82rem;margin:2rem auto;
padding:0 1rem;overflow-wrap:break-word}
h1{font-size:1.7rem;line-height:1.25;margin:0}h2{font-size:1.25rem;margin:2.4rem 0 .6rem}
p,li,figcaption{max-width:56rem}.lead,figcaption,.note{color:var(--soft)}
a{color:var(--heat)}a:focus-visible,summary:focus-visible,[tabindex]:focus-visible{outline:2px solid var(--heat)}
.scroll{overflow-x:auto;margin:.6rem 0;background:linear-gradient(90deg,var(--paper) 40%,transparent) 0 0/3rem 100%
local no-repeat,linear-gradient(270deg,var(--paper) 40%,transparent) 100% 0/3rem 100% local no-repeat,
linear-gradient(90deg,var(--shade),transparent) 0 0/.5rem 100% scroll no-repeat,
linear-gradient(270deg,var(--shade),transparent) 100% 0/.5rem 100% scroll no-repeat}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .55rem;border-bottom:1px solid var(--rule);text-align:right;vertical-align:top}
td{white-space:nowrap}thead th{vertical-align:bottom;white-space:normal}
th:first-child,td:first-child,.words,.name{text-align:left}td.words{white-space:normal;min-width:12rem}
caption{caption-side:top;text-align:left;color:var(--soft);padding:.3rem 0}
caption span{display:inline-block;position:sticky;left:0;max-width:min(56rem,100vw - 2rem)}
.facts tbody th{font-weight:400;color:var(--soft);min-width:9rem}.facts td{text-align:left;white-space:normal;
overflow-wrap:anywhere}
li{margin:.35rem 0}ul{padding-left:1.2rem}.files{display:flex;flex-wrap:wrap;gap:.3rem 1.5rem;padding:0;list-style:none}
.contents{display:flex;flex-wrap:wrap;gap:.1rem 1.2rem;padding:0;margin:.8rem 0;list-style:none}.contents li{margin:0}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
figure{margin:1rem 0;min-width:0}
.charts{display:grid;gap:1rem 2.5rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,30rem),1fr))}
.charts>div{max-width:40rem;min-width:0}.charts figure{margin:.6rem 0 .3rem}
.plot svg{display:block;width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;margin:.2rem 0;font-size:.9rem;align-items:center}
.ramp{width:9rem;height:.8rem;background:linear-gradient(90deg,transparent,var(--heat));border:1px solid var(--rule)}
.label{font-size:12px;fill:var(--soft)}.point{fill:var(--ink)}
@media (min-width:48rem){.label{font-size:10.5px}}
.axis{stroke:var(--soft);fill:none}.rule{stroke:var(--rule);fill:none}
.line{fill:none;stroke-width:1.8}.mark{stroke:none}.bar-line{fill:none;stroke-width:1.2}.cell{fill:var(--heat)}
.band{stroke:none;fill-opacity:.18}.pointed{opacity:0}.pointed:hover{opacity:1}
.ink{stroke:var(--ink)}.front{fill:none;stroke:var(--ink);stroke-dasharray:5 3}.ring{fill:none;stroke:var(--ink)}
"""
    + "".join(
        f".line.s{n},.bar-line.s{n}{{stroke:var(--c{n})}}.mark.s{n},.bar.s{n},.band.s{n}{{fill:var(--c{n})}}"
        for n in range(6)
    )
    + """
.grid{display:grid;gap:.8rem;overflow-x:auto}.grid figure{margin:0;min-width:5.2rem}
.grid figcaption{font-size:.85rem;line-height:1.35}
.grid img{display:block;width:100%;height:auto;image-rendering:pixelated;border:1px solid var(--rule)}
.scale{display:flex;align-items:center;gap:.4rem;font-size:.8rem;color:var(--soft);margin:.2rem 0}
.scale i{flex:1;height:.5rem;background:linear-gradient(90deg,"""
    + ",".join(f"rgb{colour}" for colour in RAMP)
    + """);border:1px solid var(--rule)}
details{margin:.3rem 0 1rem}summary{cursor:pointer;color:var(--soft)}
"""
)

# Tables whose rows become cards: every cell says what it is by itself.
CARDS = """@media (max-width:%s){
%s{display:block;width:100%%}
.%s thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%%)}
.%s tbody{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(min(100%%,19rem),1fr))}
.%s tr{border:1px solid var(--rule);border-radius:.4rem;padding:.3rem .6rem}
.%s th,.%s td{display:flex;justify-content:space-between;gap:1rem;border:0;padding:.15rem 0;text-align:right;
white-space:normal;overflow-wrap:anywhere}
.%s tbody th{font-size:1rem;text-align:left}
.%s td:empty{display:none}.%s td::before{content:attr(data-label);color:var(--soft);font-weight:400;text-align:left}}
"""


def _cards(name: str, width: str) -> str:
    parts = ",".join(f".{name}{part}" for part in ("", " caption", " tr"))
    return CARDS % (width, parts, *[name] * 8)


STYLE += _cards("cards", "40rem") + _cards("many", "64rem")


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
        image: as `quality.pictures.as_picture` takes it; None: its place stays empty.
        caption: what stands under it; also what a screen reader says, unless ``alt`` does.
        alt: what the picture shows, in words.
        bright: the value at the bright end of a difference's colours: a scale is drawn; None: no scale.
    """

    image: Any
    caption: str = ""
    alt: str = ""
    bright: float | None = None


@dataclass(frozen=True)
class Download:
    """A file inside the page: its name, and its text."""

    name: str
    text: str


class Page:
    """A page that grows from top to bottom.

    Args:
        title: of the page.
        lead: a line under it; may be empty.
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self.title = title
        self._head = [f"<h1>{escape(title)}</h1>"]
        if lead:
            self._head.append(f'<p class="lead">{escape(lead)}</p>')
        self._parts: list[str] = []
        self._sections: list[str] = []

    def section(self, title: str) -> None:
        """Begin a section; a page of several has them listed at its top."""
        self._sections.append(title)
        self._parts.append(f'<h2 id="section-{len(self._sections)}">{escape(title)}</h2>')

    def _contents(self) -> list[str]:
        if len(self._sections) < LISTED:
            return []
        links = (
            f'<li><a href="#section-{number}">{escape(title)}</a></li>'
            for number, title in enumerate(self._sections, 1)
        )
        return [f'<nav aria-label="Contents"><ul class="contents">{"".join(links)}</ul></nav>']

    def text(self, text: str, note: bool = False) -> None:
        """A paragraph; a note is set lighter."""
        self._parts.append(f'<p class="note">{escape(text)}</p>' if note else f"<p>{escape(text)}</p>")

    def points(self, texts: Sequence[str], folded: str = "") -> None:
        """A list of sentences; with a word to unfold it by, if there is one."""
        items = f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"
        self._parts.append(f"<details><summary>{escape(folded)}</summary>{items}</details>" if folded else items)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str | Cell]], caption: str) -> None:
        """A table; the first cell of a row names it. A column without a single entry is left out."""
        self._parts.append(_table(*without_empty_columns(header, rows), caption, cards=True))

    def facts(self, facts: Mapping[str, Any], caption: str) -> None:
        """Names and values, settings inside of settings spelled out line by line."""
        rows = [(name, Cell(value, "words")) for name, value in spelled_out(facts)]
        self._parts.append(_table(("what", "value"), rows, caption, kind="facts"))

    def downloads(self, files: Sequence[Download]) -> None:
        """Links that save files which lie in the page itself."""
        links = []
        for file in files:
            data = file.text.encode()
            kind = "application/json" if file.name.endswith(".json") else "text/csv;charset=utf-8"
            source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
            name = escape(file.name)
            links.append(f'<li><a download="{name}" href="{source}">{name}</a> ({size_text(len(data))})</li>')
        self._parts.append(f'<ul class="files">{"".join(links)}</ul>')

    def chart(self, chart: Chart, caption: str) -> None:
        """A chart with its legend, and its numbers to unfold."""
        self.charts([(chart, caption)])

    def charts(self, charts: Sequence[tuple[Chart, str]]) -> None:
        """Charts with their captions, side by side where there is room."""
        parts = [
            f'<div><figure><div class="plot">{chart.svg}</div>{chart.legend}'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            "<details><summary>Numbers</summary>"
            f"{_table(*without_empty_columns(chart.header, chart.rows), caption)}</details></div>"
            for chart, caption in charts
        ]
        if parts:
            self._parts.append(f'<div class="charts">{"".join(parts)}</div>')

    def pictures(self, rows: Sequence[Sequence[Shown]], caption: str) -> None:
        """Pictures in rows and columns."""
        columns = max((len(row) for row in rows), default=1)
        cells = []
        for row in rows:
            cells += [_picture(shown) for shown in row] + ["<span></span>"] * (columns - len(row))
        self._parts.append(
            f'<figure><div class="grid" tabindex="0" role="group" aria-label="{escape(caption)}" '
            f'style="grid-template-columns:repeat({columns},minmax(5.2rem,14rem))">'
            f"{''.join(cells)}</div><figcaption>{escape(caption)}</figcaption></figure>"
        )

    def html(self) -> str:
        """The whole page."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
            + "\n".join([*self._head, *self._contents(), *self._parts])
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


# --------------------------------------------------------------------------------------------------
# Numbers and settings for people


def number_text(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits: ``0.0312``, ``1,234``, ``3.2 × 10⁻⁷``; empty for None.

    Digits before the point are never cut off.
    """
    if value is None:
        return ""
    if not isfinite(value):
        return "infinite" if value > 0 else "-infinite" if value < 0 else "not a number"
    if value == 0:
        return "0"
    power = floor(log10(abs(value)))
    if -4 <= power < 6:
        return f"{value:,.{max(0, digits - 1 - power)}f}"
    factor, power_text = f"{value:.{digits - 1}e}".split("e")
    return f"{factor} × 10{str(int(power_text)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def size_text(size: float) -> str:
    """Bytes such as ``17.1 MB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


def spelled_out(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Pairs of name and text; of a mapping inside one pair for each entry, ``name: entry``. None is left out."""
    for name, value in facts.items():
        full = f"{above}: {name}" if above else str(name)
        if isinstance(value, Mapping):
            yield from spelled_out(value, full)
        elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value, 1):
                yield from spelled_out({str(number): item}, full)
        elif value is not None:
            yield full, plain(value)


def plain(value: Any) -> str:
    """A setting for people: yes and no, numbers, what a list holds; none for None."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, with a column for every name that a row has; None is empty."""
    names: list[str] = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# --------------------------------------------------------------------------------------------------
# Pieces


def without_empty_columns(
    header: Sequence[str], rows: Sequence[Sequence[str | Cell]]
) -> tuple[list[str], list[list[str | Cell]]]:
    """A table without the columns in which no row has anything; the first column stays."""
    kept = [n for n in range(len(header)) if n == 0 or any(_cell(row[n]).text for row in rows)]
    return [header[n] for n in kept], [[row[n] for n in kept] for row in rows]


def _cell(cell: str | Cell) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell)


def _picture(shown: Shown) -> str:
    if shown.image is None:
        return "<span></span>"
    alt = escape(shown.alt or shown.caption, quote=True)
    scale = ""
    if shown.bright is not None:
        scale = f'<div class="scale"><span>0</span><i></i><span>{number_text(shown.bright)}</span></div>'
    return (
        f'<figure><img src="{picture_source(shown.image)}" alt="{alt}">{scale}'
        f"<figcaption>{escape(shown.caption)}</figcaption></figure>"
    )


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str | Cell]], caption: str, cards: bool = False, kind: str = ""
) -> str:
    cells = [[_cell(cell) for cell in row] for row in rows]
    left = {column: cell.kind for row in cells for column, cell in enumerate(row) if cell.kind in ("words", "name")}
    if cards:
        kind = "many" if len(header) > ROOM else "cards"
    # Roles: a row that is laid out as a card is no row to every browser.
    head = "".join(
        f'<th scope="col" role="columnheader"{f" class={left[column]}" if column in left else ""}>{escape(name)}</th>'
        for column, name in enumerate(header)
    )
    body = []
    for row in cells:
        body.append('<tr role="row">')
        for column, cell in enumerate(row):
            start, end = ('th scope="row" role="rowheader"', "th") if column == 0 else ('td role="cell"', "td")
            classed = f' class="{cell.kind}"' if cell.kind else ""
            label = f' data-label="{escape(header[column])}"' if cards and column else ""
            body.append(f"<{start}{classed}{label}>{escape(cell.text)}</{end}>")
        body.append("</tr>")
    named = f' class="{kind}"' if kind else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table role="table"{named}>'
        f'<caption><span>{escape(caption)}</span></caption><thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        f'<tbody role="rowgroup">{"".join(body)}</tbody></table></div>'
    )
