"""Faults on one rank of several: a right picture or an error on every rank, never a wrong one; weights come back.

``make test`` runs a sample under fixed seeds, ``make test-all`` every operation of every rank; what the latter finds,
``--write-faults`` writes to docs/lab/faults.md.
"""

from __future__ import annotations

import copy
import os
import random
import re
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ditmesh
from support import ruled
from support.faults import (
    DEADLINE,
    PROMPT,
    SPREAD,
    STRATEGIES,
    Fault,
    drill,
    injected,
    opened,
    processes,
    signalled,
    tried,
    world_of,
)
from support.processes import alive
from support.tensor import bits, same_bits

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "faults.md"
SIGNALS = (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL)
# Seconds that a rank waits for one that is stopped.
PATIENCE = 2.0


@pytest.fixture(scope="module")
def outcomes(request) -> Any:
    """Cells of the tables in docs/lab/faults.md, ``[table][strategy][column]``; written with --write-faults."""
    tables: dict[str, dict[str, dict[str, str]]] = {"faults": {}, "signals": {}}
    yield tables
    page = PAGE.read_text(encoding="utf-8")
    for name, cells in tables.items():
        if cells:
            print("\n" + (table := as_table(cells)))
            marks = re.compile(rf"(<!-- {name} -->\n).*(<!-- end of {name} -->)", re.DOTALL)
            page = marks.sub(lambda m, table=table: m[1] + table + "\n" + m[2], page)
    if request.config.getoption("--write-faults"):
        PAGE.write_text(page, encoding="utf-8")


def as_table(cells: dict[str, dict[str, str]]) -> str:
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = ["| strategy | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {name} | " + " | ".join(row.get(column, "") for column in columns) + " |" for name, row in cells.items()
    ]
    return "\n".join(lines)


KINDS = [(shared, inputs) for shared in (True, False) for inputs in ("broadcast", "trust")]
# An exception at each of their operations takes long: the matrix has it.
LONG = tuple(strategy for strategy in STRATEGIES if strategy not in ("data", "cfg"))
# One of each kind of message.
QUICK = ("cfg", "ulysses", "tensor", "displaced", "pipe")
CASES = [
    pytest.param(
        strategy,
        shared,
        inputs,
        share,
        id=f"{strategy}-{'shared memory' if shared else 'gloo'}-{inputs}-{share}",
        marks=()
        if strategy in QUICK and share == ("some" if strategy in LONG else "each") and (column - row) % 2 == 0
        else pytest.mark.matrix,
    )
    for row, strategy in enumerate(STRATEGIES)
    for column, (shared, inputs) in enumerate(KINDS)
    # On a diagonal every strategy at every operation, elsewhere at some; of those that have many operations, at some.
    for share in ("each" if row % len(KINDS) == column else "some", "all")
]


@pytest.mark.parametrize(("strategy", "shared", "inputs", "share"), CASES)
def test_an_exception_on_one_rank(ranks, outcomes, strategy, shared, inputs, share):
    name, config = STRATEGIES[strategy]
    config = {**config, "shared_memory": shared, "inputs": inputs}
    column = f"{'shared memory' if shared else 'gloo'}, {inputs}"
    results = ranks(world_of(strategy)).run(drill, name, config, f"{strategy}, {column}", share)
    raised = right = 0
    for rank, found in enumerate(results):
        assert found["again"]
        assert found["error"] < 1e-5 or "warmup" in config, found["error"]
        assert min(found["operations"]) > 0
        for point, hows, restored, then, then_seconds in found["faults"]:
            for failing, how, seconds in hows:
                where = f"rank {rank}, fault on rank {failing}, {point}"
                # An operation that the other rank does not have is not reached there.
                reached = point.at < found["operations"][failing]
                assert how == "right" or how.startswith("Injected" if rank == failing else "PeerError"), (where, how)
                assert (rank == failing and reached) != (how == "right") or rank != failing, where
                assert max(seconds, then_seconds) < PROMPT, where
                raised, right = raised + (how != "right"), right + (how == "right")
            assert then == "right", (point, hows, then)
            assert restored in ("", "restored"), (point, restored)
        how, then = found["symmetric"]
        assert how.startswith("ValueError"), how
        assert then == "right", then
        assert found["last"] != "wrong"
        assert found["restored"] == "restored", found["restored"]
        assert not found["left"], found["left"]
    if share == "all":
        text = f"{len(results[0]['faults'])} points: {raised} errors, {right} right images"
        outcomes["faults"].setdefault(strategy, {})[column] = text


