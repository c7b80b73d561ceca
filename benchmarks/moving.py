"""Tokens that move while a request runs: a rank that becomes slow in mid-request.

    python benchmarks/moving.py [--slow stopped busy] [--steps 40] [--slow-from 20] [--json out.json]

Rank 1 becomes slow in one of these ways, on however many tokens it has:

``stopped``: another process stops and continues it every 10 milliseconds, as ``cpulimit`` does. ``busy``: ranks are
pinned to a core each, and an endless loop to that of rank 1. ``nice``: the same, and rank 1 has a nice value of 3
besides, so that it gets a third of its core.

Every step's seconds and waiting are those of `engine.all_loads()`; the JSON file has them for every rank and step, as a
page could draw them. The balanced step is that of given speeds, which know the slow rank beforehand. Seconds are by the
clock: where the machine has other work, they are compared badly.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import exact
from harness import command_line, show_table, write_compactly
from machine import describe_machine

CONTENDERS: dict[str, dict[str, Any]] = {
    "ring=2, even": {"ring": 2},
    "ring=2, speeds given": {"ring": 2, "speeds": "given"},
    "ring=2, speeds=auto": {"ring": 2, "speeds": "auto"},
    "displaced, even": {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
    "displaced, speeds=auto": {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)", "speeds": "auto"},
}
# Ways of becoming slow, and how fast rank 0 is then beside rank 1.
WAYS = {"stopped": 2.0, "busy": 2.0, "nice": 2.95}
# Steps behind the one in which a rank becomes slow until it is asked for what a step costs.
LATER = 6
# Stops and continues a process until its own input ends.
LIMITER = """
import os, select, signal, sys
try:
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        os.kill(int(sys.argv[1]), signal.SIGSTOP)
        select.select([], [], [], 0.01)
        os.kill(int(sys.argv[1]), signal.SIGCONT)
finally:
    os.kill(int(sys.argv[1]), signal.SIGCONT)
"""
LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"


@contextmanager
def slower(way: str) -> Iterator[None]:
    """This process is slowed by others for as long as the ``with`` block lasts."""
    if way == "stopped":
        command = [sys.executable, "-c", LIMITER, str(os.getpid())]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
            try:
                yield
            finally:
                # Its input ends, and it has us go on.
                assert other.stdin is not None
                other.stdin.close()
                other.wait()
        return
    if not way:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", LOOP]) as other:
        if way == "nice":
            os.setpriority(os.PRIO_PROCESS, 0, 3)
        try:
            yield
        finally:
            other.send_signal(signal.SIGKILL)
            if way == "nice":
                os.setpriority(os.PRIO_PROCESS, 0, 0)


def request(
    config: dict[str, Any], steps: int, slow_from: int, way: str, side: int
) -> list[list[tuple[float, float, int, bool]]]:
    """For every rank and step: seconds, waiting, image tokens, and whether tokens moved."""
    import torch

    import ditmesh

    torch.set_num_threads(1)
    model, made = exact.benchmark_model(), exact.benchmark_inputs(side=side)
    second = torch.distributed.get_rank() == 1
    cores = sorted(os.sched_getaffinity(0))
    if way in ("busy", "nice"):
        os.sched_setaffinity(0, {cores[torch.distributed.get_rank()]})
    with ditmesh.parallelized(model, config), torch.no_grad():
        engine = ditmesh.engine_of(model)
        engine.begin_request(steps)
        for _ in range(slow_from):
            engine.clock.advance()
            model(**made)
        with slower(way if second else ""):
            for _ in range(slow_from, steps):
                engine.clock.advance()
                model(**made)
        engine.end_request()
        every = engine.all_loads()
    os.sched_setaffinity(0, cores)
    return [[(one.seconds, one.waited, one.tokens, one.moved) for one in rank] for rank in every]


def turn(pool: Any, way: str, options: Any, machine: dict[str, Any]) -> dict[str, Any]:
    """Every contender with one way of becoming slow; prints a table, and returns the loads of every one."""
    found: dict[str, Any] = {}
    rows: list[list[str]] = []
    balanced = 0.0
    for name, config in CONTENDERS.items():
        if options.only and not name.startswith(options.only):
            continue
        given = {"speeds": (WAYS[way], 1.0)} if config.get("speeds") == "given" else {}
        loads = pool.run(request, config | given, options.steps, options.slow_from, way, options.side)[0]
        found[name] = [[[round(one[0], 4), round(one[1], 4), *one[2:]] for one in r] for r in loads]
        took = [max(step) for step in zip(*([one[0] for one in rank] for rank in loads), strict=True)]
        later = statistics.median(took[options.slow_from + LATER :])
        balanced = later if "given" in name else balanced
        row = [name, f"{statistics.median(took[2 : options.slow_from]):.3f}", f"{later:.3f}"]
        row.append(f"{later / balanced:.2f}" if balanced else "-")
        moves = ", ".join(str(step) for step, one in enumerate(loads[0]) if one[3])
        rows.append([*row, moves, f"{loads[0][-1][2]} : {loads[1][-1][2]}"])
    columns = ["", "s a step", f"from {LATER} on", "of balanced", "moved at", "tokens"]
    title = f"Two ranks, one becomes slow ({way}) in step {options.slow_from}"
    show_table(title, columns, rows, machine, width=120)
    return found


def main() -> None:
    """Measure and print."""
    from ditmesh.launch import RankPool

    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--slow-from", type=int, default=20)
    parser.add_argument("--slow", choices=WAYS, nargs="+", default=["stopped"], help="how rank 1 becomes slow")
    parser.add_argument("--side", type=int, default=exact.SIDE, help="image tokens of a side")
    parser.add_argument("--only", help="contenders whose names begin with this")
    options = parser.parse_args()

    machine = describe_machine()
    figures: dict[str, Any] = {"machine": machine}
    figures |= {"steps": options.steps, "slow from": options.slow_from, "tokens": options.side**2, "ways": {}}
    with RankPool(2, threads=1) as pool:
        for way in options.slow:
            figures["ways"][way] = turn(pool, way, options, machine)
            write_compactly(figures, options.json)


if __name__ == "__main__":
    main()
