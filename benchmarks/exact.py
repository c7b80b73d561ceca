"""The exact strategies against one rank, in one run.

    python benchmarks/exact.py                              # a table; wants a quiet machine
    python benchmarks/exact.py --repeats 9 --json out.json  # and every figure

Worker processes stay up for the whole run and take turns: in every repeat each contender draws breath once
and is then timed, so that a ratio compares neighbours in time. The median of the ratios is what counts:
machines drift. Ranks have one thread each. The last lines show what the machine allows while it is measured: one
process with two threads, and two processes that have nothing to do with one another.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import command_line, paired_ratios, ratio_cells, show_table, write_figures
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


@dataclass(frozen=True)
class Contender:
    """One line of a table.

    Attributes:
        name: what it is called.
        ranks: worker processes.
        config: settings of its `ParallelConfig`; None for plain diffusers.
        threads: of every process.
        pictures: forwards that are done at once: more than one when the ranks work apart.
    """

    name: str
    ranks: int
    config: dict[str, Any] | None
    threads: int = 1
    pictures: int = 1


BASELINE = Contender("diffusers, 1 rank", 1, None)
APART = Contender("diffusers, 2 ranks that work apart", 2, None, pictures=2)
CONTENDERS = [
    BASELINE,
    Contender("ditmesh, 1 rank", 1, {}),
    Contender("ulysses=2", 2, {"ulysses": 2}),
    Contender("ring=2", 2, {"ring": 2}),
    Contender("tensor=2", 2, {"tensor": 2}),
    Contender("ulysses=2, over gloo", 2, {"ulysses": 2, "shared_memory": False}),
    Contender("ring=2, over gloo", 2, {"ring": 2, "shared_memory": False}),
    Contender("reproducible, 1 rank", 1, {"reproducible": True}),
    Contender("reproducible, ulysses=2", 2, {"ulysses": 2, "reproducible": True}),
    Contender("reproducible, ring=2", 2, {"ring": 2, "reproducible": True}),
    Contender("diffusers, 1 process x 2 threads", 1, None, threads=2),
    APART,
]


@cache
def benchmark_model() -> torch.nn.Module:
    """The Flux-class benchmark model, random weights, float32."""
    import diffusers

    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(**MODEL).eval()


@cache
def benchmark_inputs(batch: int = 1, side: int = SIDE) -> dict[str, Any]:
    """Arguments of its forward, for side x side image tokens."""
    from ditmesh.layout.conventions import CallVariant, Conventions, Size

    return Conventions(benchmark_model(), CallVariant("bsc")).inputs(Size(side, side, TEXT, batch=batch))


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
    with ditmesh.parallelized(benchmark_model(), config):
        timed_forward(1)
        return timed_forward(runs)


def compare(
    contenders: Sequence[Contender], seconds: Callable[..., float], what: str, options: argparse.Namespace
) -> None:
    """Let contenders take turns, print the paired ratios as a table, and the machine.

    Args:
        contenders: the first is the baseline.
        seconds: runs on every rank with a contender's config and ``options.runs``; gives seconds of a forward.
        what: ends the table's title.
        options: of `arguments`; every figure is written to ``options.json`` if it is given.
    """
    from ditmesh.launch import RankPool

    if options.only:
        contenders = [one for one in contenders if one is contenders[0] or one.name in options.only]
    pools = {
        shape: RankPool(shape[0], threads=shape[1]) for shape in sorted({(c.ranks, c.threads) for c in contenders})
    }
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(options.repeats):
        for one in contenders:
            slowest = max(pools[one.ranks, one.threads].run(seconds, one.config, options.runs))
            times[one.name].append(slowest / one.pictures)
    for pool in pools.values():
        pool.close()

    machine = describe_machine()
    baseline = times[contenders[0].name]
    ratios = {name: paired_ratios(baseline, values) for name, values in times.items()}
    show_table(
        f"Flux class, 8 heads x 64, 4 + 8 blocks, {SIDE * SIDE} + {TEXT} tokens, {what}",
        ["", "median s", "speed-up, median", "min", "max"],
        [[name, f"{statistics.median(values):.3f}", *ratio_cells(ratios[name])] for name, values in times.items()],
        machine,
    )
    speedup = {name: statistics.median(r) for name, r in ratios.items()}
    result = {"machine": machine, "model": MODEL, "seconds": times, "speedup": speedup}
    write_figures(result, options.json)


def arguments(description: str | None) -> argparse.Namespace:
    """What `compare` is told on the command line."""
    parser = command_line(description)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--runs", type=int, default=2, help="forwards per repeat; the best counts")
    parser.add_argument("--only", nargs="*", help="contenders to run besides the baseline")
    return parser.parse_args()


if __name__ == "__main__":
    compare(CONTENDERS, seconds, "float32", arguments(__doc__))
