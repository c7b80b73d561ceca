"""Output of commands: one JSON object or text on stdout, a progress bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import InputError, reason_of
from ..report import report
from ..report.text import print_report

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..report.report import Report


def emit(result: dict[str, Any], as_json: bool, say: Callable[[dict[str, Any]], Report | None]) -> None:
    """Print a command's result: as JSON, or as the report that ``say`` makes of it, or prints itself.

    `InputError`: standard output is a file on a full disk.
    """
    summary = None if as_json else say(result)
    try:
        if as_json:
            print(report.as_json(result))
        elif summary is not None:
            print_report(summary)
        # Here, as the process leaves without a word about what it could not write.
        sys.stdout.flush()
    except BrokenPipeError:
        # Its reader has what it wanted.
        raise
    except OSError as error:
        raise InputError(
            f"the result cannot be written to standard output ({reason_of(error)}); free some space, or send it to "
            "another place"
        ) from error


def bar(*more: Any, shown: bool = True) -> Progress:
    """A progress bar on stderr, with ``more`` columns; only on one of several ranks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *more, TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not shown)
