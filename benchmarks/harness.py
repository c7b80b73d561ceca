"""What every benchmark shares: its command line, figures as JSON, and ratios of contenders that took turns."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def command_line(description: str | None, figures: bool = True) -> argparse.ArgumentParser:
    """A parser with a benchmark's docstring as its help; with ``figures`` it has ``--json FILE``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if figures:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    return parser


def write_figures(figures: Mapping[str, Any], file: Path | None) -> None:
    """Write figures as JSON; None: nowhere."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def write_compactly(figures: Mapping[str, Any], file: Path | None) -> None:
    """The same, with a line for every row of a table, and lines of their own for what is short."""
    if file is not None:
        file.write_text(compact(figures, 4) + "\n", encoding="utf-8")


def compact(value: Any, levels: int) -> str:
    """JSON that is broken into lines in its outer levels only, and there only where it would be long."""
    whole = json.dumps(value)
    if levels == 0 or len(whole) <= 120 or not isinstance(value, list | dict):
        return whole
    pairs = isinstance(value, dict)
    entries = [(f"{json.dumps(name)}: ", each) for name, each in value.items()] if pairs else [("", v) for v in value]
    lines = ",\n".join(name + compact(each, levels - 1) for name, each in entries)
    opened, closed = "{}" if pairs else "[]"
    return f"{opened}\n{lines}\n{closed}"


def paired_ratios(baseline: Sequence[float], times: Sequence[float]) -> list[float]:
    """Speed-up over the baseline, turn by turn: neighbours in time are compared, because machines drift."""
    return [b / t for b, t in zip(baseline, times, strict=True)]


def ratio_cells(ratios: Sequence[float]) -> list[str]:
    """Median, smallest and largest ratio as cells of a table."""
    return [f"{statistics.median(ratios):.3f}x", f"{min(ratios):.3f}", f"{max(ratios):.3f}"]


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], machine: Mapping[str, Any], width: int = 110
) -> None:
    """Print rows as a table whose first column is text and whose others are numbers, and the machine below it."""
    table, console = Table(title=title), Console(width=width)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(machine["text"])
