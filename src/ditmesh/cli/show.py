"""Output of commands: one JSON object or text on stdout, a progress bar on stderr."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._version import source
from ..core.files import without_folder
from ..report import report
from ..report.formatting import count
from ..report.text import print_report

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..report.report import Report


def emit(result: dict[str, Any], as_json: bool, say: Callable[[dict[str, Any]], Report | None]) -> None:
    """Print a command's result: as JSON, or as the report that ``say`` makes of it, or prints itself."""
    if as_json:
        print(report.as_json(result))
    elif (said := say(result)) is not None:
        print_report(said)


def bar(*more: Any, shown: bool = True) -> Progress:
    """A progress bar on stderr, with ``more`` columns; only on one of several ranks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *more, TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not shown)


def provenance(arguments: Sequence[str]) -> dict[str, Any]:
    """The origin of a page's figures: command line (without folders), code, machine and libraries."""
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
