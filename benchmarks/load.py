"""Work and waiting of every rank in every step of a request, on real ranks; `moving.py` has ranks that slow down.

    python benchmarks/load.py --json benchmarks/measured/load.json

`emoji-dit-s`, four pictures in one request, DDIM; ranks have one thread each, and the second request counts. Of every
rank and step: seconds by the clock, those inside collectives (sending and waiting), and processor seconds outside of
them, which other work on the machine hardly changes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import command_line, write_figures
from machine import describe_machine

MODEL, PROMPTS, STEPS = "emoji-dit-s", ("fox", "owl", "rose", "rocket"), 16
STALE = {"exchange": "displaced", "warmup": "fixed(1)"}
CASES: dict[str, dict[str, Any]] = {
    "ring, N = 2": {"ring": 2},
    "displaced, N = 2": {"ring": 2, **STALE},
    "displaced, N = 4": {"ring": 4, **STALE},
    "PipeFusion, 2 stages, 4 patches": {"pipe": 2, "patches": 4, "warmup": "fixed(1)"},
}


def setup_and_cell(steps: int) -> tuple[Any, Any]:
    """What is asked for, as a study has it."""
    from ditmesh import zoo
    from ditmesh.generate.job import class_numbers
    from ditmesh.generate.model_info import find_model
    from ditmesh.lab.study.plan import Cell, Setup

    folder, known = zoo.path(MODEL), zoo.EMBEDDED[MODEL]
    setup = Setup(str(folder), MODEL, "", steps, known.guidance_scale)
    labels = class_numbers(PROMPTS, find_model(folder))
    return setup, Cell("ddim", PROMPTS, tuple(range(len(PROMPTS))), tuple(labels))


def rank(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """One rank's times."""
    from ditmesh.engine import engine_of, parallelize, restore
    from ditmesh.lab.study import running
    from ditmesh.lab.study.samplers import set_sampler

    setup, cell = setup_and_cell(steps)
    pipe = running.load_study_pipeline(setup)
    set_sampler(pipe, cell.sampler, pipe.scheduler)
    parallelize(pipe, config)
    try:
        running.run_cell(pipe, setup, cell)
        _, times = running.timed_request(pipe, setup, cell, engine_of(pipe).mesh)
        return times
    finally:
        restore(pipe)


def show(name: str, ranks: list[dict[str, Any]]) -> None:
    """Print a case. The first step is synchronous, and warms up."""
    print(f"\n{name}")
    for number, each in enumerate(ranks):
        steps = each["steps"][1:]
        mean = {what: 1e3 * sum(step[what] for step in steps) / len(steps) for what in steps[0]}
        print(
            f"  rank {number}: {mean['seconds']:.1f} ms a step, {mean['in_collectives']:.1f} in collectives, "
            f"{mean['work_processor']:.1f} of processor; {each['bytes_sent'] / 1e6:.1f} MB",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    from ditmesh.config import ParallelConfig
    from ditmesh.launch import RankPool

    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"machine": describe_machine(), "steps": options.steps, "cases": {}}
    for name, config in CASES.items():
        with RankPool(ParallelConfig(**config).world_size, "cpu", threads=1) as pool:
            ranks = pool.run(rank, config, options.steps)
        figures["cases"][name] = {"config": config, "ranks": ranks}
        show(name, ranks)
        write_figures(figures, options.json)
    print(f"\n{figures['machine']['text']}")


if __name__ == "__main__":
    main()
