"""Fixtures that every test file may use."""

from __future__ import annotations

import gc
import os
import re
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
from support import cells, shares

ROOT = Path(__file__).parent

# Nothing a test does may reach for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# As ranks have: kernels may round otherwise with more threads. torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)``: a pool of n ranks with one thread each, kept for the session.

    A pool that a failing test has closed is replaced at the next call.
    """
    if os.environ.get("DITMESH_TEST_BACKEND") == "rules":
        # The first server of this process serves all pools: links of their ranks use the group of rules/group.py.
        # Python's fork server before 3.13 looks for what it imports where PYTHONPATH says, and says nothing otherwise.
        paths = [str(ROOT), str(ROOT / "tests"), os.getenv("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        start_fork_server([QUIET, *PRELOAD, "rules.in_ranks"])
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
    parser.addoption("--share", metavar="K/N", help="run the K-th of N shares of the tests that were chosen")
    parser.addoption(
        "--record",
        action="store_true",
        help="write what cells of the matrix found, and at which commit, to src/ditmesh/strategies/support.json and "
        "docs/support.md, and the seconds of each file to tests/data/seconds.json",
    )
    parser.addoption(
        "--write-support",
        action="store_true",
        help="write the pages of docs that tests generate, such as docs/classes.md, and the table of the matrix; rows "
        "and cells that did not run stay as they are",
    )
    parser.addoption(
        "--write-faults", action="store_true", help="write what the fault drills found to docs/lab/faults.md"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and any(map(config.getoption, ("--write-support", "--write-faults"))):
        raise pytest.UsageError("what is written is collected in one process; leave out -n")
    if config.getoption("--record") and (changed := cells.uncommitted()):
        raise pytest.UsageError(f"cells are recorded by commit, and {changed[0]} is not committed; commit it first")
    share = config.getoption("--share")
    if share and not (re.fullmatch(r"\d+/\d+", share) and 1 <= int(share.split("/")[0]) <= int(share.split("/")[1])):
        raise pytest.UsageError(f"--share {share}: write K/N with K from 1 to N, such as 2/12")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("--share"):
        own = shares.share_of(items, *map(int, share.split("/")))
        config.hook.pytest_deselected(items=[item for item in items if item not in set(own)])
        items[:] = own


# Seconds of tests by file and kind, and cells of the matrix, of all processes.
SECONDS: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
CELLS: list[Any] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS[shares.file_of(report.nodeid), shares.kind_of(report.keywords)][report.nodeid] += report.duration
    if report.when == "call":
        CELLS.extend(value for name, value in report.user_properties if name == "cell")


@pytest.fixture
def record_support(record_property: Callable[[str, Any], None]) -> Callable[[str, str, dict[str, Any]], None]:
    """``record_support(class_name, combination, outcome)``: one cell of the support table."""
    return lambda *cell: record_property("cell", cell)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Of several processes the first one has the reports of all.
    if hasattr(session.config, "workerinput"):
        return
    if session.config.getoption("--record"):
        shares.record({key: list(tests.values()) for key, tests in SECONDS.items()})
    if CELLS and (session.config.getoption("--record") or session.config.getoption("--write-support")):
        cells.write(CELLS)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Where the time of a long run went: seconds of each folder of tests, summed over the processes."""
    by_room: defaultdict[str, float] = defaultdict(float)
    for (file, _), tests in SECONDS.items():
        by_room["/".join(Path(file).parts[: 1 if file.startswith("rules/") else 2])] += sum(tests.values())
    if sum(by_room.values()) > 60:
        rooms = sorted(by_room.items(), key=lambda room: -room[1])
        terminalreporter.write_line("seconds: " + ", ".join(f"{room} {seconds:.0f}" for room, seconds in rooms))
    if config.getoption("--share") or config.getoption("--record"):
        terminalreporter.write_line(cells.old())
