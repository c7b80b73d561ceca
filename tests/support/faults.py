"""What the fault drills run on every rank: tiny pipelines, faults at chosen operations, and what a rank holds open."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ditmesh
from ditmesh.launch.devices import join_default_group, use_loopback
from ditmesh.launch.pool import PRELOAD
from ditmesh.launch.processes import start_fork_server
from support.models import component, relative_error
from support.pipelines import MAKERS, arguments, draw
from support.tensor import bits, same_bits

# Seconds. An error that takes longer than PROMPT was not told by the rank that failed, but found by the deadline.
DEADLINE, PROMPT = 90.0, 40.0
STALE = {"warmup": "fixed(1)"}

# Pipeline and configuration; every request has two steps.
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ulysses": ("sd3", {"ulysses": 2}),
    "ring": ("sd3", {"ring": 2}),
    "ulysses + ring": ("sd3", {"ulysses": 2, "ring": 2}),
    "tensor": ("sd3", {"tensor": 2}),
    "cfg": ("flux", {"cfg": 2}),
    "data": ("sd3", {"data": 2}),
    "displaced": ("sd3", {"ring": 2, "exchange": "displaced", **STALE}),
    "naive": ("sd3", {"ring": 2, "exchange": "naive", **STALE}),
    "pipe": ("flux", {"pipe": 2, "patches": 2, **STALE}),
    "reproducible": ("sd3", {"ulysses": 2, "reproducible": True}),
    "ulysses + cfg": ("flux", {"ulysses": 2, "cfg": 2}),
    "ulysses + shard": ("sd3", {"ulysses": 2, "shard": 2}),
}
# Weights of these lie on several ranks: without the others they cannot be put together.
SPREAD = ("tensor", "pipe", "ulysses + shard")


def world_of(strategy: str) -> int:
    return ditmesh.ParallelConfig(**STRATEGIES[strategy][1]).world_size


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


@cache
def _small(name: str) -> Any:
    """Two blocks, of every kind that the family has."""
    torch.manual_seed(0)
    return component({"flux": "Flux small", "sd3": "SD3 small"}[name]).eval()


def pipeline(name: str) -> Any:
    pipe = MAKERS[name]()
    pipe.register_modules(transformer=copy.deepcopy(_small(name)))
    return pipe


def drawn_by(pipe: Any, name: str, **more: Any) -> torch.Tensor:
    return draw(pipe, arguments(name, [1, 2], **{"steps": 2, **more}))


def opened(name: str, config: dict[str, Any], timeout: float) -> tuple[Any, Callable[..., Any], Fault]:
    """A parallelised pipeline, what draws with it, and the fault on this rank."""
    pipe = pipeline(name)
    ditmesh.parallelize(pipe, config, timeout=timeout)
    fault = ditmesh.engine_of(pipe).mesh.traffic.observer = Fault()
    return pipe, lambda **more: drawn_by(pipe, name, **more), fault


def tried(work: Callable[[], torch.Tensor], truth: torch.Tensor) -> tuple[str, float]:
    """How a call ends: ``right``, ``wrong``, or the error's text, and after how many seconds."""
    began = time.monotonic()
    try:
        how = "right" if torch.equal(work(), truth) else "wrong"
    except Exception as error:
        how = f"{type(error).__name__}: {error}"
    return how, time.monotonic() - began


def held() -> Counter[str]:
    """What this process holds: kinds of open files, and threads."""
    kinds: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            # socket:[17], anon_inode:[pidfd], /memfd:ditmesh (deleted), /tmp/file
            target = os.readlink(entry)
            kinds[target if target.startswith("anon_inode") else target.split("[")[0]] += 1
    kinds["threads"] = len(list(Path("/proc/self/task").iterdir()))
    return kinds


def more_than(before: Counter[str], seconds: float = 10.0) -> dict[str, int]:
    """What this process holds and did not before. gloo's threads close their sockets a moment later."""
    limit = time.monotonic() + seconds
    while True:
        gc.collect()
        more = held() - before
        if not more or time.monotonic() > limit:
            return dict(more)
        time.sleep(0.02)


_warm: list[str] = []


def warmed() -> None:
    """Whatever a process opens once is open."""
    if not _warm:
        for shared in (True, False):
            with ditmesh.parallelized(
                pipeline("sd3"), {"ring": dist.get_world_size(), "shared_memory": shared}
            ) as pipe:
                drawn_by(pipe, "sd3")
        _warm.append("")


def put_back(pipe: Any, name: str, before: dict[str, torch.Tensor], alone: torch.Tensor) -> str:
    """`restore`: whether weights have their bits and the pipeline draws as before, or what it says."""
    try:
        ditmesh.restore(pipe)
    except ditmesh.PeerError as error:
        refused, _ = tried(lambda: drawn_by(pipe, name), alone)
        return f"refused: {error}" if refused.startswith("PeerError") else f"after {error}: {refused}"
    if not same_bits(before, bits(pipe.transformer)):
        return "other weights"
    return "restored" if torch.equal(drawn_by(pipe, name), alone) else "another picture"


class Point(NamedTuple):
    """An exception on a rank at an operation of a request.

    Attributes:
        rank: the failing one.
        at: number of its operation in the request.
        then: what comes next: ``"call"``; ``"again"``: another rank fails at the same operation of the next request;
            ``"restore"``: the pipeline is restored, and parallelised anew for the next point.
    """

    rank: int
    at: int
    then: str = "call"


