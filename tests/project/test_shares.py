"""Shares of all tests: each test is in one of them, and they are balanced."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import cells, shares


def items(file: str, count: int, kind: str = "quick") -> list[Any]:
    return [SimpleNamespace(nodeid=f"{file}::test[{number}]", keywords={kind}) for number in range(count)]


def seconds_of(share: list[Any], means: dict[str, dict[str, float]]) -> float:
    return sum(means[shares.file_of(item.nodeid)][shares.kind_of(item.keywords)] for item in share)


def test_every_test_is_in_one_share_and_shares_are_balanced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files stay whole, but for those that are long, whose tests are spread one by one."""
    means = {f"tests/test_{number}.py": {"quick": 1.0 + number % 3} for number in range(40)}
    means["tests/test_matrix.py"] = {"matrix": 2.0}
    monkeypatch.setattr(shares, "RECORD", tmp_path / "tests" / "data" / "seconds.json")
    shares.RECORD.parent.mkdir(parents=True)
    shares.RECORD.write_text(json.dumps(means), encoding="utf-8")
    whole = [item for file in list(means)[:-1] for item in items(file, 2)] + items("tests/test_matrix.py", 90, "matrix")
    found = [shares.share_of(whole, share, 4) for share in (1, 2, 3, 4)]
    assert sorted(item.nodeid for share in found for item in share) == sorted(item.nodeid for item in whole)
    took = [seconds_of(share, means) for share in found]
    assert max(took) - min(took) <= 3.0
    for share in found:
        names = [shares.file_of(item.nodeid) for item in share if "quick" in item.keywords]
        assert all(names.count(name) == 2 for name in names)


def test_seconds_are_recorded_beside_those_of_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "RECORD", tmp_path / "tests" / "data" / "seconds.json")
    shares.RECORD.parent.mkdir(parents=True)
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / "tests" / name).touch()
    shares.record({("tests/test_a.py", "quick"): [1.0, 2.0], ("tests/test_gone.py", "quick"): [1.0]})
    shares.record({("tests/test_a.py", "matrix"): [4.0], ("tests/test_b.py", "quick"): [0.5]})
    known = json.loads(shares.RECORD.read_text("utf-8"))
    assert known == {"tests/test_a.py": {"matrix": 4.0, "quick": 1.5}, "tests/test_b.py": {"quick": 0.5}}


def test_a_file_of_the_product_that_is_not_committed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are recorded with their commit (`--record`); the table that a run writes itself may be changed."""
    monkeypatch.setattr(cells, "ROOT", tmp_path)
    (tmp_path / cells.WRITTEN[0]).parent.mkdir(parents=True)
    for name in ("src/engine.py", *cells.WRITTEN):
        (tmp_path / name).write_text("old", encoding="utf-8")
    cells.git("init", "--quiet")
    cells.git("add", ".")
    cells.git("-c", "user.name=a", "-c", "user.email=a", "commit", "--quiet", "--message", "a")
    assert cells.uncommitted() == []
    for name in ("src/engine.py", *cells.WRITTEN):
        (tmp_path / name).write_text("new", encoding="utf-8")
    assert cells.uncommitted() == ["src/engine.py"]
