"""Digests of what tiny transformers return in reproducible mode, and the machine that they hold for.

``python -m support.old_bits FILE`` (in tests/, with the version to record on the path) writes them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.models import inputs, sizes, tiny
from support.reproducible import cast, digest, forward_bits

CLASSES = ["SD3", "Flux", "PixArt", "DiT", "Wan", "QwenImage"]
DTYPES = ["float32", "bfloat16"]
# World size -> configurations; all of a model and dtype have the bits of the first, but for the patches, which
# decide bits.
WHOLE: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"ulysses": 2}, {"ring": 2, "speeds": (3, 1)}],
    3: [{"ring": 3}, {"ulysses": 3, "speeds": (1, 2, 4)}],
}
PATCHES: dict[int, list[dict[str, Any]]] = {1: [{"patches": 2}], 2: [{"patches": 2, "pipe": 2}]}


def machine() -> dict[str, str]:
    """What decides the bits beside ditmesh: the processor and the libraries with the kernels."""
    import diffusers

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = dict(
        [part.strip() for part in line.split(":", 1)] for line in info.split("\n\n")[0].splitlines() if ":" in line
    )
    return {
        "cpu": " ".join(cpu.get(key, "?") for key in ("model name", "cpu family", "model")),
        "flags": hashlib.sha256(" ".join(sorted(cpu.get("flags", "").split())).encode()).hexdigest()[:12],
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "threads": "1",
    }


def given(name: str, dtype: str) -> str:
    """Digest of weights and inputs: other bits of these say nothing about ditmesh."""
    tensors = [value for value in tiny(name).state_dict().values() if value.is_floating_point()]
    for size in sizes(name).values():
        tensors += [value for _, value in sorted(inputs(name, size).items()) if isinstance(value, torch.Tensor)]
    return hashlib.sha256("".join(map(digest, cast(tensors, getattr(torch, dtype)))).encode()).hexdigest()[:16]


def found(ranks: Callable[[int], Any], name: str, dtype: str) -> dict[str, Any]:
    """Digests by configuration, the same on every rank."""
    bits: dict[str, Any] = {"given": given(name, dtype)}
    for world in sorted({*WHOLE, *PATCHES}):
        configs = [{**one, "reproducible": True} for one in WHOLE.get(world, []) + PATCHES.get(world, [])]
        per_rank = ranks(world).run(forward_bits, name, configs, None, dtype)
        assert all(one == per_rank[0] for one in per_rank), (name, dtype, world)
        for config, digests in zip(configs, per_rank[0], strict=True):
            bits[f"{world}: {config}"] = digests
    return bits


def main(path: Path) -> None:
    from ditmesh.launch import RankPool

    pools = {world: RankPool(world, threads=1) for world in (1, 2, 3)}
    result: dict[str, Any] = {"commit": "136bc75", "machine": machine(), "bits": {}}
    for name in CLASSES:
        for dtype in DTYPES:
            result["bits"][f"{name} {dtype}"] = found(pools.__getitem__, name, dtype)
    for pool in pools.values():
        pool.close()
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
