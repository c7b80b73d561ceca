"""Decoding in bands against decoding on one rank: seconds, peak memory and error of a real autoencoder's shapes.

Random weights in the architecture of the autoencoder of Stable Diffusion 3 and FLUX.1, one thread for each rank, Linux.
Memory is what a process has resident at most (shared memory included) beyond what it has before it decodes. On a
machine with other work, compare the seconds of processor time, which waiting for a processor does not count.

    python benchmarks/vae.py --size 1024 --ranks 1,2,4 --json figures.json
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import command_line, write_figures
from machine import describe_machine, resident

CHANNELS = 16
SETTINGS: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": CHANNELS,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def decoded(size: int, dtype: str, runs: int) -> dict[str, Any]:
    """On a rank: seconds and peak memory of a decode, and the picture."""
    import diffusers
    import torch.distributed as dist

    from ditmesh.comm.mesh import Mesh
    from ditmesh.config import ParallelConfig
    from ditmesh.strategies.vae.parallel import InBands

    torch.manual_seed(0)
    vae: Any = diffusers.AutoencoderKL(**SETTINGS).eval().requires_grad_(False).to(getattr(torch, dtype))
    latents = torch.randn(1, CHANNELS, size // 8, size // 8, dtype=vae.dtype)
    mesh = Mesh(ParallelConfig(ring=dist.get_world_size() if dist.is_initialized() else 1))
    bands = InBands(vae, mesh.world) if mesh.world_size > 1 else None
    decode = vae.decode if bands is None else partial(bands.call, "decode")
    seconds, worked, peaks = [], [], []
    with torch.no_grad():
        # Whatever is set up once.
        decode(latents[:, :, :32, :8])
        for _ in range(runs):
            mesh.begin_request("a decode")
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            started, busy = time.perf_counter(), time.process_time()
            picture = decode(latents).sample
            seconds.append(time.perf_counter() - started)
            worked.append(time.process_time() - busy)
            peaks.append(resident("VmHWM") - before)
    mesh.close()
    return {
        "seconds": min(seconds),
        "worked": min(worked),
        "peak": max(peaks),
        "whole": {} if bands is None else dict(bands.bands.whole),
        "picture": picture.float(),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--size", type=int, default=1024, help="pixels in height and width")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks; the first is what others are compared with")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    from ditmesh.launch import RankPool

    figures: dict[str, Any] = {"machine": describe_machine(), "size": options.size, "dtype": options.dtype, "ranks": {}}
    first: dict[str, Any] | None = None
    print("| ranks | seconds | speed-up | processor | speed-up | peak memory | of one | error | equal to the bit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for count in map(int, options.ranks.split(",")):
        with RankPool(count, threads=1, timeout=900.0) as pool:
            every = pool.run(decoded, options.size, options.dtype, options.runs)
        seconds, worked, peak = (max(one[what] for one in every) for what in ("seconds", "worked", "peak"))
        picture = every[0]["picture"]
        first = first or {"seconds": seconds, "worked": worked, "peak": peak, "picture": picture}
        error = float((picture - first["picture"]).abs().max() / first["picture"].abs().max())
        row = {
            "seconds": seconds,
            "speed-up": first["seconds"] / seconds,
            "processor seconds": worked,
            "speed-up of them": first["worked"] / worked,
            "peak": peak,
            "of one": peak / first["peak"],
            "error": error,
            "equal": bool((picture == first["picture"]).all()),
            "whole": every[0]["whole"],
        }
        figures["ranks"][count] = row
        print(
            f"| {count} | {seconds:.1f} | {row['speed-up']:.2f} | {worked:.1f} | {row['speed-up of them']:.2f} | "
            f"{peak / 2**20:.0f} MiB | {row['of one']:.0%} | {error:.1e} | {'yes' if row['equal'] else 'no'} |",
            flush=True,
        )
    print(figures["machine"]["text"])
    write_figures(figures, options.json)


if __name__ == "__main__":
    main()
