"""One seed over degrees and sizes: how differences of exact strategies grow.

    python benchmarks/sameness.py --json benchmarks/measured/sameness.json
    python benchmarks/sameness.py --tokens 256 1024 --steps 4 --degrees 2 4

A FLUX-shaped transformer with random weights, 3 blocks, at several numbers of image tokens (16 by 16
pixels each in FLUX's own case: 256 tokens are 256 x 256 pixels, 4,096 are 1024 x 1024). Euler steps of a flow from
the same noise; after 1, 4 and 20 steps the largest difference of the latents from one device, over their largest
magnitude. With the same runs: seconds of a step. Strategies take turns, and a ratio is of one device's step over the
slowest rank's, of the medians; ``work`` is the same of processor seconds outside of collectives, which other work on
the machine hardly changes. Random weights amplify rounding less or more than trained ones: what is compared is
strategies and sizes.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import command_line, write_figures
from machine import counted, describe_machine

DEGREES = (2, 4, 8)
TOKENS = (256, 1024, 4096)
MODEL = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
TEXT = 32
AFTER = (1, 4, 20)
ALONE = "one device"
# ``data`` has a batch of as many as ranks, of which each draws one.
AXES = ("ulysses", "ring", "tensor", "data")


def flow(config: dict[str, Any], tokens: int, steps: int, rows: int) -> dict[str, Any]:
    """Euler steps on this rank: latents after some of them, and seconds of every step."""
    import diffusers

    import ditmesh
    from ditmesh.core.alive import LiveBytes
    from ditmesh.lab.study.running import _collectives_timed
    from ditmesh.layout.conventions import CallVariant, Conventions, Size

    torch.manual_seed(0)
    model: Any = diffusers.FluxTransformer2DModel(**MODEL).eval()  # pyright: ignore[reportPrivateImportUsage]
    with torch.no_grad():
        # What is returned is as large as what comes in, or nothing would flow.
        model.proj_out.weight.mul_(8)
    side = int(tokens**0.5)
    given = Conventions(model, CallVariant("bsc")).inputs(Size(side, side, TEXT, batch=rows))
    state = torch.randn((rows, tokens, MODEL["in_channels"]), generator=torch.Generator().manual_seed(1))
    kept, seconds, work = {}, [], []
    with ditmesh.parallelized(model, config), torch.no_grad():
        with _collectives_timed() as spent:
            for step in range(max(steps)):
                began, busy, inside = time.perf_counter(), time.thread_time(), sum(each for _, each in spent)
                given |= {"hidden_states": state, "timestep": torch.full((rows,), 1.0 - step / max(steps))}
                velocity = model(**given)[0]
                seconds.append(time.perf_counter() - began)
                work.append(time.thread_time() - busy - (sum(each for _, each in spent) - inside))
                state = state - velocity / max(steps)
                if step + 1 in steps:
                    kept[step + 1] = state.clone()
        # Counting bytes takes time, so a step of its own.
        alive = LiveBytes([*model.parameters(), *model.buffers()])
        with alive, counted(alive):
            model(**given)
    return {"latents": kept, "seconds": seconds, "work": work, "peak": alive.peak}


def growth(options: Any, write: Any) -> list[dict[str, Any]]:
    """One row for every size and strategy."""
    from ditmesh.launch import RankPool

    found: list[dict[str, Any]] = []
    steps, meshes = tuple(options.steps), [(axis, degree) for degree in options.degrees for axis in AXES]
    with ExitStack() as stack:
        pools = {ranks: stack.enter_context(RankPool(ranks, "cpu", threads=1)) for ranks in (1, *options.degrees)}
        for count in options.tokens:
            alone: dict[int, list[Any]] = {}
            several: dict[tuple[str, int], list[Any]] = {}
            for turn in range(options.turns):
                # Speed takes turns; what is drawn is the same.
                after = steps[:-1] or steps if turn else steps
                for rows in sorted({_rows(*mesh) for mesh in meshes}):
                    alone.setdefault(rows, []).append(pools[1].run(flow, {}, count, after, rows)[0])
                for axis, degree in meshes:
                    run = pools[degree].run(flow, {axis: degree}, count, after, _rows(axis, degree))
                    several.setdefault((axis, degree), []).append(run)
            for axis, degree in meshes:
                reference, ranks, name = alone[_rows(axis, degree)], several[axis, degree], f"{axis}={degree}"
                row: dict[str, Any] = {"tokens": count, "strategy": name}
                row["difference"] = {
                    str(after): relative(ranks[0][0]["latents"][after], reference[0]["latents"][after])
                    for after in steps
                }
                for what in ("seconds", "work"):
                    # The first step of a run finds its memory.
                    one = statistics.median(value for run in reference for value in run[what][1:])
                    ours = max(
                        statistics.median(value for run in ranks for value in run[rank][what][1:])
                        for rank in range(degree)
                    )
                    row[what] = {"one device": one, "ranks": ours, "ratio": one / ours}
                row["peak_bytes"] = [reference[0]["peak"], max(each["peak"] for each in ranks[0])]
                found.append(row)
                write(found)
                said = ", ".join(f"{after}: {value:.1e}" for after, value in row["difference"].items())
                print(
                    f"{count:>6} tokens  {name:<12}difference after steps {said}; {row['seconds']['ratio']:.2f}x by "
                    f"the clock, {row['work']['ratio']:.2f}x in work; peak {row['peak_bytes'][1] / 1e6:.0f} MB against "
                    f"{row['peak_bytes'][0] / 1e6:.0f}",
                    flush=True,
                )
    return found


def _rows(axis: str, degree: int) -> int:
    return degree if axis == "data" else 1


def relative(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference over the largest magnitude."""
    return float((ours - truth).abs().max() / truth.abs().max())


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="square numbers")
    parser.add_argument("--steps", type=int, nargs="+", default=list(AFTER), help="after which latents are compared")
    parser.add_argument("--degrees", type=int, nargs="+", default=list(DEGREES), help="a process each: 8 need 4 GB")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"machine": describe_machine(), "model": MODEL, "text": TEXT}

    def kept(rows: list[dict[str, Any]]) -> None:
        figures["growth"] = rows
        write_figures(figures, options.json)

    growth(options, kept)
    print(figures["machine"]["text"])


if __name__ == "__main__":
    main()
