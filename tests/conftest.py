"""Fixtures that every test file may use."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ditmesh.launch import RankPool
from ditmesh.launch.pool import PRELOAD, QUIET
from ditmesh.launch.processes import start_fork_server

# Nothing a test does may reach for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# As ranks have: kernels may round otherwise with more threads. torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A mistake in what only predicts is no reason to go on without it.
os.environ["DITMESH_RAISE_MISTAKES"] = "1"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)``: a pool of n ranks with one thread each, kept for the session.

    A pool that a failing test has closed is replaced at the next call.
    """
    if os.environ.get("DITMESH_TEST_BACKEND") == "rules":
        # The first server of this process serves all pools: links of their ranks use the group of nccl_rules/rules.py.
        # Python's fork server before 3.13 looks for what it imports where PYTHONPATH says, and says nothing otherwise.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
        start_fork_server([QUIET, *PRELOAD, "nccl_rules.in_ranks"])
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or pool.closed:
            pool = pools[world_size] = RankPool(world_size, threads=1, timeout=120.0)
        return pool

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture
def kept_ranks(ranks: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run on the ranks of the fixture `ranks`, instead of starting their own; with one thread each."""
    from support.launchers import KeptRanks

    monkeypatch.setattr(KeptRanks, "pools", ranks, raising=False)
    monkeypatch.setenv("DITMESH_LAUNCHER", "support.launchers:KeptRanks")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for a program's temporary files; its name is short, as names of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def pytest_collection_finish() -> None:
    leave_libraries_alone()


@pytest.fixture(scope="module", autouse=True)
def libraries_left_alone(request: pytest.FixtureRequest) -> None:
    """Libraries that earlier tests have imported as well; where memory is foretold, walks see to it by themselves."""
    if request.path.parent.name in ("memory", "lab") or request.path.name == "test_cli_words.py":
        gc.unfreeze()
        LEFT_ALONE["modules"] = 0
    elif len(sys.modules) > LEFT_ALONE["modules"] + 100:
        leave_libraries_alone()


LEFT_ALONE = {"modules": 0}


def leave_libraries_alone() -> None:
    """Have the garbage collector leave alone what lives now, as in the ranks (`ditmesh.launch.rank.leave_inherited`).

    Otherwise every full collection of a test looks at a million objects of torch, diffusers and pytest.
    """
    gc.collect()
    gc.freeze()
    LEFT_ALONE["modules"] = len(sys.modules)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-support",
        action="store_true",
        help="write what the parity matrix found to src/ditmesh/support.json and docs/support.md; cells that did not "
        "run stay as they are",
    )
    parser.addoption(
        "--write-faults", action="store_true", help="write what the fault drills found to docs/reliability.md"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and any(map(config.getoption, ("--write-support", "--write-faults"))):
        raise pytest.UsageError("what is written is collected in one process; leave out -n")


SECONDS: defaultdict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    room = "/".join(Path(report.nodeid.partition("::")[0]).parts[:2])
    SECONDS[room] += report.duration


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Where the time of a long run went: seconds of each folder of tests, summed over the processes."""
    if sum(SECONDS.values()) > 60:
        rooms = sorted(SECONDS.items(), key=lambda room: -room[1])
        terminalreporter.write_line("seconds: " + ", ".join(f"{room} {seconds:.0f}" for room, seconds in rooms))


@pytest.fixture(scope="session")
def record_support(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str, dict[str, Any]], None]]:
    """``record_support(class_name, combination, outcome)``: one cell of the support table."""
    cells: dict[str, dict[str, dict[str, Any]]] = {}

    def badness(outcome: dict[str, Any]) -> tuple[bool, bool, float]:
        return "wrong" in outcome, "refused" in outcome, outcome.get("wrong", outcome.get("error", 0.0))

    def record(model: str, combination: str, outcome: dict[str, Any]) -> None:
        # A class that is tested in several ways (text to video, image to video) shows the worst of them.
        row = cells.setdefault(model, {})
        row[combination] = max(row.get(combination, outcome), outcome, key=badness)

    yield record
    if request.config.getoption("--write-support"):
        import diffusers
        import torch

        from ditmesh.strategies import support
        from support.support_page import as_markdown

        merged = {name: dict(row) for name, row in support.support_table().items()}
        for name, row in cells.items():
            merged.setdefault(name, {}).update(row)
        merged = {name: merged[name] for name in sorted(merged)}
        data = {
            "diffusers": diffusers.__version__,
            "torch": torch.__version__.split("+")[0],
            "classes": merged,
        }
        support.TABLE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        page = Path(__file__).parents[1] / "docs" / "support.md"
        page.write_text(as_markdown(), encoding="utf-8")
