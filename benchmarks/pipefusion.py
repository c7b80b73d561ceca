"""Stale strategies against one rank, in one run: seconds a stale step; of PipeFusion also with filling and draining.

    python benchmarks/pipefusion.py                              # a table; wants a quiet machine
    python benchmarks/pipefusion.py --repeats 9 --json out.json  # and every figure

The model and its inputs are those of ``benchmarks/exact.py``. A request is one synchronous step and then
``--steps`` stale ones with an Euler step between them. Worker processes stay up for the whole run and take turns, so
that a ratio compares neighbours in time; the median of the ratios is what counts. Ranks have one thread each. The
last column compares seconds of processor time of the busiest rank: what the speed-up would be if nobody waited.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from exact import SIDE, TEXT, benchmark_inputs, benchmark_model
from harness import command_line, paired_ratios, ratio_cells, show_table, write_figures
from machine import describe_machine

# name -> (ranks, configuration; None for plain diffusers)
CONTENDERS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "diffusers, 1 rank": (1, None),
    "patches=4, 1 rank": (1, {"patches": 4, "warmup": "fixed(1)"}),
    "pipe=2, patches=2": (2, {"pipe": 2, "patches": 2, "warmup": "fixed(1)"}),
    "pipe=2, patches=4": (2, {"pipe": 2, "patches": 4, "warmup": "fixed(1)"}),
    "pipe=2, patches=8": (2, {"pipe": 2, "patches": 8, "warmup": "fixed(1)"}),
    "displaced": (2, {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}),
    "displaced, int8": (2, {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)", "compress": "int8"}),
    "naive (lossy)": (2, {"ring": 2, "exchange": "naive", "warmup": "fixed(1)"}),
}
BASELINE = "diffusers, 1 rank"


def denoise(
    inputs: dict[str, Any], steps: int, begins: Callable[[int], None], ends: Callable[[int], None] = lambda step: None
) -> None:
    """One step, then ``steps`` more with Euler's rule between them, and the whole picture; calls back around each."""
    model, latents = benchmark_model(), inputs["hidden_states"]
    with torch.no_grad():
        for step in range(steps + 1):
            begins(step)
            timestep = torch.full_like(inputs["timestep"], 1.0 - step / (steps + 1))
            prediction = model(**{**inputs, "hidden_states": latents, "timestep": timestep})[0]
            latents = latents - prediction / (steps + 1)
            ends(step)
        float(latents.sum())


def timed_request(inputs: dict[str, Any], steps: int) -> tuple[float, float, float]:
    """One synchronous step, then ``steps`` stale ones: seconds a step with full stages, of all, of the processor.

    Stages are full in the first half, which ends when its last prediction is asked for: the first stage does that one
    step later. All ends when the picture is whole.
    """
    start = middle = busy = 0.0

    def begins(step: int) -> None:
        nonlocal start, middle, busy
        if step == 1:
            if torch.distributed.get_world_size() > 1:
                torch.distributed.barrier()
            start, busy = time.perf_counter(), time.process_time()
        if step == 1 + steps // 2:
            middle = time.perf_counter()

    denoise(inputs, steps, begins)
    whole, busy = time.perf_counter() - start, time.process_time() - busy
    return (middle - start) / (steps // 2), whole / steps, busy / steps


def seconds(config: dict[str, Any] | None, steps: int) -> tuple[float, float, float]:
    """Seconds a step with full stages, on the whole, and of this rank's processor."""
    import ditmesh

    model, inputs = benchmark_model(), benchmark_inputs()
    if config is None:
        return timed_request(inputs, steps)
    with ditmesh.parallelized(model, config):
        timed_request(inputs, 2)
        ditmesh.engine_of(model).begin_request()
        return timed_request(inputs, steps)


def main() -> None:
    """Measure and print."""
    from ditmesh.launch import RankPool

    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="stale steps of a request")
    parser.add_argument("--only", nargs="*", help="contenders to run besides the baseline")
    options = parser.parse_args()

    contenders = {
        name: value for name, value in CONTENDERS.items() if not options.only or name in (BASELINE, *options.only)
    }
    pools = {ranks: RankPool(ranks, threads=1) for ranks in sorted({c[0] for c in contenders.values()})}
    full: dict[str, list[float]] = {name: [] for name in contenders}
    whole: dict[str, list[float]] = {name: [] for name in contenders}
    busy: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.repeats):
        for name, (ranks, config) in contenders.items():
            results = pools[ranks].run(seconds, config, options.steps)
            full[name].append(max(result[0] for result in results))
            whole[name].append(max(result[1] for result in results))
            busy[name].append(max(result[2] for result in results))
    for pool in pools.values():
        pool.close()

    machine = describe_machine()
    rows = []
    for name in contenders:
        overall, processor = (
            f"{statistics.median(paired_ratios(times[BASELINE], times[name])):.3f}x" for times in (whole, busy)
        )
        ratios = ratio_cells(paired_ratios(full[BASELINE], full[name]))
        rows.append([name, f"{statistics.median(full[name]):.3f}", *ratios, overall, processor])
    show_table(
        f"Flux class, 8 heads x 64, 4 + 8 blocks, {SIDE * SIDE} + {TEXT} tokens, float32",
        ["", "s a step", "full stages", "min", "max", "with fill and drain", "processor"],
        rows,
        machine,
    )
    result = {"machine": machine, "full": full, "whole": whole, "processor": busy, "steps": options.steps}
    write_figures(result, options.json)


if __name__ == "__main__":
    main()
