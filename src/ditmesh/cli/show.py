"""What commands print: one JSON object or words on stdout, a bar on stderr."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._version import source
from ..core.files import finite, without_folder

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def emit(result: dict[str, Any], as_json: bool, say: Callable[[dict[str, Any]], None]) -> None:
    """Print a command's result."""
    if as_json:
        print(json.dumps(finite(result), indent=1, allow_nan=False))
    else:
        say(result)


def bar(*more: Any, shown: bool = True) -> Progress:
    """A bar on stderr: what is done, how far it is, ``more`` columns, the time. On one rank of several only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *more, TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not shown)


def provenance(arguments: Sequence[str]) -> dict[str, Any]:
    """Where figures are from, for a page: command line (without folders), code, machine and libraries."""
    from ..launch.hardware import describe_machine

    machine = describe_machine()
    cpu, gpus = machine["cpu"], [gpu["name"] for gpu in machine["gpus"]]
    return {
        "command line": shlex.join(map(without_folder, ("ditmesh", *arguments))),
        "ditmesh": source(),
        "processor": f"{cpu['model']}, {count(cpu['cores'], 'core')}, {cpu['memory_gb']:g} GB",
        "GPUs": ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)) or None,
        "platform": machine["platform"],
        "versions": machine["versions"],
    }


def count(number: int, what: str) -> str:
    """Such as ``1 rank``, ``2 ranks``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def print_table(
    console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], keys: int = 1, title: str | None = None
) -> None:
    """Print a table whose words are whole, however narrow the terminal is.

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
    if sum(least[:keys]) + keys + widest > console.width:
        legend = [f"{number}: {row[0]}" for number, row in enumerate(cells, 1)]
        cells = [[str(number), *row[1:]] for number, row in enumerate(cells, 1)]
        least[0] = widths[0] = len(header[0])
    left = list(range(keys, len(header)))
    while left or title is not None:
        room, now = console.width - sum(least[:keys]) - keys, []
        while left and (not now or widths[left[0]] < room):
            now.append(left.pop(0))
            room -= widths[now[-1]] + 1
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False, title=title, title_justify="left")
        for at in range(keys):
            table.add_column(escape(names[at]), min_width=least[at], overflow="fold")
        for at in now:
            table.add_column(escape(names[at]), justify="right", no_wrap=True, min_width=widths[at])
        for row in cells:
            table.add_row(*row[:keys], *(row[at] for at in now))
        console.print(table)
        title = None
    for line in legend:
        console.print(line, soft_wrap=True)
