"""Stale strategies against one rank and against exact ones, in one run.

    python benchmarks/stale.py                              # a table; wants a quiet machine
    python benchmarks/stale.py --repeats 9 --json out.json  # and every figure

Model and manner are those of `exact.py`: worker processes stay up and take turns, ratios are formed between
neighbours in time, and the median of the ratios is what counts. Every forward is a denoising step of its own, with a
timestep of its own; what is timed are stale steps, after one synchronous step that does not count. The last line
shows what the machine allows: as many processes that have nothing to do with one another.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from exact import APART, BASELINE, Contender, arguments, benchmark_inputs, benchmark_model, compare

DISPLACED = {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}
CONTENDERS = [
    BASELINE,
    Contender("ring=2, exact", 2, {"ring": 2}),
    Contender("displaced, 2 ranks", 2, DISPLACED),
    Contender("displaced, 2 ranks, over gloo", 2, {**DISPLACED, "shared_memory": False}),
    Contender("displaced, 2 ranks, fp16", 2, {**DISPLACED, "compress": "fp16"}),
    Contender("displaced, 2 ranks, int8", 2, {**DISPLACED, "compress": "int8"}),
    Contender("naive, 2 ranks (lossy)", 2, {**DISPLACED, "exchange": "naive"}),
    APART,
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
    with ditmesh.parallelized(model, config):
        ditmesh.engine_of(model).begin_request(runs + 2)
        return best()


if __name__ == "__main__":
    compare(CONTENDERS, seconds, "float32: one step", arguments(__doc__))
