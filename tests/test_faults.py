"""Faults on one rank of several: a right picture or an error on every rank, never a wrong one; weights come back."""

from __future__ import annotations

import copy
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.launch import RankPool
from support.pipelines import MAKERS, arguments, draw
from support.processes import alive
from support.tensor import bits, same_bits

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
# Seconds. An error that takes longer than PROMPT was not told by the rank that failed, but found by the deadline.
DEADLINE, PROMPT = 90.0, 40.0
# Faults per rank and cell, spread over the operations of a request.
POINTS = 3

# Pipeline, configuration, steps.
STRATEGIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "ulysses": ("sd3", {"ulysses": 2}, 2),
    "ring": ("sd3", {"ring": 2}, 2),
    "tensor": ("sd3", {"tensor": 2}, 2),
    "cfg": ("flux", {"cfg": 2}, 3),
    "data": ("sd3", {"data": 2}, 2),
    "displaced": ("sd3", {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}, 3),
    "naive": ("sd3", {"ring": 2, "exchange": "naive", "warmup": "fixed(1)"}, 3),
    "pipe": ("flux", {"pipe": 2, "patches": 4, "warmup": "fixed(1)"}, 3),
    "reproducible": ("sd3", {"ulysses": 2, "reproducible": True}, 2),
    "ulysses + cfg": ("flux", {"ulysses": 2, "cfg": 2}, 3),
}


class Injected(Exception):
    """The fault of a drill."""


class Fault:
    """Counts the operations of links, and does something at one of them: `mesh.traffic.observer`."""

    def __init__(self) -> None:
        self.count = 0
        self.at: int | None = None
        self.act: Callable[[], None] = lambda: None

    def arm(self, at: int | None, act: Callable[[], None]) -> None:
        self.count, self.at, self.act = 0, at, act

    def __call__(self, axis: str, kind: str) -> None:
        self.count += 1
        if self.count - 1 == self.at:
            self.act()


def injected() -> None:
    raise Injected("on purpose")


def pipeline(name: str) -> Any:
    pipe = MAKERS[name]()
    pipe.transformer = copy.deepcopy(pipe.transformer)
    return pipe


def opened(name: str, steps: int, config: dict[str, Any], timeout: float) -> tuple[Any, Callable[..., Any], Fault]:
    """A parallelised pipeline, what draws with it, and the fault on this rank."""
    pipe = pipeline(name)
    ditmesh.parallelize(pipe, config, timeout=timeout)
    fault = ditmesh.engine_of(pipe).mesh.traffic.observer = Fault()
    return pipe, lambda **more: draw(pipe, arguments(name, [1, 2], steps=steps, **more)), fault


def tried(work: Callable[[], torch.Tensor], truth: torch.Tensor) -> tuple[str, float]:
    """How a call ends: ``right``, ``wrong``, or the error's text, and after how many seconds."""
    began = time.monotonic()
    try:
        how = "right" if torch.equal(work(), truth) else "wrong"
    except Exception as error:
        how = f"{type(error).__name__}: {error}"
    return how, time.monotonic() - began


def points(count: int) -> list[int]:
    return sorted({round(point * (count - 1) / (POINTS - 1)) for point in range(POINTS)})


