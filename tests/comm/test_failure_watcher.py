"""A rank that fails alone, without closed connections: all ranks answer at once, and the next request has its bits."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rules.drills import DEADLINE, NAP, drilled, killed
from rules.group import ruled as by_the_rules

import ditmesh
from ditmesh.comm.state import RequestState, raise_for_peer
from support.faults import PROMPT, STRATEGIES, processes, world_of
from support.processes import alive

# Seconds that a busy machine may take; without the watcher it would be the deadline.
SOON = DEADLINE / 4
ALL = int(os.environ.get("DITMESH_TEST_DRILLS", "300"))


def check(kind: str, victim: int, rank: int, how: str, then: str) -> None:
    """How a request with a fault ended on a rank, and the next one."""
    if kind == "stopped":
        assert how == "right", how
    elif rank == victim:
        assert how == "right" or how.startswith(("Injected", "OutOfMemoryError")), how
    else:
        cause = {"exception": "Injected: on purpose", "out of memory": "OutOfMemoryError: CUDA out of memory"}[kind]
        assert how == "right" or how.startswith(f"PeerError: rank {victim} has failed this request ({cause}"), how
    assert then == "right", then


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ulysses", marks=pytest.mark.matrix),
        "pipe",
        pytest.param("tensor", marks=pytest.mark.matrix),
        "ulysses + ring",
    ],
)
def test_one_rank_fails_and_all_answer(ranks, strategy):
    kinds = ["exception", "out of memory", "stopped", "out of memory", "exception"]
    found = ranks(world_of(strategy)).run(drilled, strategy, kinds, strategy)
    for rank, faults in enumerate(found):
        for kind, victim, how, seconds, then in faults:
            check(kind, victim, rank, how, then)
            assert seconds < SOON + NAP, (kind, seconds)
    assert any(how.startswith("PeerError") for faults in found for _, _, how, _, _ in faults)


MANY = ("ulysses", "ring", "pipe", "tensor", "displaced", "cfg")


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", MANY)
def test_many_faults(ranks, strategy):
    """As many of all strategies as DITMESH_TEST_DRILLS says, and how long they took."""
    kinds = ["exception", "out of memory", "exception", "out of memory", "stopped"] * (ALL // (5 * len(MANY)))
    took = []
    for rank, faults in enumerate(ranks(2).run(drilled, strategy, kinds, f"many {MANY.index(strategy)}")):
        for kind, victim, how, seconds, then in faults:
            check(kind, victim, rank, how, then)
            took.append(seconds - NAP * (kind == "stopped"))
    print(f"{len(took) // 2} faults; the last rank answered after {max(took):.2f} s at most")
    assert max(took) < 2.0


def kill(name: str, config: dict[str, Any], victim: int, at: int | float, soon: float) -> float:
    """Kill a rank in a request; how long the last of the others took to notice, in seconds."""
    size = ditmesh.ParallelConfig(**config).world_size
    with processes(size, killed, name, config, victim, at) as members:
        answers, began = {}, 0.0
        for rank, (_, connection) in enumerate(members):
            assert connection.poll(PROMPT)
            kind, content = connection.recv()
            if rank == victim:
                assert kind == "killed"
                began = content
            else:
                answers[rank] = content
        pids = [pid for pid, _ in members]
    assert not any(map(alive, pids))
    for found in answers.values():
        assert found["how"].startswith(
            f"PeerError: rank {victim} has failed this request (its process has ended); call the pipeline"
        )
        refused, seconds = found["next"]
        assert refused.startswith("PeerError: rank"), refused
        assert seconds < soon
    took = max(found["answered"] for found in answers.values()) - began
    assert took < soon
    return took


def test_a_rank_is_killed_and_the_others_notice():
    kill("sd3", {"ring": 3}, 1, 9, SOON)


@pytest.mark.matrix
def test_many_kills():
    """A tenth of the faults of `test_many_faults`: every one needs ranks of its own."""
    generator, took = random.Random("kills"), []
    for number in range(ALL // 10):
        name, config = STRATEGIES[MANY[number % len(MANY)]]
        took.append(kill(name, config, generator.randrange(2), generator.random(), SOON))
    print(f"{len(took)} kills; the last rank answered after {max(took):.2f} s at most")
    assert max(took) < 2.0


def all_fail(times: int) -> list[float]:
    """Every rank fails every request; what the ranks add up in each, and the seconds."""
    with by_the_rules(delay="early"):
        mesh = ditmesh.Mesh(ditmesh.ParallelConfig(ring=dist.get_world_size()), timeout=DEADLINE)
        sums, began = [], time.monotonic()
        for _ in range(times):
            mesh.begin_request()
            sums.append(float(mesh.ring.all_reduce(torch.ones(1))))
            dist.barrier()
            mesh.fail_request()
        mesh.close()
    return [*sums, time.monotonic() - began]


def test_all_ranks_fail_at_once(ranks):
    """Every notice goes round while all ranks send one."""
    for *sums, seconds in ranks(4).run(all_fail, 20, deadline=2 * DEADLINE):
        assert sums == [4.0] * 20
        assert seconds < SOON


def test_errors_of_nccl_are_of_a_peer():
    error = dist.DistBackendError("NCCL communicator was aborted on rank 1.")
    with pytest.raises(ditmesh.PeerError, match=r"the ring link has failed this request, or has ended \(NCCL"):
        raise_for_peer("ring", error)
    state = RequestState()
    state.lost, state.refusal = True, "rank 1 has failed this request (OutOfMemoryError: all of it)"
    with pytest.raises(ditmesh.PeerError, match="rank 1 has failed this request") as raised:
        raise_for_peer("ring", error, state)
    assert raised.value.__cause__ is error
    own = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1") as raised:
        raise_for_peer("ring", own, state)
    assert raised.value is own


def deadlines(backend: str) -> tuple[float, float]:
    from unittest import mock

    from ditmesh.comm import grid

    asked = mock.patch.object(grid, "backend_of", side_effect=lambda group, _: "gloo" if group else backend)
    with asked, mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        mesh = ditmesh.Mesh(ditmesh.ParallelConfig(ring=2), timeout=10)
        mesh.close()
    return mesh.deadline, max(call.kwargs["timeout"].total_seconds() for call in made.call_args_list if call.args)


def test_a_short_deadline_is_not_one_of_nccls_collectives(ranks):
    assert ranks(2).run(deadlines, "nccl") == [(10.0, 300.0)] * 2
    assert ranks(2).run(deadlines, "gloo") == [(10.0, 10.0)] * 2
