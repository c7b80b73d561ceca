"""The order of operations of training steps on every rank, by NCCL's rules: recorded on gloo, and replayed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ditmesh import ParallelConfig
from ditmesh.launch import RankPool
from nccl_rules.program import Collective, Compute, PointToPoint, Program
from nccl_rules.record import BETWEEN, of_island, run_trained
from nccl_rules.replay import RULES, replay
from support.islands import free_port
from support.train import folder_of, settings

# Lost to queues, at most, of a run's time.
LOST = 1.05
FSDP = {"sharding": "fsdp"}
STAGED = {"gradient_accumulation_steps": 4, "lora": {"rank": 4}}
CASES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"data": 2}, {}, False),
    ({"data": 2}, {"sharding": "none"}, False),
    ({"data": 2}, FSDP, True),
    ({"ulysses": 2}, {}, False),
    ({"ulysses": 2}, FSDP, False),
    ({"ring": 2}, {}, False),
    ({"tensor": 2}, {}, False),
    ({"tensor": 2, "data": 2}, FSDP, False),
    ({"ring": 2, "reproducible": True}, {}, False),
    ({"pipe": 2}, STAGED, True),
    ({"pipe": 2}, {"gradient_accumulation_steps": 3}, False),
    ({"pipe": 4}, {"gradient_accumulation_steps": 8}, False),
    ({"pipe": 2, "data": 2}, STAGED, False),
    ({"pipe": 2, "ulysses": 2}, STAGED, False),
    ({"pipe": 2, "tensor": 2}, {"gradient_accumulation_steps": 4}, False),
    ({"ulysses": 2, "ring": 2}, {}, False),
    ({"data": 2, "tensor": 2}, {}, False),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("data"), 16)


def check(programs: list[Program]) -> None:
    """No mismatch and no cycle; and nothing is lost to queues."""
    for program in programs:
        assert any(isinstance(entry, (PointToPoint, Collective)) for entry in program)
        assert any(isinstance(entry, Compute) for entry in program)
    outcomes = {rule: replay(programs, rule, message=0.0002) for rule in RULES}
    for rule, outcome in outcomes.items():
        assert (outcome.findings, outcome.deadlock) == ([], []), rule
        if rule != "lazy":
            assert outcome.seconds <= LOST * outcomes["ideal"].seconds, rule


@pytest.mark.parametrize(
    ("parallel", "more"),
    [
        pytest.param(parallel, more, id=f"{parallel}-{more}", marks=() if quick else pytest.mark.matrix)
        for parallel, more, quick in CASES
    ],
)
def test_training_steps(ranks, data, tmp_path, parallel, more):
    given = settings(data, tmp_path, max_train_steps=3, parallel=parallel, **more)
    check(ranks(ParallelConfig(**parallel).world_size).run(run_trained, given))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("parallel", "islands", "more"),
    [
        ({"data": 2}, {"every": 2}, {}),
        ({"data": 2}, {"every": 2, "delay": 1, "compress": "int8"}, {}),
        ({"data": 2}, {"exchange": "late_gradients"}, {}),
        ({"data": 2}, {"every": 2}, FSDP),
        ({"tensor": 2}, {"every": 2}, {}),
    ],
    ids=str,
)
def test_islands(data, tmp_path, parallel, islands, more):
    """Two islands of two ranks as one world: their hosts meet beside what the devices do."""
    meet, found = f"127.0.0.1:{free_port()}", {}

    def run(pool: RankPool, index: int) -> None:
        given = {"count": 2, "index": index, "meet": meet, **islands}
        one = settings(data, tmp_path, islands=given, max_train_steps=5, parallel=parallel, **more)
        found[index] = pool.run(run_trained, one)

    pools = [RankPool(2, threads=1, timeout=120.0) for _ in range(2)]
    try:
        threads = [threading.Thread(target=run, args=(pool, index)) for index, pool in enumerate(pools)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for pool in pools:
            pool.close()
    programs = [of_island(program, index, 2) for index in range(2) for program in found[index]]
    assert any(isinstance(e, Collective) and e.group.startswith(BETWEEN) for program in programs for e in program)
    check(programs)
