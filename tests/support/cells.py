"""The cells of the matrix as they are recorded: what was found, and at which commit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Commits after which a cell counts as old.
OLD = 40
# What a run writes itself.
WRITTEN = ("src/ditmesh/strategies/support.json",)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def commit() -> str:
    """The commit that cells are run at."""
    return git("rev-parse", "--short=8", "HEAD")


def uncommitted() -> list[str]:
    """Files of the product that are not as they were committed."""
    lines = git("status", "--porcelain", "src").splitlines()
    return [name for name in (line.split(maxsplit=1)[1] for line in lines) if name not in WRITTEN]


def badness(outcome: dict[str, Any]) -> tuple[bool, bool, float]:
    return "wrong" in outcome, "refused" in outcome, outcome.get("wrong", outcome.get("error", 0.0))


def write(found: list[tuple[str, str, dict[str, Any]]]) -> None:
    """Write cells (class, combination, outcome) to the table and its page; those that did not run stay as they are."""
    import diffusers
    import torch

    from ditmesh.strategies import support
    from support.support_page import as_markdown

    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for name, combination, outcome in found:
        # A class that is tested in several ways (text to video, image to video) shows the worst of them.
        row = cells.setdefault(name, {})
        row[combination] = max(row.get(combination, outcome), outcome, key=badness)
    here = commit()
    merged = {name: dict(row) for name, row in support.support_table().items()}
    for name, row in cells.items():
        merged.setdefault(name, {}).update({key: {**outcome, "commit": here} for key, outcome in row.items()})
    data = {
        "diffusers": diffusers.__version__,
        "torch": torch.__version__.split("+")[0],
        "classes": {name: merged[name] for name in sorted(merged)},
    }
    support.TABLE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    page = ROOT / "docs" / "support.md"
    page.write_text(as_markdown(), encoding="utf-8")


def age(commit: str) -> int | None:
    """Commits since one; None: it is no ancestor of this one."""
    known = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True)
    return int(git("rev-list", "--count", f"{commit}..HEAD")) if known.returncode == 0 else None


def old() -> str:
    """A sentence on cells that were run more than `OLD` commits ago, or at no commit that is known."""
    from ditmesh.strategies import support

    every = [cell.get("commit") for row in support.support_table().values() for cell in row.values()]
    ages = {known: age(known) if known else None for known in set(every)}
    count = sum(ages[known] is None or ages[known] > OLD for known in every)
    return f"cells of docs/support.md that were run more than {OLD} commits ago: {count} of {len(every)}"
