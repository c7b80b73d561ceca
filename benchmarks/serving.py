"""Batches at the step against one picture after the other, on the ranks of a server and the embedded model.

    python benchmarks/serving.py                          # 2 ranks, ulysses=2, 24 pictures of 8 clients
    python benchmarks/serving.py --devices 1 --clients 4
    python benchmarks/serving.py --config reproducible=True

Each client asks for its next picture when it has got the last one. "pipeline" calls the parallel pipeline itself, one
picture after the other; "one at a time" and "batched" are the loop of a server's ranks, without HTTP and a queue, with
at most one and at most as many pictures in a batch as there are clients. Every picture is compared with the one that
unmodified diffusers draws alone with its seed.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from PIL import Image

from ditmesh import zoo
from ditmesh.config import ParallelConfig
from ditmesh.launch import RankPool
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.types import JobRequest
from ditmesh.serve.worker.protocol import (
    Beat,
    Finished,
    ModelReady,
    Start,
    Stop,
    TaskBegan,
    TaskFailed,
    TaskStepped,
)
from ditmesh.serve.worker.worker import serve_rank
from harness import command_line, write_figures
from machine import describe_machine


def request(number: int, steps: int) -> JobRequest:
    """What picture ``number`` is to be."""
    captions = zoo.captions()
    return JobRequest(model="model", prompt=captions[number % len(captions)], seed=number, steps=steps, guidance=2.0)


def call_of(number: int, steps: int) -> dict[str, Any]:
    """The same as arguments of the pipeline."""
    asked = request(number, steps)
    generator = [torch.Generator().manual_seed(number)]
    return {
        "prompt": asked.prompt,
        "num_inference_steps": steps,
        "guidance_scale": asked.guidance,
        "generator": generator,
    }


def alone(pictures: int, steps: int) -> list[np.ndarray]:
    """Every picture, drawn by unmodified diffusers."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(zoo.path(), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return [np.asarray(pipe(**call_of(number, steps)).images[0]).astype(int) for number in range(pictures)]


def bare(config: dict[str, Any], pictures: int, steps: int) -> float:
    """Seconds a picture of the parallel pipeline, called in a loop; on a rank."""
    import diffusers

    import ditmesh

    pipe = diffusers.DiffusionPipeline.from_pretrained(zoo.path(), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    ditmesh.parallelize(pipe, config)
    pipe(**call_of(0, steps))
    started = time.perf_counter()
    for number in range(pictures):
        pipe(**call_of(number, steps))
    return (time.perf_counter() - started) / pictures


def serve(pool: RankPool, config: dict[str, Any], pictures: int, steps: int, clients: int, together: int) -> Any:
    """What rank 0 reported, with times, while so many clients asked."""
    said: list[tuple[float, Any]] = []
    asked = 0

    def ask() -> None:
        nonlocal asked
        if asked < pictures:
            pool.reply(Start(str(asked), request(asked, steps), 0))
            asked += 1

    def hear(rank: int, message: Any) -> None:
        said.append((time.perf_counter(), message))
        if isinstance(message, ModelReady):
            for _ in range(clients):
                ask()
        if isinstance(message, TaskFailed):
            raise RuntimeError(message.message)
        if isinstance(message, Finished):
            ask()
            if sum(isinstance(one, Finished) for _, one in said) == pictures:
                pool.reply(Stop())

    spec = ModelSpec("model", str(zoo.path()), ParallelConfig.read(config), together=together)
    pool.run(serve_rank, [spec], on_message=hear)
    return said


def figures(said: list[tuple[float, Any]], truths: list[np.ndarray], steps: int) -> dict[str, Any]:
    """What a run has taken, and how far its pictures are from those drawn alone."""
    began = next(at for at, one in said if isinstance(one, ModelReady))
    done = [(at, one) for at, one in said if isinstance(one, Finished)]
    beats = [one for _, one in said if isinstance(one, Beat)]
    apart = []
    for _, one in done:
        picture = np.asarray(Image.open(io.BytesIO(one.data)).convert("RGB")).astype(int)
        apart.append(int(abs(picture - truths[int(one.id)]).max()))
    waited = []
    for at, one in said:
        if isinstance(one, TaskBegan):
            first = next(t for t, other in said if isinstance(other, TaskStepped) and other.id == one.id)
            waited.append(first - at)
    # The model was tried with a picture of 4 steps.
    calls = beats[-1].calls - 4
    return {
        "seconds": (done[-1][0] - began) / len(done),
        "calls": calls,
        "of alone": calls / (steps * len(done)),
        "first step": statistics.median(waited),
        "apart": max(apart),
        "equal": sum(one == 0 for one in apart) / len(apart),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--config", default="", help="settings such as ulysses=2,reproducible=True")
    parser.add_argument("--pictures", type=int, default=24)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    config: dict[str, Any] = {} if options.devices == 1 else {"ulysses": options.devices}
    for setting in filter(None, options.config.split(",")):
        name, _, value = setting.partition("=")
        config[name] = json.loads(value.lower()) if value.lower() in ("true", "false") or value.isdigit() else value
    truths = alone(options.pictures, options.steps)
    rows: dict[str, dict[str, Any]] = {}
    sizes = options.pictures, options.steps
    with RankPool(options.devices, threads=1) as pool:
        calls = options.pictures * options.steps
        rows["pipeline"] = {"seconds": max(pool.run(bare, config, *sizes)), "calls": calls, "of alone": 1.0}
        for name, together in (("one at a time", 1), ("batched", options.clients)):
            said = serve(pool, config, *sizes, options.clients, together)
            rows[name] = figures(said, truths, options.steps)
    machine = describe_machine()
    print(machine["text"])
    print(f"{options.pictures} pictures of {options.steps} steps, {options.clients} clients, {config or '1 rank'}")
    for name, row in rows.items():
        print(f"{name:14}", "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    write_figures({"machine": machine, "config": config, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
