"""Seconds of a step with values computed ahead over those without, in models of two blocks of their own width.

    python benchmarks/ahead.py --json figures.json    # wants a quiet machine, and 12 GB

Weights are torch's initial ones in float32. A call has 64 tokens of the image and 64 of the text, so that the weights
which every rank reads in every step are a large part of it. Ranks have one thread each, and both ways take turns; of
six steps the first two are compared with the modules, and do not count.
"""

from __future__ import annotations

import statistics
import sys
import time
from inspect import signature
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from harness import command_line, paired_ratios, write_figures
from machine import describe_machine

MODELS = ("flux.1-dev", "sd3.5-large", "qwen-image", "hunyuan-video", "wan-14b")
MESHES: dict[str, dict[str, Any]] = {"1 rank": {}, "ulysses=2": {"ulysses": 2}}
STEPS, COMPARED, TURNS, SIDE, TEXT = 6, 2, 3, 8, 64


class Steps(DiffusionPipeline):
    """A pipeline of a transformer alone: every step gives it another image."""

    def __init__(self, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, call: dict[str, Any]) -> tuple[list[float], list[torch.Tensor]]:
        """Seconds of every step, and what it predicts."""
        self.scheduler.set_timesteps(STEPS)
        seconds, outputs = [], []
        for step, time_ in enumerate(self.scheduler.timesteps):
            now = {"hidden_states": call["hidden_states"] * (1 + step), "timestep": time_.expand_as(call["timestep"])}
            started = time.perf_counter()
            outputs.append(self.transformer(**{**call, **now, "return_dict": False})[0])
            seconds.append(time.perf_counter() - started)
        return seconds, outputs


def measured(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """On a rank: seconds of a step in every turn, and whether predictions have the same bits in both ways."""
    import diffusers

    import ditmesh
    from ditmesh.layout.conventions import CallVariant, Conventions, Size
    from ditmesh.layout.probe import DEPTHS, meta_model
    from ditmesh.layout.without_values import WithoutValues, by_any_call
    from ditmesh.memory.catalogue import shapes

    shape, size = shapes()[name], Size(SIDE, SIDE, TEXT)
    kind = getattr(diffusers, shape.transformer)
    settings = shape.config | dict.fromkeys(signature(kind).parameters.keys() & set(DEPTHS), 2)
    empty = meta_model(shape.transformer, settings)

    def called(make: Conventions) -> CallVariant:
        with WithoutValues():
            empty(**make.inputs(size))
        return make.way

    model = kind(**settings)
    call = Conventions(model, by_any_call(empty, torch.float32, called)).inputs(size)
    pipe: Any = Steps(model.eval(), FlowMatchEulerDiscreteScheduler())
    found: dict[str, Any] = {"without": [], "ahead": [], "equal": True}
    for _ in range(TURNS):
        outputs = []
        for which in ("without", "ahead"):
            with ditmesh.parallelized(pipe, {**config, "precompute": which == "ahead"}):
                seconds, predicted = pipe(call)
            found[which].append(statistics.median(seconds[COMPARED:]))
            outputs.append(predicted)
        found["equal"] &= all(map(torch.equal, *outputs))
    return found


def main() -> None:
    """Measure, print each row, write the figures."""
    from ditmesh.launch import RankPool

    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    options, rows = parser.parse_args(), []
    for name, (mesh, config) in ((name, mesh) for name in options.models for mesh in MESHES.items()):
        with RankPool(2 if config else 1, threads=1) as pool:
            found = pool.run(measured, name, config)[0]
        ratio = statistics.median(paired_ratios(found["ahead"], found["without"]))
        rows.append({"model": name, "mesh": mesh, **found, "ratio": ratio})
        print(f"{name}, {mesh}: {ratio:.2f} of the seconds without; same bits: {found['equal']}", flush=True)
    write_figures({"machine": describe_machine(), "rows": rows}, options.json)


if __name__ == "__main__":
    main()
