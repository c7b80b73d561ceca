"""The exact strategies against one rank, in one run.

    python benchmarks/exact.py                              # a table; wants a quiet machine
    python benchmarks/exact.py --repeats 9 --json out.json  # and every figure

Worker processes stay up for the whole run and take turns: in every repeat each contender draws breath once
and is then timed, so that a ratio compares neighbours in time. The median of the ratios is what counts:
machines drift. Ranks have one thread each; one process with two threads is shown as the limit that two
cores allow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from rich.console import Console
from rich.table import Table

from machine import describe_machine

MODEL = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 4,
    "num_single_layers": 8,
    "attention_head_dim": 64,
    "num_attention_heads": 8,
    "joint_attention_dim": 512,
    "pooled_projection_dim": 256,
    "axes_dims_rope": (16, 24, 24),
}
SIDE, TEXT = 32, 128  # 32 x 32 image tokens, 128 text tokens

# name -> (ranks, threads per rank, configuration; None for plain diffusers)
CONTENDERS: dict[str, tuple[int, int, dict[str, Any] | None]] = {
    "diffusers, 1 rank": (1, 1, None),
    "ditmesh, 1 rank": (1, 1, {}),
    "ulysses=2": (2, 1, {"ulysses": 2}),
    "ring=2": (2, 1, {"ring": 2}),
    "tensor=2": (2, 1, {"tensor": 2}),
    "reproducible, 1 rank": (1, 1, {"reproducible": True}),
    "reproducible, ulysses=2": (2, 1, {"ulysses": 2, "reproducible": True}),
    "reproducible, ring=2": (2, 1, {"ring": 2, "reproducible": True}),
    "diffusers, 1 process x 2 threads": (1, 2, None),
}
BASELINE = "diffusers, 1 rank"


@cache
def benchmark_model() -> torch.nn.Module:
    """The Flux-class benchmark model, random weights, float32."""
    import diffusers

    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(**MODEL).eval()


@cache
def benchmark_inputs() -> dict[str, Any]:
    """Arguments of its forward."""
    from ditmesh.layout.conventions import Conventions, Size, Way

    return Conventions(benchmark_model(), Way("bsc")).inputs(Size(SIDE, SIDE, TEXT, batch=1))


@cache
def mesh_of(config: str) -> Any:
    """The mesh of a configuration, made once."""
    import ditmesh

    return ditmesh.Mesh(ditmesh.ParallelConfig(**json.loads(config)))


def timed_forward(runs: int) -> float:
    """Best time of ``runs`` forwards on this rank as the model stands."""

    def once() -> float:
        if torch.distributed.get_world_size() > 1:
            torch.distributed.barrier()
        start = time.perf_counter()
        with torch.no_grad():
            benchmark_model()(**benchmark_inputs())
        return time.perf_counter() - start

    return min(once() for _ in range(runs))


def seconds(config: dict[str, Any] | None, runs: int) -> float:
    """Best time of ``runs`` forwards on this rank, after one that does not count."""
    import ditmesh

    if config is None:
        timed_forward(1)
        return timed_forward(runs)
    with ditmesh.parallelized(benchmark_model(), config, mesh=mesh_of(json.dumps(config))):
        timed_forward(1)
        return timed_forward(runs)


def show(what: str, times: dict[str, list[float]], baseline: str, out: Path | None) -> None:
    """Print the paired ratios as a table, and the machine; write every figure to ``out`` if it is given."""
    machine = describe_machine()
    ratios = {name: [b / t for b, t in zip(times[baseline], values, strict=True)] for name, values in times.items()}
    table = Table(title=f"Flux class, 8 heads x 64, 4 + 8 blocks, {SIDE * SIDE} + {TEXT} tokens, {what}")
    for column in ("", "median s", "speed-up, median", "min", "max"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in times.items():
        r = ratios[name]
        table.add_row(
            name, f"{statistics.median(values):.3f}", f"{statistics.median(r):.3f}x", f"{min(r):.3f}", f"{max(r):.3f}"
        )
    console = Console()
    console.print(table)
    console.print(machine["text"])
    if out:
        speedup = {name: statistics.median(r) for name, r in ratios.items()}
        out.write_text(json.dumps({"machine": machine, "model": MODEL, "seconds": times, "speedup": speedup}, indent=1))


def main() -> None:
    """Measure and print."""
    from ditmesh.launch import RankPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--runs", type=int, default=2, help="forwards per repeat; the best counts")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()

    pools = {shape: RankPool(shape[0], threads=shape[1]) for shape in sorted({c[:2] for c in CONTENDERS.values()})}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(options.repeats):
        for name, (ranks, threads, config) in CONTENDERS.items():
            times[name].append(max(pools[ranks, threads].run(seconds, config, options.runs)))
    for pool in pools.values():
        pool.close()

    show("float32", times, BASELINE, options.json)


if __name__ == "__main__":
    main()
