"""A report for a terminal: sentences on separate lines, and tables that fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .report import Paragraph, Points, Report, ReportTable, StyledText

if TYPE_CHECKING:
    from rich.console import Console

STYLE_COLOURS = {"good": "green", "bad": "red", "unsure": "yellow", "strong": "bold"}


def print_report(report: Report) -> None:
    """Print it on stdout. Sentences and paths stay on one line, so that they can be copied whole."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    def marked(cell: StyledText) -> str:
        colour = STYLE_COLOURS.get(cell.kind)
        return f"[{colour}]{escape(cell)}[/]" if colour else escape(cell)

    console = Console(highlight=False)
    for block in report.blocks:
        if isinstance(block, Paragraph):
            parts = ((part, STYLE_COLOURS.get(part.kind, "")) for part in block.parts)
            console.print(Text.assemble(*parts, style="dim" if block.note else ""), soft_wrap=True)
        elif isinstance(block, Points):
            for text in block.texts:
                console.print(Text(text), soft_wrap=True)
        elif isinstance(block, ReportTable) and block.look == "facts":
            grid = Table.grid(padding=(0, 2))
            for name, value in block.rows:
                grid.add_row(Text(name, "bold"), Text(value))
            console.print(grid)
        elif isinstance(block, ReportTable):
            rows = [[marked(cell) for cell in row] for row in block.rows]
            print_table(console, block.header, rows, block.keys, block.caption or None)


def print_table(
    console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], keys: int = 1, title: str | None = None
) -> None:
    """Print a table of whole words; where the terminal is too narrow for it, each row with a line for every cell.

    Args:
        rows: cells, with rich's markup.
        keys: columns that say what a row is: text on the left, which wraps between words. The others are numbers and
            words on the right, one line each.
    """
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    columns = [[name, *(Text.from_markup(row[place]).plain for row in rows)] for place, name in enumerate(header)]
    least = [
        max((len(part) for cell in column for part in (cell.split() if place < keys else [cell])), default=1)
        for place, column in enumerate(columns)
    ]
    # Two spaces lie between columns.
    if sum(least) + 2 * len(header) > console.width:
        for line in [title] if title else []:
            console.print(line, soft_wrap=True)
        for row in rows:
            console.print(Text.from_markup(row[0], style="bold"), soft_wrap=True)
            for name, cell in zip(header[1:], row[1:], strict=True):
                console.print(Text.assemble(f"  {name}  ", Text.from_markup(cell)), soft_wrap=True)
        return
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False, title=title, title_justify="left")
    for place, name in enumerate(header):
        table.add_column(
            escape(name), justify="left" if place < keys else "right", no_wrap=place >= keys, min_width=least[place]
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)
