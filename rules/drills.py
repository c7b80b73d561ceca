"""Drills on links that nothing tells of a failure, as NCCL's: faults on one rank, and when every rank has answered."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ditmesh
from rules.group import ruled
from support.faults import STRATEGIES, injected, opened, tried

# Seconds. What nothing tells of is found after the first; a stopped rank is woken after the second.
DEADLINE, NAP = 60.0, 0.5


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def nap() -> None:
    """Be stopped, and woken from outside."""
    subprocess.Popen(["sh", "-c", f"sleep {NAP}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: dict[str, Callable[[], None]] = {"exception": injected, "out of memory": out_of_memory, "stopped": nap}


def drilled(strategy: str, kinds: list[str], seed: str) -> list[tuple[str, int, str, float, str]]:
    """Faults at random operations of random ranks, each followed by a request without one.

    Returns:
        For each fault its kind, the rank, how the request ended here, at what time of the clock that all processes
        share (less the time of the fault, on its rank), and how the next request ended.
    """
    name, config = STRATEGIES[strategy]
    with ruled(delay="early"):
        pipe, drawn, fault = opened(name, {**config, "inputs": "trust"}, DEADLINE)
        truth = drawn()
        fault.arm(None, injected)
        assert torch.equal(drawn(), truth)
        counts = [0] * dist.get_world_size()
        dist.all_gather_object(counts, fault.count)
        generator, found = random.Random(seed), []
        for kind in kinds:
            victim = generator.randrange(len(counts))
            at = generator.randrange(counts[victim])
            began = [0.0]

            def act(kind: str = kind, began: list[float] = began) -> None:
                began[0] = time.monotonic()
                FAULTS[kind]()

            fault.arm(at if dist.get_rank() == victim else None, act)
            how, _ = tried(drawn, truth)
            answered = [(0.0, 0.0)] * len(counts)
            dist.all_gather_object(answered, (time.monotonic(), began[0]))
            fault.arm(None, injected)
            seconds = max(ended for ended, _ in answered) - max(began for _, began in answered)
            found.append((kind, victim, how, seconds, tried(drawn, truth)[0]))
        ditmesh.restore(pipe)
    return found


def killed(
    name: str, config: dict[str, Any], victim: int, at: int | float, *, report: Callable[[Any], None]
) -> dict[str, Any]:
    """One rank is killed in a request; the others say when they noticed, and what they say to the next request.

    Args:
        name: of the pipeline.
        config: the ranks.
        victim: the rank.
        at: number of the operation at which it is killed; of a float: the part of the victim's operations before it.
        report: tells of the kill.
    """
    with ruled(delay="early"):
        _, drawn, fault = opened(name, {**config, "inputs": "trust"}, DEADLINE)
        truth = drawn()
        if isinstance(at, float):
            fault.arm(None, injected)
            drawn()
            at = int(at * fault.count)

        def die() -> None:
            report(("killed", time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        fault.arm(at if dist.get_rank() == victim else None, die)
        how, _ = tried(drawn, truth)
        answered = time.monotonic()
        return {"how": how, "answered": answered, "next": tried(drawn, truth)}
