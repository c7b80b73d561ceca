"""The exact strategies against one rank, in one run.

    python benchmarks/exact.py                              # a table; wants a quiet machine
    python benchmarks/exact.py --repeats 9 --json out.json  # and every figure
    python benchmarks/exact.py --heads 5                    # which two ranks cannot share evenly
    python benchmarks/exact.py --against ../old/src         # with another version: seconds of this over its, in turns

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
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import (
    Version,
    against_option,
    command_line,
    in_turns,
    paired_ratios,
    ratio_cells,
    serve,
    show_table,
    versions,
    write_figures,
)
from machine import describe_machine

MODEL: dict[str, Any] = {
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
    Contender("ring=2 exchange=gather", 2, {"ring": 2, "exchange": "gather"}),
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
def benchmark_model(heads: int = MODEL["num_attention_heads"]) -> torch.nn.Module:
    """The Flux-class benchmark model, random weights, float32."""
    import diffusers

    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(**MODEL | {"num_attention_heads": heads}).eval()


@cache
def benchmark_inputs(batch: int = 1, side: int = SIDE) -> dict[str, Any]:
    """Arguments of its forward, for side x side image tokens, made without ditmesh: versions get the same ones."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return {
        "hidden_states": torch.randn(batch, side * side, MODEL["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT, MODEL["joint_attention_dim"], generator=generator),
        "pooled_projections": torch.randn(batch, MODEL["pooled_projection_dim"], generator=generator),
        "timestep": torch.full((batch,), 500.0),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float(),
        "txt_ids": torch.zeros(TEXT, 3),
        "return_dict": False,
    }


def timed_forward(model: torch.nn.Module, inputs: dict[str, Any], runs: int) -> float:
    """Best time of ``runs`` forwards on this rank as the model stands."""

    def once() -> float:
        if torch.distributed.get_world_size() > 1:
            torch.distributed.barrier()
        start = time.perf_counter()
        with torch.no_grad():
            model(**inputs)
        return time.perf_counter() - start

    return min(once() for _ in range(runs))


def seconds(config: dict[str, Any] | None, runs: int, heads: int = MODEL["num_attention_heads"]) -> float:
    """Best time of ``runs`` forwards of the benchmark model on this rank, after one that does not count."""
    import ditmesh

    model, inputs = benchmark_model(heads), benchmark_inputs()
    with nullcontext() if config is None else ditmesh.parallelized(model, config):
        timed_forward(model, inputs, 1)
        return timed_forward(model, inputs, runs)


def compare(contenders: Sequence[Contender], options: argparse.Namespace) -> None:
    """Let contenders take turns, the first of which is the baseline, and print the paired ratios as a table."""
    from ditmesh.launch import RankPool

    if options.only:
        contenders = [one for one in contenders if one is contenders[0] or one.name in options.only]
    pools = {
        shape: RankPool(shape[0], threads=shape[1]) for shape in sorted({(c.ranks, c.threads) for c in contenders})
    }
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(options.repeats):
        for one in contenders:
            slowest = max(pools[one.ranks, one.threads].run(seconds, one.config, options.runs, options.heads))
            times[one.name].append(slowest / one.pictures)
    for pool in pools.values():
        pool.close()

    machine = describe_machine()
    baseline = times[contenders[0].name]
    ratios = {name: paired_ratios(baseline, values) for name, values in times.items()}
    show_table(
        f"Flux class, {options.heads} heads x 64, 4 + 8 blocks, {SIDE * SIDE} + {TEXT} tokens, float32",
        ["", "median s", "speed-up, median", "min", "max"],
        [[name, f"{statistics.median(values):.3f}", *ratio_cells(ratios[name])] for name, values in times.items()],
        machine,
    )
    speedup = {name: statistics.median(r) for name, r in ratios.items()}
    result = {"machine": machine, "model": MODEL, "seconds": times, "speedup": speedup}
    write_figures(result, options.json)


def compare_versions(contenders: Sequence[Contender], script: str, options: argparse.Namespace) -> None:
    """Let two versions take turns contender by contender, and print the ratios of their seconds, this over that.

    Args:
        contenders: which.
        script: the benchmark, which serves `seconds`.
        options: of the command line, with ``against``; every figure is written to ``options.json`` if it is given.
    """
    contenders = [one for one in contenders if not options.only or one.name in options.only]
    times: dict[str, dict[str, list[float]]] = {}
    with versions(script, options.against) as processes:
        for turn in range(options.repeats):
            for one in contenders:
                for name in in_turns([*processes], turn):
                    entry = times.setdefault(one.name, {}).setdefault(name, [])
                    entry.append(_slowest(processes[name], one, options.runs))
    machine = describe_machine()
    ratios = {name: paired_ratios(entry["this"], entry["that"]) for name, entry in times.items()}
    medians = {name: [statistics.median(entry[which]) for which in ("that", "this")] for name, entry in times.items()}
    show_table(
        f"Flux class, 8 heads x 64, 4 + 8 blocks, {SIDE * SIDE} + {TEXT} tokens, float32: this version over that one",
        ["", "that, median s", "this, median s", "this / that, median", "min", "max"],
        [[name, *(f"{each:.3f}" for each in medians[name]), *ratio_cells(ratios[name])] for name in times],
        machine,
    )
    ratio = {name: statistics.median(r) for name, r in ratios.items()}
    write_figures({"machine": machine, "model": MODEL, "seconds": times, "ratio": ratio}, options.json)


def _slowest(version: Version, one: Contender, runs: int) -> float:
    return max(version.ask("seconds", one.ranks, one.threads, one.config, runs)) / one.pictures


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--runs", type=int, default=2, help="forwards per repeat; the best counts")
    parser.add_argument("--heads", type=int, default=MODEL["num_attention_heads"], help="of the model, each of 64")
    parser.add_argument("--only", nargs="*", help="contenders to run besides the baseline")
    against_option(parser)
    options = parser.parse_args()
    if options.serve:
        serve({"seconds": seconds})
    elif options.against:
        compare_versions(CONTENDERS, __file__, options)
    else:
        compare(CONTENDERS, options)


if __name__ == "__main__":
    main()
