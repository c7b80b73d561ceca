"""The exact strategies against one rank, in one run.

    python benchmarks/exact.py                              # a table; wants a quiet machine
    python benchmarks/exact.py --repeats 9 --json out.json  # and every figure
    python benchmarks/exact.py --against ../old/src         # with another version: seconds of this over its, in turns
    python benchmarks/exact.py --stale                      # stale strategies, after one synchronous step
    python benchmarks/exact.py --gather                     # keys gathered on every rank, by heads: four tables

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
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
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
DISPLACED = {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}
STALE = [
    BASELINE,
    Contender("ring=2, exact", 2, {"ring": 2}),
    Contender("displaced, 2 ranks", 2, DISPLACED),
    Contender("displaced, 2 ranks, over gloo", 2, {**DISPLACED, "shared_memory": False}),
    *(Contender(f"displaced, 2 ranks, {kind}", 2, {**DISPLACED, "compress": kind}) for kind in ("fp16", "int8")),
    Contender("naive, 2 ranks (lossy)", 2, {**DISPLACED, "exchange": "naive"}),
    APART,
]
GATHER = [BASELINE, *CONTENDERS[2:4], Contender("ring=2 exchange=gather", 2, {"ring": 2, "exchange": "gather"})]
# Lumina 2, whose four query heads share a key head.
GROUPED = {
    "in_channels": 16,
    "hidden_size": 512,
    "num_layers": 8,
    "num_refiner_layers": 1,
    "num_attention_heads": 8,
    "num_kv_heads": 2,
    "axes_dim_rope": (16, 24, 24),
    "cap_feat_dim": 512,
}


@cache
def benchmark_model(heads: int = 8) -> torch.nn.Module:
    """The Flux-class benchmark model, random weights, float32; with 0 heads one with grouped-query attention."""
    import diffusers

    torch.manual_seed(0)
    if not heads:
        return diffusers.Lumina2Transformer2DModel(**GROUPED).eval()
    return diffusers.FluxTransformer2DModel(**{**MODEL, "num_attention_heads": heads}).eval()


def grouped_inputs() -> dict[str, Any]:
    """Arguments of the forward of the model with grouped-query attention."""
    torch.manual_seed(0)
    return {
        "hidden_states": torch.randn(1, GROUPED["in_channels"], 2 * SIDE, 2 * SIDE),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": torch.randn(1, TEXT, GROUPED["cap_feat_dim"]),
        "encoder_attention_mask": torch.ones(1, TEXT, dtype=torch.bool),
    }


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


def timed_forward(model: torch.nn.Module, inputs: dict[str, Any]) -> float:
    """Seconds of a forward on this rank as the model stands."""
    if torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()
    start = time.perf_counter()
    with torch.no_grad():
        model(**inputs)
    return time.perf_counter() - start


def seconds(config: dict[str, Any] | None, runs: int, heads: int = 8) -> float:
    """Best time of ``runs`` forwards on this rank, after one that does not count; of stale ones after two."""
    import ditmesh

    model, inputs = benchmark_model(heads), benchmark_inputs() if heads else grouped_inputs()
    before = 2 if config and "warmup" in config else 1
    with nullcontext() if config is None else ditmesh.parallelized(model, config):
        if before > 1:
            ditmesh.engine_of(model).begin_request(runs + before)
        # Another timestep every time: a new step.
        steps = ({**inputs, "timestep": inputs["timestep"] * (1 - 0.01 * step)} for step in range(runs + before))
        return min([timed_forward(model, step) for step in steps][before:])


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
        f"Flux class, heads of 64, 4 + 8 blocks, {SIDE * SIDE} + {TEXT} tokens, {what}",
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
        options: of `arguments`, with ``against``; every figure is written to ``options.json`` if it is given.
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


def arguments(description: str | None, other: bool = False) -> argparse.Namespace:
    """What `compare` is told on the command line, or with ``other`` `compare_versions`."""
    parser = command_line(description)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--runs", type=int, default=2, help="forwards per repeat; the best counts")
    parser.add_argument("--only", nargs="*", help="contenders to run besides the baseline")
    if other:
        against_option(parser)
        parser.add_argument("--stale", action="store_true", help="stale strategies in place of the exact ones")
        parser.add_argument("--gather", action="store_true", help="gathered keys; each table has a file of its own")
    return parser.parse_args()


def main() -> None:
    """Measure, print a table, write the figures."""
    options = arguments(__doc__, other=True)
    if options.serve:
        serve({"seconds": seconds})
    elif options.against:
        compare_versions(CONTENDERS, __file__, options)
    elif options.gather:
        file = options.json
        for heads in (8, 6, 5, 0):
            options.json = file and file.with_suffix(f".{heads or 'grouped'}.json")
            what = f"{heads} heads" if heads else "8 heads, 2 key heads (Lumina 2 class)"
            compare(GATHER, partial(seconds, heads=heads), f"float32; {what}", options)
    else:
        compare(STALE if options.stale else CONTENDERS, seconds, "8 heads, float32", options)


if __name__ == "__main__":
    main()
