"""What it costs a picture that Ray started the ranks: its actors against the local pool, in turns.

    python benchmarks/ray_overhead.py                             # a table; wants a quiet machine, and pip install ray
    python benchmarks/ray_overhead.py --turns 40 --json out.json  # and every figure
    python benchmarks/ray_overhead.py --address 10.0.0.1:6379     # of a cluster that is there

Two ranks of each, with one thread, stay up, hold the embedded model, and draw one picture a turn with the same seeds;
who begins changes from turn to turn. What counts is the median, over the turns, of the ratio of the seconds from the
call to the picture in this process; the start is left out. The target is 2 % at most. The processor's seconds are of
the ranks alone. The pictures have to be the same to the bit.
"""

from __future__ import annotations

import argparse
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

from harness import command_line, write_figures

TARGET = 0.02
CONFIG = {"ulysses": 2}
NAMES = ("local", "ray")
# Of a turn: seconds in this process, of the slower rank, and of the ranks' processors.
KINDS = ("seconds", "rank", "processor")


@cache
def pipeline() -> Any:
    """The embedded model, on the ranks."""
    import ditmesh
    from ditmesh.generate.runner import quieten

    quieten()
    pipe = ditmesh.load("emoji-sd3", CONFIG)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(steps: int, seed: int) -> tuple[float, float, bytes]:
    """What a rank does in a turn: its seconds, its processor's, and on the first one the pixels."""
    import torch.distributed as dist

    pipe, generator = pipeline(), torch.Generator().manual_seed(seed)
    began, busy = time.perf_counter(), time.process_time()
    image = pipe("a red fox", num_inference_steps=steps, generator=generator).images[0]
    took, busy = time.perf_counter() - began, time.process_time() - busy
    return took, busy, image.tobytes() if dist.get_rank() == 0 else b""


def turn(ranks: Any, steps: int, seed: int) -> tuple[dict[str, float], bytes]:
    """One picture of some ranks."""
    # The ranks know this file as a module; as a program it has no name to them.
    import ray_overhead

    began = time.perf_counter()
    every = ranks.run(ray_overhead.picture, steps, seed)
    seconds = time.perf_counter() - began
    of_ranks = {"rank": max(one[0] for one in every), "processor": sum(one[1] for one in every)}
    return {"seconds": seconds, **of_ranks}, every[0][2]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every figure."""
    from ditmesh.launch import launcher
    from machine import describe_machine

    ray = "ray" if options.address is None else f"ray@{options.address}"
    turns: list[dict[str, dict[str, float]]] = []
    started: dict[str, float] = {}
    with launcher("local", 2, "cpu", 1) as local:
        began = time.perf_counter()
        with launcher(ray, 2, "cpu", 1) as actors:
            started["ray"] = time.perf_counter() - began
            of = {"local": local, "ray": actors}
            for number in range(-options.warm, options.turns):
                made = {name: turn(of[name], options.steps, number) for name in (NAMES if number % 2 else NAMES[::-1])}
                if made["local"][1] != made["ray"][1]:
                    raise SystemExit(f"turn {number}: the pictures differ")
                if number >= 0:
                    turns.append({name: figures for name, (figures, _) in made.items()})
    ratios = {kind: [one["ray"][kind] / one["local"][kind] for one in turns] for kind in KINDS}
    return {
        "machine": describe_machine(),
        "steps": options.steps,
        "start_seconds": started,
        "turns": turns,
        "median": {
            name: {kind: statistics.median(one[name][kind] for one in turns) for kind in KINDS} for name in NAMES
        },
        "ratio": {kind: statistics.median(found) for kind, found in ratios.items()},
        "range": {kind: [min(found), max(found)] for kind, found in ratios.items()},
        "target": 1 + TARGET,
        "reached": statistics.median(ratios["seconds"]) <= 1 + TARGET,
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title=f"one picture of {result['steps']} steps on 2 ranks, median of {len(result['turns'])} turns")
    for column in ("", "local, s", "Ray, s", "ratio", "min", "max"):
        table.add_column(column, justify="left" if not column else "right")
    shown = {"seconds": "from call to picture", "rank": "on the slower rank", "processor": "processor, both ranks"}
    for kind, name in shown.items():
        seconds = [f"{result['median'][of][kind]:.3f}" for of in NAMES]
        table.add_row(name, *seconds, *(f"{one:.4f}" for one in (result["ratio"][kind], *result["range"][kind])))
    console = Console(width=120)
    console.print(table)
    said = "reached" if result["reached"] else "missed"
    console.print(
        f"target: {result['target']:g} from call to picture, {said}; Ray took "
        f"{result['start_seconds']['ray']:.1f} s to start"
    )
    console.print(result["machine"]["text"])


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--turns", type=int, default=20, help="pictures of each that count")
    parser.add_argument("--warm", type=int, default=2, help="turns before those, that do not count")
    parser.add_argument("--steps", type=int, default=12, help="denoising steps of a picture")
    parser.add_argument("--address", help="of the cluster; default: RAY_ADDRESS, or one on this machine")
    options = parser.parse_args()
    result = measure(options)
    show(result)
    write_figures(result, options.json)


if __name__ == "__main__":
    main()
