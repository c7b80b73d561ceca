"""Every item of the page on GPUs names tests that are there, or says why there is none; both languages alike."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"gpus.md": ("## Every item and its test", "no test: "), "gpus.zh.md": ("## 每一项及其测试", "无测试：")}


def rows(page: str) -> list[tuple[str, str]]:
    """The items of a page, and what it says of each."""
    heading, _ = PAGES[page]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text.partition(heading)[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [(cells[1].strip(), cells[2].strip()) for cells in (line.split("|") for line in lines)]


def named(said: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", said)


def problem(item: str, said: str, without: str) -> str | None:
    """What is wrong with a row; None: nothing."""
    tests = named(said)
    if not tests:
        return None if said.startswith(without) and len(said) > len(without) + 5 else f"{item}: no test, and no reason"
    for test in tests:
        file, _, name = test.partition("::")
        path = ROOT / file
        made = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
        if not any(isinstance(one, ast.FunctionDef) and one.name == name for one in made):
            return f"{item}: {test} is not there"
    return None


@pytest.mark.parametrize("page", PAGES)
def test_every_item_has_a_test_or_a_reason(page):
    found = rows(page)
    assert len(found) > 30
    assert [wrong for item, said in found if (wrong := problem(item, said, PAGES[page][1]))] == []


def test_both_languages_name_the_same_tests():
    one, other = ([named(said) for _, said in rows(page)] for page in PAGES)
    assert one == other


def test_a_test_that_is_not_there_is_found():
    assert problem("x", "`tests/gpu_rules/test_items.py::test_made_up`", "no test: ") is not None
    assert problem("x", "`tests/gpu_rules/made_up.py::test_x`", "no test: ") is not None
    assert problem("x", "later", "no test: ") is not None
    assert problem("x", "`tests/gpu_rules/test_items.py::test_both_languages_name_the_same_tests`", "no test: ") is None
