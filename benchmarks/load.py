"""Work and waiting of every rank in every step of a request, on real ranks; and of a rank that slows down.

    python benchmarks/load.py --json benchmarks/measured/load.json
    python benchmarks/load.py --only slow --config '{"ring": 2, "speeds": "auto"}'   # any configuration more

`emoji-dit-s`, four pictures in one request, DDIM; ranks have one thread each, and the second request counts. Of every
rank and step: seconds by the clock, those inside collectives (sending and waiting), and processor seconds outside of
them, which other work on the machine hardly changes. The slow rank is the last one: from the middle of the request on
it sleeps in every block, as a device that is throttled or shared would be late.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import command_line, write_figures
from machine import describe_machine

MODEL, PROMPTS, STEPS = "emoji-dit-s", ("fox", "owl", "rose", "rocket"), 16
# Seconds that the slow rank sleeps in a block.
SLEEP = 0.01
STALE = {"exchange": "displaced", "warmup": "fixed(1)"}
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "ring, N = 2": ({"ring": 2}, False),
    "displaced, N = 2": ({"ring": 2, **STALE}, False),
    "displaced, N = 4": ({"ring": 4, **STALE}, False),
    "PipeFusion, 2 stages, 4 patches": ({"pipe": 2, "patches": 4, "warmup": "fixed(1)"}, False),
    "ring, N = 2, rank 1 slows down": ({"ring": 2}, True),
    "displaced, N = 2, rank 1 slows down": ({"ring": 2, **STALE}, True),
    "displaced, N = 2, speeds=auto, rank 1 slows down": ({"ring": 2, **STALE, "speeds": "auto"}, True),
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


def rank(config: dict[str, Any], slows: bool, steps: int) -> dict[str, Any]:
    """One rank's times."""
    import torch.distributed as dist

    from ditmesh.engine import engine_of, parallelize, restore
    from ditmesh.lab.study import running
    from ditmesh.lab.study.samplers import set_sampler

    setup, cell = setup_and_cell(steps)
    pipe = running.load_study_pipeline(setup)
    set_sampler(pipe, cell.sampler, pipe.scheduler)
    parallelize(pipe, config)
    calls, slow = [0], slows and dist.get_rank() == dist.get_world_size() - 1

    def late(*_: Any) -> None:
        if slow and calls[0] > steps // 2:
            time.sleep(SLEEP)

    def counted(*_: Any) -> None:
        calls[0] += 1

    hooks = [block.register_forward_pre_hook(late) for block in pipe.transformer.transformer_blocks]
    hooks.append(pipe.transformer.register_forward_pre_hook(counted))
    try:
        calls[0] = -(10**6)
        running.run_cell(pipe, setup, cell)
        calls[0] = 0
        _, times = running.timed_request(pipe, setup, cell, engine_of(pipe).mesh)
        return times | {"speeds": [list(each.speeds) for each in engine_of(pipe).balances]}
    finally:
        for hook in hooks:
            hook.remove()
        restore(pipe)


def show(name: str, ranks: list[dict[str, Any]], slows: bool) -> None:
    """Print a case."""
    print(f"\n{name}")
    half = len(ranks[0]["steps"]) // 2
    for number, each in enumerate(ranks):
        # The first step is synchronous, and warms up.
        parts = (
            (("steps 2 to end", slice(1, None)),)
            if not slows
            else (("before", slice(1, half)), ("after", slice(half + 1, None)))
        )
        cells = []
        for said, part in parts:
            steps = each["steps"][part]
            mean = {what: 1e3 * sum(step[what] for step in steps) / len(steps) for what in steps[0]}
            cells.append(
                f"{said}: {mean['seconds']:.1f} ms a step, {mean['in_collectives']:.1f} in collectives, "
                f"{mean['work_processor']:.1f} of processor"
            )
        print(f"  rank {number}: {'; '.join(cells)}; {each['bytes_sent'] / 1e6:.1f} MB", flush=True)


def main() -> None:
    """Measure and print."""
    from ditmesh.config import ParallelConfig
    from ditmesh.launch import RankPool

    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--only", help="cases whose names hold this")
    parser.add_argument(
        "--config", type=json.loads, action="append", default=[], help="a case more, whose last rank slows"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = CASES | {f"{json.dumps(config)}, the last rank slows down": (config, True) for config in options.config}
    figures: dict[str, Any] = {"machine": describe_machine(), "steps": options.steps, "cases": {}}
    for name, (config, slows) in cases.items():
        if options.only and options.only not in name:
            continue
        with RankPool(ParallelConfig(**config).world_size, "cpu", threads=1) as pool:
            ranks = pool.run(rank, config, slows, options.steps)
        figures["cases"][name] = {"config": config, "slows": slows, "ranks": ranks}
        show(name, ranks, slows)
        write_figures(figures, options.json)
    print(f"\n{figures['machine']['text']}")


if __name__ == "__main__":
    main()
