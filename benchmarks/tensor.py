"""Tensor parallelism against one rank, in one run.

    python benchmarks/tensor.py                              # a table; wants a quiet machine
    python benchmarks/tensor.py --repeats 9 --json out.json  # and every figure

The model and the method are those of ``sequence.py``: worker processes stay up and take turns, one thread per
rank, and the median of the ratios of neighbours in time counts. The bytes a rank sends in a forward and the
part of the weights it holds are shown beside the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from rich.console import Console
from rich.table import Table

from machine import describe_machine
from sequence import MODEL, SIDE, TEXT, benchmark_inputs, benchmark_model, mesh_of, seconds

# name -> (ranks, configuration; None for plain diffusers)
CONTENDERS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "diffusers, 1 rank": (1, None),
    "ditmesh, 1 rank": (1, {}),
    "tensor=2": (2, {"tensor": 2}),
    "ulysses=2": (2, {"ulysses": 2}),
}
BASELINE = "diffusers, 1 rank"


def figures(config: dict[str, Any] | None) -> dict[str, float]:
    """What one rank sends in a forward, the weights it holds, and its error against the model as it is."""
    import ditmesh

    model, inputs = benchmark_model(), benchmark_inputs()
    with torch.no_grad():
        truth = model(**inputs)[0]
    if config is None:
        return {"sent": 0, "held": 1.0, "error": 0.0}
    whole = sum(p.numel() for p in model.parameters())
    mesh = mesh_of(json.dumps(config))
    with ditmesh.parallelized(model, config, mesh=mesh):
        mesh.traffic.reset()
        with torch.no_grad():
            value = model(**inputs)[0]
        sent = sum(mesh.traffic.bytes_sent.values())
        held = sum(p.numel() for p in model.parameters())
    return {
        "sent": sent,
        "held": held / whole,
        "error": float((value - truth).abs().max() / truth.abs().max()),
    }


def main() -> None:
    """Measure and print."""
    from ditmesh.launch import RankPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--runs", type=int, default=2, help="forwards per repeat; the best counts")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()

    console = Console()
    pools = {ranks: RankPool(ranks, threads=1) for ranks in sorted({c[0] for c in CONTENDERS.values()})}
    beside = {name: pools[ranks].run(figures, config)[0] for name, (ranks, config) in CONTENDERS.items()}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(options.repeats):
        for name, (ranks, config) in CONTENDERS.items():
            # A forward takes as long as the slowest rank.
            times[name].append(max(pools[ranks].run(seconds, config, options.runs)))
    for pool in pools.values():
        pool.close()

    machine = describe_machine()
    ratios = {name: [b / t for b, t in zip(times[BASELINE], times[name], strict=True)] for name in CONTENDERS}
    table = Table(title=f"Flux class, 8 heads x 64, 4 + 8 blocks, {SIDE * SIDE} + {TEXT} tokens, float32, 1 thread")
    for column in ("", "median s", "speed-up, median", "min", "max", "MB sent", "weights held", "error"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in times.items():
        r, more = ratios[name], beside[name]
        table.add_row(
            name,
            f"{statistics.median(values):.3f}",
            f"{statistics.median(r):.3f}x",
            f"{min(r):.3f}",
            f"{max(r):.3f}",
            f"{more['sent'] / 1e6:.1f}",
            f"{100 * more['held']:.1f} %",
            f"{more['error']:.1e}",
        )
    console.print(table)
    console.print(machine["text"])
    if options.json:
        result = {
            "machine": machine,
            "model": MODEL,
            "seconds": times,
            "speedup": {name: statistics.median(r) for name, r in ratios.items()},
            "beside": beside,
        }
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
