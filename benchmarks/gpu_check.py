"""Checks that need a CUDA device: kernels, parity, and the cost of the doors.

    python benchmarks/gpu_check.py [--json out.json]

* the log-sum-exp kernels against float64 attention, in float32, float16 and bfloat16, with and without masks;
* attention over keys in two halves, merged, against attention in one piece;
* the benchmark model: plain diffusers, parallelised on one rank, and with as many ranks as there are GPUs.

Without a CUDA device it says so and exits with code 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from machine import describe_machine

TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def kernel_errors() -> list[dict[str, Any]]:
    """Largest error of the LSE kernels and of a merge of two halves, for every dtype, mask and head dimension."""
    from ditmesh.attention.kernels import attend_with_lse, merge_

    rows = []
    for dtype, tolerance in TOLERANCES.items():
        for dim in (64, 72, 128):
            for masked in (False, True):
                torch.manual_seed(0)
                q, k, v = (torch.randn(2, 4, 130, dim, device="cuda", dtype=dtype) for _ in range(3))
                mask = None
                if masked:
                    mask = torch.rand(2, 1, 130, 130, device="cuda") > 0.3
                    mask[..., 0] = True
                truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask)
                whole, _ = attend_with_lse(q, k, v, mask)
                halves = [
                    attend_with_lse(q, k[:, :, part], v[:, :, part], None if mask is None else mask[..., part])
                    for part in (slice(0, 57), slice(57, 130))
                ]
                merged, _ = merge_(*halves[0], *halves[1])
                errors = [float((out.double() - truth).abs().max()) for out in (whole, merged)]
                rows.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "head dim": dim,
                        "mask": masked,
                        "error": errors[0],
                        "error, merged": errors[1],
                        "ok": max(errors) < tolerance,
                    }
                )
    return rows


def model_rows(config: dict[str, Any] | None, dtype_name: str, repeats: int) -> dict[str, Any]:
    """On every rank: error against plain diffusers, and median seconds of a forward."""
    import diffusers

    import ditmesh
    from ditmesh.layout.conventions import Conventions, Size, Way
    from exact import MODEL, SIDE, TEXT

    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(**MODEL).eval().to("cuda", dtype)
    inputs = Conventions(model, Way("bsc")).inputs(Size(SIDE, SIDE, TEXT, batch=1))

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(**inputs)[0]

    def seconds() -> float:
        forward()
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            forward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    truth = forward()
    plain = seconds()
    with ditmesh.parallelized(model, config or {}):
        value, parallel = forward(), seconds()
    error = float((value - truth).abs().max() / truth.abs().max())
    return {"error": error, "equal": torch.equal(value, truth), "plain s": plain, "parallel s": parallel}


def main() -> int:
    """Run the checks, print tables, return the exit code."""
    from ditmesh.launch import RankPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    if not torch.cuda.is_available():
        console.print("No CUDA device is there: nothing was checked.")
        return 2
    console.print(describe_machine()["text"])
    kernels = kernel_errors()
    _print(console, "Log-sum-exp kernels against float64", kernels)
    models = []
    gpus = torch.cuda.device_count()
    configs: list[dict[str, Any]] = [{}]
    if gpus > 1:
        configs += [{"ulysses": gpus}, {"ring": gpus}]
    for config in configs:
        ranks = 1 if not config else gpus
        for dtype in ("float32", "bfloat16"):
            with RankPool(ranks, device="cuda") as pool:
                result = pool.run(model_rows, config, dtype, options.repeats)[0]
            models.append({"config": str(config or "1 rank"), "dtype": dtype, **result, "ok": result["error"] < 2e-2})
    _print(console, "Benchmark model against plain diffusers", models)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": describe_machine(), "kernels": kernels, "models": models}, indent=1)
        )
    return 0 if all(row["ok"] for row in kernels + models) else 1


def _print(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
