"""A report for a terminal: sentences on separate lines, and tables that fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .report import Paragraph, Points, Report, ReportTable, Section, StyledText

if TYPE_CHECKING:
    from rich.console import Console

STYLE_COLOURS = {"good": "green", "bad": "red", "unsure": "yellow", "strong": "bold"}


def print_report(report: Report) -> None:
    """Print it on stdout. Sentences and paths stay on one line, so that they can be copied whole."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for place, block in enumerate(report.blocks):
        if isinstance(block, Section):
            console.print(Text("\n" * (place > 0) + block.title, "bold"), soft_wrap=True)
        elif isinstance(block, Paragraph):
            parts = ((part, STYLE_COLOURS.get(part.kind, "")) for part in block.parts)
            console.print(Text.assemble(*parts, style="dim" if block.note else ""), soft_wrap=True)
        elif isinstance(block, Points):
            for text in block.texts:
                console.print(Text(text), soft_wrap=True)
        elif isinstance(block, ReportTable) and block.look == "facts":
            _print_facts(console, block)
        elif isinstance(block, ReportTable):
            rows = [[_markup(cell) for cell in row] for row in block.rows]
            print_table(console, block.header, rows, block.keys, block.caption or None)


def _print_facts(console: Console, table: ReportTable) -> None:
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(padding=(0, 2))
    for name, value in table.rows:
        grid.add_row(Text(name, "bold"), Text(value))
    console.print(grid)


def _markup(cell: StyledText) -> str:
    from rich.markup import escape

    colour = STYLE_COLOURS.get(cell.kind)
    return f"[{colour}]{escape(cell)}[/]" if colour else escape(cell)


def print_table(
    console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], keys: int = 1, title: str | None = None
) -> None:
    """Print a table with whole words, however narrow the terminal is.

    The first ``keys`` columns say what a row is: text on the left, which wraps between words. The others are numbers
    and words on the right, one line each. Columns that have no room come in another table below it, with the first
    ones again; names that have none get numbers, and follow below.

    Args:
        console: where it is printed.
        header: names of the columns.
        rows: cells, with rich's markup; a first cell is escaped already.
        keys: see above.
        title: above the table.
    """
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    def wide(cell: str) -> int:
        return Text.from_markup(cell).cell_len

    def longest_word(cell: str) -> int:
        return max((len(word) for word in Text.from_markup(cell).plain.split()), default=0)

    names, cells = list(header), [list(row) for row in rows]
    widths = [max(len(name), *(wide(row[at]) for row in cells), 1) for at, name in enumerate(header)]
    least = [max(len(name), *(longest_word(row[at]) for row in cells), 1) for at, name in enumerate(header)]
    legend: list[str] = []
    widest = max(widths[keys:], default=0)
    # Between columns there are two spaces, behind the last one there is one.
    if sum(least[:keys]) + 2 * keys + widest + 1 > console.width:
        legend = [f"{number}: {row[0]}" for number, row in enumerate(cells, 1)]
        cells = [[str(number), *row[1:]] for number, row in enumerate(cells, 1)]
        least[0] = widths[0] = len(header[0])
    left = list(range(keys, len(header)))
    while left or title is not None:
        room, now = console.width - sum(least[:keys]) - 2 * keys + 1, []
        while left and (not now or widths[left[0]] + 2 <= room):
            now.append(left.pop(0))
            room -= widths[now[-1]] + 2
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False, title=title, title_justify="left")
        sizes = _narrowed(widths[:keys], least, console.width - sum(widths[at] + 2 for at in now) - 2 * keys + 1)
        for at in range(keys):
            table.add_column(escape(names[at]), width=sizes[at], overflow="fold")
        for at in now:
            table.add_column(escape(names[at]), justify="right", no_wrap=True, min_width=widths[at])
        for row in cells:
            table.add_row(*row[:keys], *(row[at] for at in now))
        console.print(table)
        title = None
    for line in legend:
        console.print(line, soft_wrap=True)


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths of columns that have ``room`` together: the one with most to give goes first, and words break last."""
    sizes = list(widths)
    while sum(sizes) > room and max(sizes) > 1:
        # rich narrows columns too, but cuts off the last letter of the last one where it has no padding.
        at = max(range(len(sizes)), key=lambda one: (max(0, sizes[one] - least[one]), sizes[one]))
        sizes[at] -= 1
    return sizes
