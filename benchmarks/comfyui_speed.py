"""A Flux of benchmark size in a real ComfyUI: seconds a step on one rank and on two, and what sending the calls costs.

    DITMESH_COMFYUI=~/ComfyUI python benchmarks/comfyui_speed.py

ComfyUI's own sampling with its *KSampler*, in turns: without the node, and with it (``ulysses=2``), one thread for
each rank. Seconds of the clock count on a quiet machine only; seconds of a processor say what the ranks had to do. The
longest rank of a step counts, and what it waited for the other is not in it. The second prompt is timed from its begin
to the begin of its first step, with the same weights and with a LoRA that was changed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from comfyui_graphs import FAMILIES, TEXT, built, lora_of, numbers, prepare

# As in benchmarks/exact.py: 8 heads of 64, 4 + 8 blocks.
MODEL = {
    "hidden_size": 512, "num_heads": 8, "mlp_ratio": 4.0, "depth": 4, "depth_single_blocks": 8,
    "axes_dim": [16, 24, 24],
}  # fmt: skip
# Rows and columns of latents, two of each to a token, and tokens of the text.
SIDE, WORDS = 64, 128
TICKS = os.sysconf("SC_CLK_TCK")


def seconds_of(pid: int) -> float:
    """What a process has had of the processors."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Clock:
    """Stands around the calls of the model, and notes when each begins and ends.

    Attributes:
        began, ended: by the clock.
        own: processor seconds of this thread between them.
    """

    def __init__(self) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []
        self.own: list[float] = []

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.began.append(time.perf_counter())
        before = time.thread_time()
        try:
            return executor(*args, **kwargs)
        finally:
            self.own.append(time.thread_time() - before)
            self.ended.append(time.perf_counter())


def sampled(model: Any, steps: int, seed: int, pids: list[int]) -> dict[str, Any]:
    """Samples; what it took."""
    import comfy.patcher_extension as extension
    import nodes
    import torch

    outer, made = Clock(), model.clone()
    # In front: it is outside of the node's.
    calls = made.wrappers.setdefault(extension.WrappersMP.APPLY_MODEL, {})
    made.wrappers[extension.WrappersMP.APPLY_MODEL] = {"clock": [outer], **calls}
    text = [[numbers(1, WORDS, TEXT, seed=1), {"pooled_output": numbers(1, 16, seed=2), "guidance": 3.5}]]
    latent = {"samples": torch.zeros(1, 16, SIDE, SIDE)}
    others, mine, start = [seconds_of(pid) for pid in pids], time.process_time(), time.perf_counter()
    with torch.inference_mode():
        out = nodes.KSampler().sample(made, seed, steps, 1.0, "euler", "simple", text, text, latent)[0]["samples"]
    return {
        "out": out,
        "begin": outer.began[0] - start,
        "first": outer.ended[0] - outer.began[0],
        "steps": [end - begin for begin, end in zip(outer.began[1:], outer.ended[1:], strict=True)],
        "processor": (time.process_time() - mine) / steps,
        "thread": statistics.median(outer.own[1:]),
        "others": [(seconds_of(pid) - before) / steps for pid, before in zip(pids, others, strict=True)],
    }


class Sending:
    """What a step takes that is not the model's own parallel call, in processor seconds of the calling thread."""

    def __init__(self, package: Any) -> None:
        self.taken: list[float] = []
        self._kind = package.parallel.Session
        self._own = self._kind.around
        outer = self

        def around(session: Any, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if session.followed.lead.inside:
                return outer._own(session, proceed, *args, **kwargs)
            within = 0.0

            def timed(*given: Any, **named: Any) -> Any:
                nonlocal within
                before = time.thread_time()
                try:
                    return proceed(*given, **named)
                finally:
                    within += time.thread_time() - before

            before = time.thread_time()
            try:
                return outer._own(session, timed, *args, **kwargs)
            finally:
                outer.taken.append(time.thread_time() - before - within)

        self._kind.around = around

    def undo(self) -> None:
        self._kind.around = self._own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--config", default="ulysses=2")
    options = parser.parse_args()
    package = prepare(["--use-pytorch-cross-attention"])
    import comfy.sd
    import comfy.utils
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    comfy.utils.set_progress_bar_enabled(False)
    name, settings, between = FAMILIES["flux"]
    FAMILIES["flux"] = name, {**settings, **MODEL}, between
    plain = built("flux")
    node = package.NODE_CLASS_MAPPINGS["DitmeshParallelizeModel"]()

    def parallel(model: Any) -> Any:
        return node.parallelize(model, ulysses=1, ring=1, cfg=1, settings=options.config)[0]

    with torch.inference_mode():
        lora = comfy.sd.load_lora_for_models(plain, None, lora_of(plain, 3), 1.0, 0.0)[0]
    try:
        begun = time.perf_counter()
        first = sampled(parallel(plain), 2, 0, [])
        started = time.perf_counter() - begun
        pids = package.parallel._running[0].pids
        sending = Sending(package)
        one, two = [], []
        for number in range(options.rounds):
            one.append(sampled(plain, options.steps, number, []))
            two.append(sampled(parallel(plain), options.steps, number, pids))
            error = (two[-1]["out"] - one[-1]["out"]).abs().max() / one[-1]["out"].abs().max()
            print(json.dumps({"round": number, "error": float(error), "load": os.getloadavg()[0]}), flush=True)
        sending.undo()
        begins = [run["begin"] for run in two]
        changed = sampled(parallel(lora), 2, 0, pids)
    finally:
        package.parallel.close_followers()

    def median(runs: list[dict[str, Any]]) -> tuple[float, float]:
        every = [step for run in runs for step in run["steps"]]
        return statistics.median(every), min(every)

    alone, longest = (statistics.median(max(r["processor"], *r["others"], 0) for r in runs) for runs in (one, two))
    sent = statistics.median(sending.taken)
    print(
        json.dumps(
            {
                "config": options.config,
                "load": os.getloadavg(),
                "first prompt, s": started,
                "its first call, s": first["first"],
                "a step on one rank, s (median, least)": median(one),
                "a step on all ranks, s (median, least)": median(two),
                "ratio by the clock (median, least)": [a / b for a, b in zip(median(one), median(two), strict=True)],
                "processor seconds a step on one rank": alone,
                "of the longest rank": longest,
                "ratio by processors": alone / longest,
                "sending, processor seconds a step": sent,
                "of the processor seconds of a step": sent / statistics.median(r["thread"] for r in two),
                "to the first step, s": statistics.median(begins),
                "to the first step with a LoRA changed, s": changed["begin"],
                "and its first call, s": changed["first"],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
