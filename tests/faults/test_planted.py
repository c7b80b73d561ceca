"""The planted faults of this folder can still be planted, and their table is that of the last run of each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from faults.planting import PAGE, RECORD, ROOT, Fault, Outcome, as_markdown, is_seen, read_faults

FAULTS = read_faults()
MEND = "make test-faults ONLY="


def test_every_fault_stands_where_it_can_be_planted():
    """Its text stands in the product once, and the tests that must see it exist."""
    sources = {path: path.read_text("utf-8") for path in sorted((ROOT / "src" / "ditmesh").rglob("*.py"))}
    tests = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    wrong = []
    for fault in FAULTS:
        count = sum(text.count(fault.old) for text in sources.values())
        if count != 1:
            wrong.append(f"{fault.id} ({fault.room}.toml): its old text stands {count} times in src/ditmesh, not once")
        for name in fault.tests:
            file, _, function = name.partition("::")
            if not re.search(rf"def {re.escape(function.partition('[')[0])}\(", tests.get(file, "")):
                wrong.append(f"{fault.id} ({fault.room}.toml): there is no test {name}")
    assert wrong == []


def test_faults_are_told_apart_and_spread():
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 80
    assert len({(fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
    assert all(fault.old != fault.new and fault.tests and fault.wrong for fault in FAULTS)


def test_the_page_is_of_the_faults_as_they_are():
    record = json.loads(RECORD.read_text("utf-8"))
    stale = [fault.id for fault in FAULTS if not is_seen(fault, record)]
    assert stale == [], f"not seen, or changed since: {MEND}{','.join(stale)}"
    assert PAGE.read_text("utf-8") == as_markdown(FAULTS, record), f"write the page: {MEND}{FAULTS[0].id}"


def test_a_fault_that_cannot_be_placed_is_named(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    fault = Fault("some", "room", "wrong", "= 1", "= 2", ("test_planted.py::test_nothing",))
    with pytest.raises(ValueError, match=r"fault some: its old text stands 2 times .*a\.py, a\.py"):
        fault.file(tmp_path)
    with pytest.raises(ValueError, match=r"no test test_planted\.py::test_nothing"):
        fault.nodes(ROOT / "tests")


@pytest.mark.parametrize(
    ("outcome", "missed"),
    [
        (Outcome(failed={"t.py::a[1]": "AssertionError"}, passed=["t.py::a[2]"]), ""),
        (Outcome(passed=["t.py::a"]), "t.py::a passes"),
        (Outcome(failed={"t.py::ab": "AssertionError"}, passed=["t.py::a"]), "t.py::a passes"),
        (Outcome(failed={"t.py::a": "E  ImportError: no module"}), "t.py::a fails by ImportError"),
        (Outcome(failed={"t.py::a": "Failed: Timeout >60.0s"}), "t.py::a fails by Timeout"),
        (Outcome(broken="time-out of 400 s"), "time-out of 400 s"),
    ],
)
def test_a_fault_is_seen_by_a_failure_and_not_by_a_timeout_or_an_import(outcome: Outcome, missed: str):
    assert outcome.missed(["t.py::a"]) == missed