def sampled(counts: Sequence[int], seed: str, share: str) -> list[Point]:
    """Points of a drill; the same on every rank.

    Args:
        counts: operations of a request, by rank.
        seed: of what is random.
        share: ``"all"``: every operation of every rank, ``"each"``: every operation, on ranks in turn, ``"some"``:
            three of them.
    """
    every = [Point(rank, at) for at in range(max(counts)) for rank, count in enumerate(counts) if at < count]
    generator = random.Random(seed)
    if share == "all":
        kinds = ["call"] * 6 + ["again", "restore"]
        return [point._replace(then=kinds[number % len(kinds)]) for number, point in enumerate(every)]
    if share == "each":
        ranks = {at: [point for point in every if point.at == at] for at in range(max(counts))}
        every = [choice[(at + generator.randrange(2)) % len(choice)] for at, choice in ranks.items()]
    else:
        every = sorted(generator.sample(every, min(3, len(every))), key=lambda point: point.at)
    # One of each.
    odd = generator.sample(range(len(every)), min(2, len(every)))
    for place, then in zip(odd, ("again", "restore"), strict=False):
        every[place] = every[place]._replace(then=then)
    return every


def drill(name: str, config: dict[str, Any], seed: str, share: str) -> dict[str, Any]:
    """`_drill`, and what it has left open."""
    warmed()
    before = held()
    return {**_drill(name, config, seed, share), "left": more_than(before)}


def _drill(name: str, config: dict[str, Any], seed: str, share: str) -> dict[str, Any]:
    """Exceptions at operations of a request, point by point; after each a request without one, or restore."""
    rank, weights, alone = dist.get_rank(), bits(pipeline(name).transformer), drawn_by(pipeline(name), name)
    pipe, drawn, fault = opened(name, config, DEADLINE)
    truth = drawn()
    fault.arm(None, injected)
    found: dict[str, Any] = {"again": torch.equal(drawn(), truth), "error": relative_error(truth, alone), "faults": []}
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, fault.count)
    found["operations"] = counts
    for point in sampled(counts, seed, share):
        failing, calls = point.rank, 2 if point.then == "again" else 1
        hows = []
        for _ in range(calls):
            fault.arm(point.at if rank == failing else None, injected)
            hows.append((failing, *tried(drawn, truth)))
            failing = (failing + 1) % len(counts)
        fault.arm(None, injected)
        if point.then == "restore":
            then = put_back(pipe, name, weights, alone)
            pipe, drawn, fault = opened(name, config, DEADLINE)
            found["faults"].append((point, hows, then, *tried(drawn, truth)))
        else:
            found["faults"].append((point, hows, "", *tried(drawn, truth)))
    # The same error everywhere, before anything was sent.
    found["symmetric"] = tried(lambda: drawn(prompt_embeds=None), truth)[0], tried(drawn, truth)[0]
    fault.arm(counts[-1] // 2 if rank == len(counts) - 1 else None, injected)
    found["last"] = tried(drawn, truth)[0]
    found["restored"] = put_back(pipe, name, weights, alone)
    return found


def signalled(
    name: str, config: dict[str, Any], timeout: float, requests: int, *, report: Callable[[Any], None]
) -> dict[str, Any]:
    """Requests while somebody sends this rank a signal, then restore. It reports what it is about to do, and errors."""
    warmed()
    before = held()
    return {**_signalled(name, config, timeout, requests, report), "left": more_than(before)}


def _signalled(
    name: str, config: dict[str, Any], timeout: float, requests: int, report: Callable[[Any], None]
) -> dict[str, Any]:
    weights, alone = bits(pipeline(name).transformer), drawn_by(pipeline(name), name)
    pipe, drawn, _ = opened(name, config, timeout)
    truth = drawn()
    again, seconds = tried(drawn, truth)
    report(("ready", seconds))
    calls = []
    for _ in range(requests):
        calls.append(tried(drawn, truth))
        if calls[-1][0] != "right":
            report(("failed", calls[-1][0]))
    return {"again": again, "calls": calls, "restored": put_back(pipe, name, weights, alone)}


def _member(rank: int, world: int, meeting: str, answers: Any, function: Callable[..., Any], given: tuple) -> None:
    """A process of `processes`: it joins, reports, answers, and ends without a word to the others."""
    use_loopback()
    torch.set_num_threads(1)
    tempfile.tempdir = str(Path(meeting).parent)
    join_default_group("cpu", rank, world, 0, DEADLINE, meeting)
    answers.send(("answer", function(*given, report=answers.send)))
    os._exit(0)


@contextmanager
def processes(world: int, function: Callable[..., Any], *given: Any) -> Iterator[list[tuple[int, Any]]]:
    """Ranks that nobody looks after: process ids and connections. Unlike a pool's they outlive one another."""
    start_fork_server(list(PRELOAD))
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="ditmesh-drill-") as folder:
        started: list[tuple[Any, Any]] = []
        meeting = (Path(folder) / "rendezvous").as_uri()
        try:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_member, args=(rank, world, meeting, theirs, function, given))
                process.start()
                theirs.close()
                started.append((process, ours))
            yield [(process.pid, ours) for process, ours in started]
        finally:
            for process, ours in started:
                process.kill()
                process.join()
                process.close()
                ours.close()
