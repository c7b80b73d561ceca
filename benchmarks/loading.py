"""Loading a pipeline on one rank and on several ranks of a host: seconds and the memory of all ranks. CPU ranks, Linux.

    python benchmarks/loading.py                         # a transformer of 1 GB on one rank and on four
    python benchmarks/loading.py --ranks 2 --repeats 5 --json loading.json

Stable Diffusion 3's classes with random weights, `ulysses` on all ranks, in float32: once saved in float32, where
ranks map the files, and once in bfloat16, where the first rank of the host converts them into memory that all map.
Processes are up and have imported everything, and files are in the page cache. Seconds are those of the slowest rank
from a barrier to a pipeline whose every weight has been read once: pages that are mapped later would be paid for in
the first step. One rank and several take turns, the best of each counts. Memory is what all ranks have of their own
(Private of /proc/self/smaps_rollup, above what they had before) and their share of common pages (Pss), over the bytes
of the weights in float32. The ranks need more processor time than one rank for the comparison of their weights, and
here they share the cores.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist

from harness import command_line, show_table, write_figures
from machine import describe_machine
from memory_model import absent, sd3_pipeline

FORMS = {"float32": "mapped files", "bfloat16": "converted"}


def saved(folder: str, blocks: int) -> None:
    """The pipeline in float32 and in bfloat16, below ``folder``."""
    pipe = sd3_pipeline(blocks, 24)
    for form in FORMS:
        pipe.to(getattr(torch, form)).save_pretrained(f"{folder}/{form}")


def rollup() -> dict[str, int]:
    """Bytes of this process: of its own, and its share of all."""
    found = {"private": 0, "pss": 0}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Private_Clean", "Private_Dirty", "Pss"):
            found["pss" if name == "Pss" else "private"] += int(rest.split()[0]) * 1024
    return found


def meet() -> None:
    """Wait for all ranks; one alone has no group."""
    if dist.is_initialized():
        dist.barrier()


def loaded(folder: str, ranks: int) -> dict[str, Any]:
    """On a rank: seconds of loading, of reading every weight, and the memory that came."""
    import diffusers  # noqa: F401

    import ditmesh

    gc.collect()
    before = rollup()
    meet()
    began = time.perf_counter()
    pipe = ditmesh.load(folder, {"ulysses": ranks}, dtype=torch.float32, **absent(folder))
    ready = time.perf_counter() - began
    weights = [value for part in (pipe.transformer, pipe.text_encoder, pipe.vae) for value in part.parameters()]
    with torch.no_grad():
        # One number of every page.
        total = sum(float(value.flatten()[::1024].sum()) for value in weights)
    seconds = time.perf_counter() - began
    # Before another rank frees pages.
    meet()
    gc.collect()
    after = rollup()
    meet()
    found = {
        "seconds": seconds,
        "load": ready,
        "total": total,
        "weights": sum(value.nbytes for value in weights),
        **{name: after[name] - before[name] for name in after},
    }
    ditmesh.restore(pipe)
    return found


def main() -> None:
    from ditmesh.launch import RankPool

    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=5, help="of the transformer, 0.2 GB each in float32")
    parser.add_argument("--repeats", type=int, default=4)
    given = parser.parse_args()
    figures: dict[str, Any] = {"machine": describe_machine(), "ranks": given.ranks, "cases": {}}
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        RankPool(1, threads=1, timeout=600.0) as one,
        RankPool(given.ranks, threads=1, timeout=600.0) as several,
    ):
        saved(folder, given.blocks)
        for form, how in FORMS.items():
            alone, all_ranks = [], []
            # The first turn imports what loading needs.
            for turn in range(given.repeats + 1):
                single = one.run(loaded, f"{folder}/{form}", 1)[0]
                together = several.run(loaded, f"{folder}/{form}", given.ranks)
                assert all(abs(rank["total"] - single["total"]) < 1e-6 * abs(single["total"]) for rank in together)
                if turn:
                    alone.append(single)
                    all_ranks.append(together)
            weights = alone[0]["weights"]
            seconds = min(single["seconds"] for single in alone)
            slowest = min(max(rank["seconds"] for rank in ranks) for ranks in all_ranks)
            memory = {
                name: min(sum(rank[name] for rank in ranks) for ranks in all_ranks) / weights
                for name in ("private", "pss")
            }
            figures["cases"][form] = {
                "weights": weights,
                "seconds of one rank": seconds,
                "seconds of the ranks": slowest,
                "turns": [[single, *ranks] for single, ranks in zip(alone, all_ranks, strict=True)],
                **memory,
            }
            rows.append(
                [
                    f"{form}, {how}",
                    f"{weights / 1e9:.2f}",
                    f"{seconds:.2f}",
                    f"{slowest:.2f}",
                    f"{slowest / seconds:.2f}",
                    f"{memory['private']:.2f}",
                    f"{memory['pss']:.2f}",
                ]
            )
    columns = ["saved in", "weights GB", "s, one rank", f"s, {given.ranks} ranks", "ratio"]
    columns += ["private / weights", "Pss / weights"]
    show_table(f"Loading on {given.ranks} ranks", columns, rows, figures["machine"])
    write_figures(figures, given.json)


if __name__ == "__main__":
    main()
