"""Pages of docs of what suites found on two ranks: a table of outcomes, and the sentences that refuse below it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ditmesh.layout.forms import WAY_OUT

# What is called (of a class its form, too), and by configuration what `support.parity.outcome` says.
Rows = dict[tuple[str, ...], dict[str, dict[str, Any]]]
DOCS = Path(__file__).parents[2] / "docs"


def lines_of(head: Iterable[str], configs: Iterable[str], rows: Rows, summary: str) -> list[str]:
    """The table, the summary, and the sentences with what each refuses."""
    columns = [*head, *configs]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    reasons: dict[str, dict[str, list[str]]] = {}
    for name, row in sorted(rows.items()):
        cells = []
        for config in configs:
            found = row.get(config)
            if found is not None and "refused" in found:
                why = found["refused"].removesuffix(f"; {WAY_OUT}")
                reasons.setdefault(why, {}).setdefault(" ".join(name), []).append(config)
            error = "" if found is None else f"{found.get('error', 0):.0e}"
            cells.append("refused" if found and "refused" in found else "0" if error == "0e+00" else error)
        lines.append(f"| {' | '.join([*name, *cells])} |")
    lines += ["", summary, "", "## Error messages", ""]
    for why, calls in sorted(reasons.items(), key=lambda reason: min(reason[1])):
        where = [f"{call} ({', '.join(refusing)})" for call, refusing in calls.items()]
        lines.append(f"* {'; '.join(where)}: {why}")
    return lines


def rows_of(text: str, head: int, configs: Iterable[str]) -> Rows:
    """What a page says, of whose table the first ``head`` columns are names."""
    table, _, sentences = text.partition("## Error messages\n")
    reasons: dict[tuple[str, str], str] = {}
    for where, why in re.findall(r"^\* (.+?\)): (.+)$", sentences, re.MULTILINE):
        for call, refusing in re.findall(r"(?:^|; )(.+?) \(([^()]*)\)", where):
            reasons |= {(call, config): why for config in refusing.split(", ")}
    rows: Rows = {}
    for line in re.findall(r"^\| (?!-)(.+) \|$", table, re.MULTILINE)[1:]:
        cells = line.split(" | ")
        row = rows[tuple(cells[:head])] = {}
        for config, cell in zip(configs, map(str.strip, cells[head:]), strict=True):
            if cell:
                refused = cell == "refused"
                row[config] = (
                    {"refused": reasons[" ".join(cells[:head]), config]} if refused else {"error": float(cell)}
                )
    return rows


@contextmanager
def page(
    name: str,
    wanted: bool,
    introduction: str,
    head: Iterable[str],
    configs: Iterable[str],
    summary: Callable[[Rows], str],
) -> Iterator[Rows]:
    """Rows to fill, of which the page is written in the end if it is ``wanted``; ``summary`` is a sentence.

    Rows and cells that did not run stay as they are.
    """
    head, rows = list(head), Rows()
    yield rows
    if wanted and rows:
        merged = rows_of((DOCS / name).read_text(encoding="utf-8"), len(head), configs)
        for key, row in rows.items():
            merged[key] = {**merged.get(key, {}), **row}
        lines = lines_of(head, configs, merged, summary(merged))
        (DOCS / name).write_text(introduction + "\n".join(lines) + "\n", encoding="utf-8")
