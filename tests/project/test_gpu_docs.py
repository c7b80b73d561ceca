"""docs/lab/gpus.md: its tests and parts exist, its items name them or say why there is none."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lab" / "gpus.md").read_text(encoding="utf-8")


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, without the heading."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]] for table in found]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_test_and_part_that_is_named_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    program = runpy.run_path(str(ROOT / "benchmarks" / "gpu_check" / "__main__.py"), run_name="check")
    methods, listed, topics, *_ = tables(PAGE)
    parts = [*program["FIRST"], *program["SECOND"], *program["THIRD"]]
    assert [names(row[0])[0] for row in listed] == parts
    cells = [row[2] for row in methods] + [row[1] for row in topics]
    for path in (name for cell in cells for name in names(cell)):
        assert (ROOT / path).is_file(), path
    for row in topics:
        assert set(names(row[2])) <= set(parts), row
        # What no CPU shows is shown by a part of the check, or the row says why not.
        assert row[1] or row[2], row


def problem(item: str, cell: str) -> str | None:
    """What is wrong with the row of an item; None: nothing."""
    tests = re.findall(r"`((?:tests|rules)/[\w/]+\.py)::(\w+)`", cell)
    if not tests and not re.match("no test: .{6}", cell):
        return f"{item}: no test, and no reason"
    for file, name in tests:
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body if (ROOT / file).is_file() else []
        if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in body):
            return f"{item}: {file}::{name} is not there"
    return None


def test_every_item_has_a_test_or_a_reason() -> None:
    (rows,) = tables(PAGE.partition("## Every item and its test")[2].partition("\n## ")[0])
    assert len(rows) > 30
    assert [wrong for item, cell, *_ in rows if (wrong := problem(item, cell))] == []
