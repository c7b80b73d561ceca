"""What the tests of the reproducible mode run on every rank."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import ditmesh
from support import more_pipelines, pipelines
from support.models import inputs, relative_error, run, sizes, tiny, variant

PROMPTS = [1, 2, 3]
STEPS = 2


def digest(tensor: torch.Tensor) -> str:
    """Of every bit."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Arguments with every float tensor in ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    return [cast(item, dtype) for item in value] if isinstance(value, list) else value


def made(family: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A tiny pipeline, and a function that gives the arguments of its call."""
    if family in pipelines.MAKERS:
        pipe, call = pipelines.MAKERS[family](), lambda: pipelines.arguments(family, PROMPTS, steps=STEPS)
    else:
        pipe, call = (
            more_pipelines.FAMILIES[family].make(),
            lambda: more_pipelines.arguments(family, PROMPTS, steps=STEPS),
        )
    # A copy: other tests use the tiny models as they are.
    pipe.transformer = copy.deepcopy(pipe.transformer).to(dtype)
    if getattr(pipe, "vae", None) is not None:
        pipe.vae = pipe.vae.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe, lambda: cast(call(), dtype)


def latents(pipe: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """What one call of a pipeline draws."""
    with torch.no_grad():
        result = pipe(**arguments)
    return torch.as_tensor(result.frames if hasattr(result, "frames") else result.images)


def pipeline_bits(family: str, configs: list[dict[str, Any]], dtype: str = "float32") -> list[str]:
    """Digest of what a pipeline draws, for every configuration."""
    found = []
    for config in configs:
        pipe, call = made(family, getattr(torch, dtype))
        with ditmesh.parallelized(pipe, config):
            found.append(digest(latents(pipe, call())))
    return found


def pipeline_error(family: str, config: dict[str, Any]) -> float:
    """Of what a pipeline draws, against the plain pipeline."""
    pipe, call = made(family, torch.float32)
    truth = latents(pipe, call())
    with ditmesh.parallelized(pipe, config):
        return relative_error(latents(pipe, call()), truth)


@cache
def wide(name: str, head_dim: int) -> nn.Module:
    """A tiny model of 3 heads of that size: no degree but 3 divides them."""
    changes: dict[str, Any] = {"num_attention_heads": 3, "attention_head_dim": head_dim}
    if name in ("Flux", "QwenImage"):
        changes["axes_dims_rope"] = {64: (16, 24, 24), 72: (24, 24, 24), 128: (32, 48, 48)}[head_dim]
    if name == "SD3":
        changes["caption_projection_dim"] = 3 * head_dim
    if name == "PixArt":
        changes["cross_attention_dim"] = 3 * head_dim
    return variant(name, **changes)


def forward_bits(
    name: str, configs: list[dict[str, Any]], head_dim: int | None = None, dtype: str = "float32"
) -> list[list[str]]:
    """Digests of one forward at an odd size, and at B=2 with ragged masks, for every configuration.

    A forward with gradients has the bits of the one without.
    """
    model = copy.deepcopy(tiny(name) if head_dim is None else wide(name, head_dim)).to(getattr(torch, dtype))
    found = []
    for config in configs:
        found.append([])
        with ditmesh.parallelized(model, config):
            for size in sizes(name).values():
                arguments = cast(inputs(name, size), getattr(torch, dtype))
                found[-1].append(digest(run(model, arguments)))
                if is_trained(config):
                    recorded = run(model, arguments, recorded=True)
                    assert recorded.requires_grad
                    assert digest(recorded.detach()) == found[-1][-1], (name, config, size)
    return found


def row_bits(name: str, configs: list[dict[str, Any]]) -> list[list[str]]:
    """Digests of the rows of a batch of eight; with gradients, they are the same in batches of other sizes."""
    model, whole = copy.deepcopy(tiny(name)), inputs(name, replace(sizes(name)["B=2 ragged"], batch=8))
    found = []
    for config in configs:
        with ditmesh.parallelized(model, config):
            with torch.inference_mode():
                found.append([digest(row) for row in run(model, whole)])
            for rows in ([6], [7, 0, 3], [*range(8)]) if is_trained(config) else ():
                part = tree_map(partial(some, rows), whole, is_leaf=lambda value: isinstance(value, list))
                recorded = run(model, part, recorded=True)
                assert recorded.requires_grad
                assert [digest(row) for row in recorded.detach()] == [found[-1][row] for row in rows], (config, rows)
    return found


def is_trained(config: dict[str, Any]) -> bool:
    """True if reproducible mode takes gradients: not of guidance, rows that ranks share, or patches."""
    return not {"cfg", "patches", "pipe"} & config.keys() and ("data" not in config or "inputs" in config)


def some(rows: list[int], value: Any) -> Any:
    """These rows of an argument that has eight."""
    if isinstance(value, list):
        return [value[row] for row in rows] if len(value) == 8 else value
    return value[rows] if getattr(value, "shape", ())[:1] == (8,) else value
