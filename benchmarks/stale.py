"""Stale strategies against one rank and against exact ones, in one run.

    python benchmarks/stale.py                              # a table; wants a quiet machine
    python benchmarks/stale.py --repeats 9 --json out.json  # and every figure

Model and manner are those of `exact.py`: worker processes stay up and take turns, ratios are formed between
neighbours in time, and the median of the ratios is what counts. Every forward is a denoising step of its own, with a
timestep of its own; what is timed are stale steps, after one synchronous step that does not count. The last line
shows what the machine allows: as many processes that have nothing to do with one another.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exact import benchmark_inputs, benchmark_model, mesh_of, show


@dataclass(frozen=True)
class Contender:
    """One line of the table.

    Attributes:
        name: what it is called.
        ranks: worker processes, one thread each.
        config: settings of its `ParallelConfig`; None for plain diffusers.
        pictures: forwards that are done at once: more than one when the ranks work apart.
    """

    name: str
    ranks: int
    config: dict[str, Any] | None
    pictures: int = 1


DISPLACED = {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}
BASELINE = Contender("diffusers, 1 rank", 1, None)
CONTENDERS = [
    BASELINE,
    Contender("ring=2, exact", 2, {"ring": 2}),
    Contender("displaced, 2 ranks", 2, DISPLACED),
    Contender("displaced, 2 ranks, fp16", 2, {**DISPLACED, "compress": "fp16"}),
    Contender("displaced, 2 ranks, int8", 2, {**DISPLACED, "compress": "int8"}),
    Contender("naive, 2 ranks (lossy)", 2, {**DISPLACED, "exchange": "naive"}),
    Contender("diffusers, 2 ranks that work apart", 2, None, pictures=2),
]


def seconds(config: dict[str, Any] | None, runs: int) -> float:
    """Best time of ``runs`` forwards on this rank, after two that do not count."""
    import ditmesh

    model, inputs = benchmark_model(), benchmark_inputs()
    calls = 0

    def timed() -> float:
        nonlocal calls
        # Another timestep every time: a new step.
        calls += 1
        made = {**inputs, "timestep": inputs["timestep"] * (1 - 0.01 * calls)}
        if torch.distributed.get_world_size() > 1:
            torch.distributed.barrier()
        start = time.perf_counter()
        with torch.no_grad():
            model(**made)
        return time.perf_counter() - start

    def best() -> float:
        timed()
        timed()
        return min(timed() for _ in range(runs))

    if config is None:
        return best()
    with ditmesh.parallelized(model, config, mesh=mesh_of(json.dumps(config))):
        ditmesh.engine_of(model).begin_request(runs + 2)
        return best()


def main() -> None:
    """Measure and print."""
    from ditmesh.launch import RankPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--runs", type=int, default=2, help="steps per repeat; the best counts")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()

    pools = {ranks: RankPool(ranks, threads=1) for ranks in sorted({contender.ranks for contender in CONTENDERS})}
    times: dict[str, list[float]] = {contender.name: [] for contender in CONTENDERS}
    for _ in range(options.repeats):
        for contender in CONTENDERS:
            slowest = max(pools[contender.ranks].run(seconds, contender.config, options.runs))
            times[contender.name].append(slowest / contender.pictures)
    for pool in pools.values():
        pool.close()

    show("float32: one step", times, BASELINE.name, options.json)


if __name__ == "__main__":
    main()
