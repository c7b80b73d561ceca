"""Shares of all tests, balanced by the seconds that their files took when it was last recorded (``--record``)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

# By file the mean seconds of a test of `make test`, and of one of the matrix.
RECORD = Path(__file__).parents[1] / "data" / "seconds.json"
# Seconds of a test that was never recorded.
USUAL = 2.0


def kind_of(keywords: object) -> str:
    return "matrix" if "matrix" in keywords else "quick"  # type: ignore[operator]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def share_of(items: Sequence[pytest.Item], share: int, shares: int) -> list[pytest.Item]:
    """The tests of one share, from 1 on, in their order: whole files, and the tests of long files one by one."""
    means = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    files: dict[str, dict[str, float]] = defaultdict(dict)
    for item in items:
        file = file_of(item.nodeid)
        files[file][item.nodeid] = means.get(file, {}).get(kind_of(item.keywords), USUAL)
    # A file that would be a quarter of a share, with its cells in it, is spread over all of them.
    longest = sum(sum(tests.values()) for tests in files.values()) / shares / 4
    units: list[dict[str, float]] = []
    for tests in files.values():
        long = sum(tests.values()) > longest
        units += [{test: seconds} for test, seconds in tests.items()] if long else [tests]
    units.sort(key=lambda unit: (-sum(unit.values()), *unit))
    totals, own = [0.0] * shares, set[str]()
    for unit in units:
        least = totals.index(min(totals))
        totals[least] += sum(unit.values())
        if least == share - 1:
            own.update(unit)
    return [item for item in items if item.nodeid in own]


def record(seconds: dict[tuple[str, str], list[float]]) -> None:
    """Write what tests took, by file and kind, beside what is known of others."""
    means = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    for (file, kind), found in seconds.items():
        means.setdefault(file, {})[kind] = round(sum(found) / len(found), 2)
    root = RECORD.parents[2]
    kept = {file: dict(sorted(means[file].items())) for file in sorted(means) if (root / file).exists()}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
