"""The order of operations of training steps on every rank, by NCCL's rules: recorded on gloo, and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ditmesh import ParallelConfig
from nccl_rules.program import Collective, Compute, PointToPoint, Program
from nccl_rules.record import run_trained
from nccl_rules.replay import RULES, replay
from support.train import folder_of, settings

# Lost to queues, at most, of a run's time.
LOST = 1.05
FSDP = {"sharding": "fsdp"}
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
