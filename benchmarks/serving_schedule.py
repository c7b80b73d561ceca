"""An adaptive schedule against every fixed configuration of the same devices, on a mixed trace.

    python benchmarks/serving_schedule.py simulate --ranks 8 64   # simulated, with the cost model
    python benchmarks/serving_schedule.py switch                  # what a change of ranks between two steps costs here

The trace mixes small pictures, large pictures and videos. A request is in time if it is done within 1.5 times what it
takes alone on one device. ``simulate`` decides with the code of the server and takes the seconds of calls from
`ditmesh.forecast`: its figures are simulated, nothing runs on a device. The load is relative to the capacity: the
requests per second that all devices do if each makes one request after the other. ``switch`` runs two ranks of this
machine. `serving_load.py` compares whole servers.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ditmesh import zoo
from ditmesh.config import ParallelConfig
from ditmesh.forecast.catalogue import shape
from ditmesh.forecast.costs.hardware import Hardware, machine
from ditmesh.forecast.prediction import predict
from ditmesh.forecast.shipped import shipped_model
from ditmesh.forecast.workload import workload_of
from ditmesh.launch import RankPool
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.schedule.core import Scheduler
from ditmesh.serve.schedule.costs import AFTER, BEFORE, Kind, Mode, modes_of
from ditmesh.serve.types import JobRequest
from ditmesh.serve.worker.batching import PipelineTask
from ditmesh.serve.worker.protocol import PictureTask
from harness import command_line, write_figures
from serving_simulation import ServedTrace, World, adaptive, fixed, trace

# Weight, kind and steps of each sort of request of the simulated trace.
MIX = [
    (5.0, Kind("sd3.5-medium", 512, 512), 28),
    (3.0, Kind("sd3.5-medium", 1024, 1024), 28),
    (2.0, Kind("flux.1-dev", 1024, 1024, 1, False), 28),
    (1.0, Kind("wan-1.3b", 832, 480, 33), 30),
]
# Seconds of text encoders; the autoencoder takes as long as so many steps.
TEXT, DECODED = 0.03, 1.0
DEVICE = "h100"
# The largest block of ranks that share a call: those of a host.
HOST = 8


@cache
def hardware() -> Hardware:
    """A host."""
    return machine(DEVICE, HOST)


@cache
def seconds(kind: Kind, mode: Mode, together: int) -> float:
    """Of a call with both branches of guidance, predicted."""
    model = shape(kind.model)
    frames = kind.frames if model.num_frames > 1 else None
    workload = workload_of(model, (kind.width, kind.height), pictures=together, frames=frames)
    config = ParallelConfig(cfg=mode.rows, ulysses=mode.tokens)
    return predict(config, shipped_model(model).work, workload, hardware()).step


def part(kind: Kind, which: str) -> float:
    """Seconds around the steps."""
    return TEXT if which == BEFORE else DECODED * seconds(kind, Mode(), 1) if which == AFTER else 0.0


WORLD = World(seconds, part)


def simulated(
    ranks: int, load: float, requests: int, seed: int, bursts: int = 1, fastest: bool = False
) -> dict[str, ServedTrace]:
    """Outcomes by server; ``"adaptive"`` and the fixed ones."""
    widest = min(ranks, HOST)
    alone = modes_of(ranks, None, True, sizes(widest)) if fastest else [Mode()]
    wishes = trace(MIX, load, ranks, requests, WORLD, seed, bursts=bursts, modes=alone)
    modes = {
        model: modes_of(ranks, None, any(kind.guided for _, kind, _ in MIX if kind.model == model), sizes(widest))
        for model in {kind.model for _, kind, _ in MIX}
    }
    found = {"adaptive": adaptive(wishes, WORLD, Scheduler(ranks, modes))}
    for mode in modes_of(ranks, None, True, sizes(widest)):
        for together in (1, 8):
            name = f"{ranks // mode.ranks} x {mode}, batch {together}"
            found[name] = fixed(wishes, WORLD, ranks, mode, together)
    return found


def sizes(most: int) -> list[int]:
    """Powers of two."""
    return [size for size in (1, 2, 4, 8) if size <= most]


def simulate(options: Any) -> dict[str, Any]:
    """Print and return the figures of all loads."""
    figures: dict[str, Any] = {}
    for ranks in options.ranks:
        for load, bursts in ((0.6, 1), (0.8, 1), (1.0, 1), (0.8, 8)):
            found = simulated(ranks, load, options.requests * max(1, ranks // 8), options.seed, bursts, options.fastest)
            others = {name: one for name, one in found.items() if name != "adaptive"}
            best = max(others, key=lambda name: others[name].met)
            fast = max(others, key=lambda name: others[name].throughput)
            own = found["adaptive"]
            print(
                f"simulated, {ranks} ranks, load {load}, bursts of {bursts}: in time {100 * own.met:.1f} % adaptive, "
                f"{100 * others[best].met:.1f} % best fixed ({best}); requests/s {own.throughput:.2f} adaptive, "
                f"{others[fast].throughput:.2f} best fixed ({fast}); shared by several ranks {100 * own.wide:.0f} %",
                flush=True,
            )
            figures[f"{ranks} ranks, load {load}, bursts of {bursts}"] = {
                name: {"in_time": one.met, "per_second": one.throughput} for name, one in found.items()
            }
    return figures


def switched(steps: int, *, report: Any = None) -> dict[str, list[float]]:
    """Seconds of a call that two ranks share, after one like it and after one of each rank alone. A rank function."""
    import torch

    from ditmesh.serve.worker.loaded import LoadedModel
    from ditmesh.serve.worker.pooled import PoolBatcher
    from ditmesh.serve.worker.rendezvous import HostAllGather

    gather = HostAllGather()
    found: dict[str, list[float]] = {"same": [], "changed": []}
    with torch.no_grad(), ExitStack() as undo:
        spec = ModelSpec("emoji", str(zoo.path("emoji-sd3")), ParallelConfig(), pool=2)
        model = LoadedModel(spec, torch.device("cpu"), gather, undo)
        batcher = model.batcher
        assert isinstance(batcher, PoolBatcher)
        request = JobRequest(prompt="a red fox", steps=4 * steps, seed=0)
        prepared = model.prepare(PictureTask("one", "emoji", request, 0))
        run = PipelineTask(prepared.pipe, prepared.arguments, 0, torch.device("cpu"))
        run.resume()
        while not batcher.steps(run):
            batcher.make_narrow_call(run)
        after = ""
        # Two shared calls in turn, then one of each rank alone.
        for mode in [Mode(1, 2), Mode(1, 2), Mode()] * steps:
            if not batcher.steps(run):
                break
            if mode.ranks == 1:
                batcher.make_calls([run], lambda *of: None)
                after = "changed"
                # Neither rank waits for the other in what is timed.
                gather(None)
                continue
            seconds = batcher.make_shared_call(run, mode)
            found["changed" if found["same"] and after == "changed" else "same"].append(seconds)
            after = "same"
            gather(None)
        run.leave()
        model.close()
    gather.close()
    # The first calls of a form are looked at.
    return {name: values[3:] for name, values in found.items()}


def switch(options: Any) -> dict[str, Any]:
    """Print and return what a change of ranks costs."""
    with RankPool(2, threads=1) as pool:
        found = pool.run(switched, options.steps)[0]
    costs = [1000 * (b - a) for a, b in zip(found["same"], found["changed"], strict=False)]
    figures = {
        "calls": len(costs),
        "same_ms": 1000 * statistics.median(found["same"]),
        "changed_ms": 1000 * statistics.median(found["changed"]),
        "cost_ms": statistics.median(costs),
    }
    print(", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    return figures


def main() -> None:
    parser = command_line(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("simulate")
    one.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    one.add_argument("--requests", type=int, default=400, help="for every 8 ranks")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument(
        "--fastest", action="store_true", help="deadlines of 1.5 times the fastest configuration, not of one device"
    )
    two = commands.add_parser("switch")
    two.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    run: Callable[[Any], dict[str, Any]] = {"simulate": simulate, "switch": switch}[options.command]
    write_figures(run(options), options.json)


if __name__ == "__main__":
    main()
