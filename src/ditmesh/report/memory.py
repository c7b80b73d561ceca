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
        kinds: what is told apart in a phase, such as ``weights``; ``total`` comes last.
    """
    report = Report()
    report.text(f"{lead}: GB of every rank; all figures are predicted")
    given = list(ranks)
    several = len({one["stage"] for one in given}) > 1
    for one in given:
        rows = []
        for name, phase in one["phases"].items():
            cells = (name, *(f"{phase[kind] / 1e9:.3g}" for kind in (*kinds, "total")))
            rows.append([StyledText(cell, "strong" if name == one["peak"] else "") for cell in cells])
        stage = f"stage {one['stage']}, " if several else ""
        report.table(("phase", *kinds, "total"), rows, f"{stage}{one['ranks']} rank{'s' * (one['ranks'] > 1)}")
    return report
