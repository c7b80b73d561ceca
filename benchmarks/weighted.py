"""Weighted splits on uneven ranks, in one run: two ranks, one of which shares its core with a busy neighbour.

    python benchmarks/weighted.py [--repeats 7] [--json out.json]

Rank 0 has a core of its own; rank 1's core also runs an endless loop, so that it computes at about half the
speed. Contenders take turns within every repeat, and the median of the ratios counts.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


import exact
from harness import command_line, paired_ratios, ratio_cells, show_table, write_figures
from machine import describe_machine

CONTENDERS: dict[str, dict[str, Any]] = {
    "ring=2, even": {"ring": 2},
    "ring=2, speeds=2,1": {"ring": 2, "speeds": (2, 1)},
    "ring=2, speeds=auto": {"ring": 2, "speeds": "auto"},
    "ulysses=2, even": {"ulysses": 2},
    "ulysses=2, speeds=2,1": {"ulysses": 2, "speeds": (2, 1)},
    "ulysses=2, speeds=auto": {"ulysses": 2, "speeds": "auto"},
    "reproducible ulysses=2, even": {"ulysses": 2, "reproducible": True},
    "reproducible ulysses=2, speeds=2,1": {"ulysses": 2, "speeds": (2, 1), "reproducible": True},
}


def spin(core: int) -> None:
    """The neighbour: never rests."""
    os.sched_setaffinity(0, {core})
    while True:
        pass


def seconds(config: dict[str, Any], runs: int) -> tuple[float, tuple[float, ...]]:
    """Best time of some forwards on this rank, pinned to its core; and the speeds in force."""
    import torch

    import ditmesh

    os.sched_setaffinity(0, {torch.distributed.get_rank()})
    model = exact.benchmark_model()
    with ditmesh.parallelized(model, config), torch.no_grad():
        model(**exact.benchmark_inputs())
        speeds = ditmesh.engine_of(model).balances[0].speeds
        return exact.timed_forward(runs), speeds


def main() -> None:
    """Measure and print."""
    from ditmesh.launch import RankPool

    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--runs", type=int, default=2, help="forwards per repeat; the best counts")
    options = parser.parse_args()

    neighbour = multiprocessing.get_context("spawn").Process(target=spin, args=(1,), daemon=True)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    speeds: dict[str, tuple[float, ...]] = {}
    with RankPool(2, threads=1) as pool:
        neighbour.start()
        try:
            for _ in range(options.repeats):
                for name, config in CONTENDERS.items():
                    results = pool.run(seconds, config, options.runs)
                    times[name].append(max(result[0] for result in results))
                    speeds[name] = results[0][1]
        finally:
            neighbour.kill()

    machine = describe_machine()
    rows, speedup = [], {}
    for name, values in times.items():
        ratios = paired_ratios(times[name.split(",")[0] + ", even"], values)
        speedup[name] = statistics.median(ratios)
        given = ", ".join(f"{speed:g}" for speed in speeds[name])
        rows.append([name, given, f"{statistics.median(values):.3f}", *ratio_cells(ratios)])
    columns = ["", "speeds", "median s", "against the even split, median", "min", "max"]
    show_table("Two ranks, one at half speed", columns, rows, machine)
    result = {"machine": machine, "seconds": times, "speedup": speedup, "speeds": speeds}
    write_figures(result, options.json)


if __name__ == "__main__":
    main()