def moments() -> list[Any]:
    """Every signal for every strategy; the sample has one strategy in three, and one that waits for a deadline."""
    cases = []
    for row, strategy in enumerate(STRATEGIES):
        chosen = signal.SIGSTOP if strategy == "displaced" else SIGNALS[1 + row % 2]
        for number in SIGNALS:
            for shared in (True, False):
                sample = chosen == number and (row // 2) % 2 == shared and row % 3 == 0
                name = f"{strategy}-{number.name}-{'shared memory' if shared else 'gloo'}"
                cases.append(
                    pytest.param(strategy, number, shared, id=name, marks=() if sample else pytest.mark.matrix)
                )
    return cases


@pytest.mark.parametrize(("strategy", "number", "shared"), moments())
def test_a_signal_at_a_random_moment(outcomes, strategy, number, shared):
    """Stopped for longer than the deadline, or killed, wherever it is: the others are right, or raise in time."""
    generator = random.Random(f"{strategy} {number} {shared}")
    name, config = STRATEGIES[strategy]
    config, world = (
        {**config, "shared_memory": shared, "inputs": generator.choice(("broadcast", "trust"))},
        world_of(strategy),
    )
    victim, patience = generator.randrange(world), PATIENCE if number == signal.SIGSTOP else DEADLINE
    with processes(world, signalled, name, config, patience, 24) as members:
        ready = [heard(ours, "ready") for _, ours in members]
        # Not later than in the fourth request.
        time.sleep(generator.uniform(0, 3 * min(ready)))
        os.kill(members[victim][0], number)
        others = [rank for rank in range(world) if rank != victim]
        if number == signal.SIGSTOP:
            failed = wait([members[rank][1] for rank in others], 10 * PATIENCE)
            assert failed, "nobody has missed the rank that is stopped"
            os.kill(members[victim][0], signal.SIGCONT)
            others = list(range(world))
        answers = {rank: heard(members[rank][1], "answer") for rank in others}
        pids = [pid for pid, _ in members]
    assert not any(map(alive, pids))
    for rank, found in answers.items():
        assert found["again"] == "right"
        hows = [how for how, _ in found["calls"]]
        assert all(how == "right" or re.match(r"(Peer|Desync)Error: ", how) for how in hows), hows
        assert rank == victim or any(how != "right" for how in hows), f"rank {rank} did not notice"
        limit = 2 * PATIENCE + 10 if number == signal.SIGSTOP else PROMPT
        # The victim's own time includes that in which it was stopped.
        assert all(seconds < limit for _, seconds in found["calls"]), found["calls"]
        refused = found["restored"].startswith("refused: ") and "could not be put together again" in found["restored"]
        assert found["restored"] == "restored" or (refused and strategy in SPREAD), found["restored"]
        assert not found["left"], found["left"]
    broken = any(answers[rank]["calls"][-1][0] != "right" for rank in answers)
    kept = all(found["restored"] == "restored" for found in answers.values())
    text = f"errors, then {'errors' if broken else 'right images'}; {'restored' if kept else 'restore fails'}"
    outcomes["signals"].setdefault(strategy, {})[f"{number.name}, {'shared memory' if shared else 'gloo'}"] = text


def heard(connection: Any, kind: str) -> Any:
    """The next message of that kind."""
    while True:
        assert connection.poll(PROMPT), f"no {kind} within {PROMPT:g} s"
        said, content = connection.recv()
        if said == kind:
            return content


def shapes(shared: bool) -> str:
    """Ranks whose tensors differ in shape, without inputs being compared; then ranks whose tensors do not."""
    mesh = ditmesh.Mesh(ditmesh.ParallelConfig(ring=2, shared_memory=shared), timeout=3)
    rows, link, how = 4 + 4 * mesh.rank, mesh.ring, "taken"
    try:
        with mesh.request():
            link.all_to_all([[torch.ones(rows)]] * 2, [[(rows,)]] * 2)
    except ditmesh.PeerError as error:
        how = str(error)
    with mesh.request():
        parts = link.all_to_all([[torch.full((2,), float(mesh.rank))]] * 2, [[(2,)]] * 2)
    assert parts[1 - mesh.rank][0].tolist() == [1.0 - mesh.rank] * 2
    mesh.close()
    return how


@ruled.needs("what gloo and shared memory make of another shape, which NCCL carries to the wrong place")
@pytest.mark.parametrize("shared", [True, False])
def test_another_shape_is_never_taken(ranks, shared):
    """Through shared memory a message says what it is; over gloo another one does not match, until the deadline."""
    found = ranks(2).run(shapes, shared)
    for rank, how in enumerate(found):
        if shared:
            mine, other = (16, 32) if rank == 0 else (32, 16)
            assert how.startswith(f"rank {1 - rank} sent all_to_all of {other} bytes in request 1"), how
            assert f"rank {rank} expected all_to_all of {mine} bytes in request 1" in how
        else:
            assert "timed out" in how or "has failed this request" in how, how


def purposes() -> list[str]:
    """One rank comes to restore, the other one to draw; then both to draw."""
    pipe, drawn, _ = opened("sd3", {"tensor": 2}, 20)
    truth = drawn()
    found = []
    if dist.get_rank() == 0:
        with pytest.raises(ditmesh.PeerError) as caught:
            ditmesh.restore(pipe)
        found.append(str(caught.value))
        # The other rank has no slices of this one any more: it refuses, as a picture would be a wrong one.
        found.append(tried(drawn, truth)[0])
        with pytest.raises(ditmesh.PeerError):
            pipe.transformer.save_pretrained("nowhere")
    else:
        found.append(tried(drawn, truth)[0])
        found.append(tried(drawn, truth)[0])
    return found


def test_ranks_that_come_for_different_things(ranks):
    (restored, refused), (drew, alone) = ranks(2).run(purposes)
    assert "different things: rank 0 for restore, rank 1 for a call of StableDiffusion3Pipeline" in restored
    assert "could not be put together again" in restored
    assert "could not be put together again" in refused
    assert "different things" in drew
    # Rank 0 has left the mesh.
    assert alone.startswith("PeerError: rank 0 has ended or has given up"), alone


def bare(shared: bool) -> list[str]:
    """A transformer called without a pipeline: a call that raises on one rank, the next one, restore."""
    from support.models import inputs, run, sizes, tiny

    model, made = copy.deepcopy(tiny("SD3")), inputs("SD3", next(iter(sizes("SD3").values())))
    before = bits(model)
    ditmesh.parallelize(model, {"tensor": 2, "shared_memory": shared}, timeout=DEADLINE)
    fault = ditmesh.engine_of(model).mesh.traffic.observer = Fault()
    truth = run(model, made)
    fault.arm(3 if dist.get_rank() == 1 else None, injected)
    found = [tried(lambda: run(model, made), truth)[0]]
    fault.arm(None, injected)
    found += [tried(lambda: run(model, made), truth)[0] for _ in range(2)]
    ditmesh.restore(model)
    return [*found, str(same_bits(before, bits(model)))]


@pytest.mark.parametrize("shared", [True, False])
def test_a_transformer_without_a_pipeline(ranks, shared):
    here, there = ranks(2).run(bare, shared)
    assert here[0].startswith("PeerError"), here
    assert there[0].startswith("Injected"), there
    assert here[1:] == there[1:] == ["right", "right", "True"]