def drill(name: str, steps: int, config: dict[str, Any]) -> dict[str, Any]:
    """Exceptions at operations of a request, rank by rank; after each a request without one. Then restore after one."""
    rank = dist.get_rank()
    before = bits(pipeline(name).transformer)
    pipe, drawn, fault = opened(name, steps, config, DEADLINE)
    truth = drawn()
    fault.arm(None, injected)
    again = torch.equal(drawn(), truth)
    counts = torch.tensor([fault.count])
    dist.all_reduce(counts, op=dist.ReduceOp.MIN)
    found: dict[str, Any] = {"again": again, "faults": [], "operations": int(counts)}
    for failing in range(min(2, dist.get_world_size())):
        for at in points(int(counts)):
            fault.arm(at if rank == failing else None, injected)
            broken = tried(drawn, truth)
            fault.arm(None, injected)
            found["faults"].append((failing, at, *broken, *tried(drawn, truth)))
    # The same error everywhere, before anything was sent.
    found["symmetric"] = (*tried(lambda: drawn(prompt_embeds=None), truth), *tried(drawn, truth))
    fault.arm(int(counts) // 2 if rank == 1 else None, injected)
    found["last"] = tried(drawn, truth)
    try:
        ditmesh.restore(pipe)
        found["restored"] = same_bits(before, bits(pipe.transformer))
    except ditmesh.PeerError as error:
        found["restored"] = str(error)
    return found


@pytest.fixture(scope="module")
def outcomes(request) -> Any:
    """Cells of the table in docs/reliability.md; written with --write-faults."""
    cells: dict[str, dict[str, str]] = {}
    yield cells
    print("\n" + (table := as_table(cells)))
    if request.config.getoption("--write-faults"):
        page = PAGE.read_text(encoding="utf-8")
        marks = re.compile(r"(<!-- faults -->\n).*(<!-- end of faults -->)", re.DOTALL)
        PAGE.write_text(marks.sub(lambda m: m[1] + table + "\n" + m[2], page), encoding="utf-8")


def as_table(cells: dict[str, dict[str, str]]) -> str:
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = ["| strategy | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {name} | " + " | ".join(row.get(column, "") for column in columns) + " |" for name, row in cells.items()
    ]
    return "\n".join(lines)


CASES = [
    (strategy, shared, inputs)
    for strategy in STRATEGIES
    for shared in (True, False)
    for inputs in ("broadcast", "trust")
    if strategy != "ulysses + cfg" or (shared, inputs) in ((True, "broadcast"), (False, "trust"))
]


@pytest.mark.parametrize(("strategy", "shared", "inputs"), CASES)
def test_an_exception_on_one_rank(ranks, outcomes, strategy, shared, inputs):
    name, config, steps = STRATEGIES[strategy]
    config = {**config, "shared_memory": shared, "inputs": inputs}
    world = 4 if "+" in strategy else 2
    results = ranks(world).run(drill, name, steps, config)
    raised = right = 0
    for rank, found in enumerate(results):
        assert found["again"]
        assert found["operations"] > 0
        for failing, at, how, seconds, then, then_seconds in found["faults"]:
            where = f"rank {rank}, fault on rank {failing} at operation {at}"
            assert how == "right" or how.startswith("Injected" if rank == failing else "PeerError"), f"{where}: {how}"
            assert rank != failing or how != "right", where
            assert then == "right", f"{where}: {how}; then {then}"
            assert max(seconds, then_seconds) < PROMPT, where
            raised, right = raised + (how != "right"), right + (how == "right")
        how, _, then, _ = found["symmetric"]
        assert how.startswith("ValueError"), how
        assert then == "right", then
        assert found["last"][0] != "wrong"
        assert found["restored"] is True, found["restored"]
    column = f"{'shared memory' if shared else 'gloo'}, {inputs}"
    said = f"{raised} errors, {right} right pictures; next call right; weights restored"
    outcomes.setdefault(strategy, {})[column] = said


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
    pipe, drawn, _ = opened("sd3", 2, {"tensor": 2}, 20)
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


def stopped(config: dict[str, Any], at: int, timeout: float) -> dict[str, Any]:
    """Rank 1 is stopped in a request, for longer than the deadline; then calls until both have come, and restore."""
    rank = dist.get_rank()
    before = bits(pipeline("sd3").transformer)
    pipe, drawn, fault = opened("sd3", 2, config, timeout)
    truth = drawn()
    fault.arm(at if rank == 1 else None, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    found: dict[str, Any] = {"calls": [tried(drawn, truth) for _ in range(3)]}
    try:
        ditmesh.restore(pipe)
        found["restored"] = same_bits(before, bits(pipe.transformer))
    except ditmesh.PeerError as error:
        found["restored"] = str(error)
        found["refused"] = tried(drawn, truth)[0]
    return found


def continued_after(pool: RankPool, rank: int, seconds: float) -> threading.Thread:
    """Wake a rank up some time after it was stopped."""

    def watch() -> None:
        limit = time.monotonic() + 120
        stat = Path(f"/proc/{pool.pids[rank]}/stat")
        while time.monotonic() < limit:
            with suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[0] == "T":
                    time.sleep(seconds)
                    os.kill(pool.pids[rank], signal.SIGCONT)
                    return
            time.sleep(0.02)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("strategy", "at"), [("tensor", 9), ("ulysses", 5)])
def test_a_rank_that_is_stopped(strategy, at, shared):
    """Longer than the deadline: errors in time, then a sentence; nothing waits for ever, nothing is wrong."""
    config = {**STRATEGIES[strategy][1], "shared_memory": shared, "inputs": "trust"}
    timeout = 3.0
    with RankPool(2, threads=1, timeout=60.0) as pool:
        waker = continued_after(pool, 1, 4 * timeout)
        here, there = pool.run(stopped, config, at, timeout)
        waker.join()
    (first, took), (second, took_again), (third, at_once) = here["calls"]
    assert "timed out" in first, first
    assert took < 2 * timeout + 5
    assert took_again < 2 * timeout + 5
    assert re.search(
        r"rank 1 did not come to a call of \w+ within 3 s after a request had failed; call ditmesh", second
    )
    assert third == second
    assert at_once < 1.0
    assert all(how != "wrong" for how, _ in there["calls"])
    for found in (here, there):
        if strategy == "tensor":
            assert "could not be put together again" in found["restored"]
            assert "could not be put together again" in found["refused"]
        else:
            assert found["restored"] is True, found["restored"]


def killed(config: dict[str, Any], at: int, number: int) -> None:
    _, drawn, fault = opened("sd3", 2, config, DEADLINE)
    drawn()
    fault.arm(at if dist.get_rank() == 1 else None, lambda: os.kill(os.getpid(), number))
    drawn()


def left_behind() -> set[str]:
    folders = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    return {
        str(p) for folder in folders for p in folder.iterdir() if p.name.startswith(("ditmesh-", "pymp-", "torch_"))
    }


@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_that_is_killed(shared):
    """At moments chosen under a fixed seed. The others raise at once, and nothing stays."""
    generator = torch.Generator().manual_seed(7)
    for number in (signal.SIGKILL, signal.SIGTERM):
        at = int(torch.randint(0, 30, (1,), generator=generator))
        pool = RankPool(2, threads=1, timeout=60.0)
        pids, began = pool.pids, time.monotonic()
        with pytest.raises(ditmesh.RankFailed) as caught:
            pool.run(killed, {"tensor": 2, "shared_memory": shared}, at, int(number))
        assert caught.value.rank == 1
        assert time.monotonic() - began < PROMPT
        assert not any(alive(pid) for pid in pids)
        assert str(pool._folder) not in left_behind()


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
