"""A table of predicted memory for every group of ranks that need the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .report import Report, StyledText


def memory_report(lead: str, ranks: Iterable[Mapping[str, Any]], kinds: Sequence[str]) -> Report:
    """The phases of every rank in GB, the one with the peak in bold.

    Args:
        lead: a sentence above the tables.
        ranks: as data: ``stage``, ``ranks`` (how many), ``phases`` (bytes by phase and kind), ``peak`` (a phase).
        kinds: what is told apart in a phase, such as ``weights``; ``total`` comes first.
    """
    report = Report()
    report.text(f"{lead}: GB of every rank; all figures are predicted")
    given = list(ranks)
    several = len({rank["stage"] for rank in given}) > 1
    for rank in given:
        rows = []
        for name, phase in rank["phases"].items():
            cells = (name, *(_gigabytes(phase[kind]) for kind in ("total", *kinds)))
            rows.append([StyledText(cell, "strong" if name == rank["peak"] else "") for cell in cells])
        stage = f"stage {rank['stage']}, " if several else ""
        report.table(("phase", "total", *kinds), rows, f"{stage}{rank['ranks']} rank{'s' * (rank['ranks'] > 1)}")
    return report


def _gigabytes(size: float) -> str:
    """Three digits of 10^9 bytes; of less than a megabyte only that it is so little."""
    return "0" if size == 0 else f"{size / 1e9:.3g}" if size >= 1e6 else "<0.001"
