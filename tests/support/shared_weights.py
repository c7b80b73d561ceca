"""Which of a rank's weights are pages of files, which all ranks of a host share until one writes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ditmesh
from ditmesh import zoo


def save_large(folder: str | Path, blocks: int) -> int:
    """emoji-sd3 with a random transformer of so many blocks; bytes of the transformer."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(zoo.path("emoji-sd3"), torch_dtype=torch.float32)
    config = dict(pipe.transformer.config) | {"num_layers": blocks}
    pipe.transformer = diffusers.SD3Transformer2DModel.from_config(config)
    pipe.save_pretrained(folder)
    return sum(one.nbytes for one in pipe.transformer.parameters())


def file_pages() -> Iterator[tuple[int, int, dict[str, int]]]:
    """Of each mapping of a safetensors file: first address, the one after its last, and bytes by kind."""
    begin = end = 0
    found: dict[str, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            if found is not None:
                yield begin, end, found
            begin, end = (int(word, 16) for word in head.groups())
            found = {} if line.endswith(".safetensors") else None
        elif found is not None and line.endswith(" kB"):
            name, value = line.split(":")
            found[name] = int(value.split()[0]) * 1024
    if found is not None:
        yield begin, end, found


def private() -> int:
    """Bytes that this process shares with no other one, and that are no unchanged pages of a file."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"Private_Dirty:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


def in_files(model: nn.Module) -> dict[str, int]:
    """Bytes of weights in all, of those in pages of files, and of such pages that were copied as they were written."""
    pages = [*file_pages()]
    weights = [*model.parameters()]
    inside = [one for one in weights if any(begin <= one.data_ptr() < end for begin, end, _ in pages)]
    return {
        "all": sum(one.nbytes for one in weights),
        "in files": sum(one.nbytes for one in inside),
        "written": sum(of["Anonymous"] for *_, of in pages),
    }


def draw(pipe: Any) -> torch.Tensor:
    """A picture."""
    generator = torch.Generator().manual_seed(0)
    return pipe("a fox", num_inference_steps=1, max_sequence_length=16, generator=generator, output_type="pt").images


def shared(folder: str, config: dict[str, int], change: bool) -> dict[str, Any]:
    """On a rank: load, draw, and write into a weight on the last rank."""
    before, began = private(), time.monotonic()
    pipe = ditmesh.load(folder, config)
    loaded = time.monotonic() - began
    first = draw(pipe)
    found: dict[str, Any] = {"seconds": loaded, "private": private() - before, **in_files(pipe.transformer)}
    weight = next(iter(pipe.transformer.parameters()))
    found["before"] = weight.detach().sum().item()
    ditmesh.restore(pipe)
    last = dist.get_rank() == dist.get_world_size() - 1
    if change:
        if last:
            with torch.no_grad():
                weight.add_(1.0)
        dist.barrier()
        found |= {"after": weight.detach().sum().item(), "changed": in_files(pipe.transformer)["written"], "last": last}
    found["picture"] = first.sum().item()
    return found
