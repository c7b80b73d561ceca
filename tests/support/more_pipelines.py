"""Whole diffusers pipelines of many families, made of tiny random parts and driven by prompt embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from support import exam
from support.exam import TABLE, Call


@dataclass(frozen=True)
class Family:
    """One pipeline class.

    Attributes:
        make: builds the pipeline.
        call: arguments of its call for prompts given by number, without those every pipeline takes.
        guidance: ``"batched"`` when all branches of guidance are rows of one transformer call, ``"sequential"``
            when every branch is a call of its own, ``""`` when the pipeline has no branches.
        result: the attribute of the pipeline's output that holds the latents.
    """

    make: Callable[[], Any]
    call: Call
    guidance: str = "batched"
    result: str = "images"


FAMILIES = {
    name: Family(
        partial(exam.pipeline, name, row),
        partial(exam.arguments, row["call"]),
        **{key: row[key] for key in ("guidance", "result") if key in row},
    )
    for name, row in TABLE["families"].items()
}


def arguments(name: str, prompts: list[int], seed: int = 0, steps: int = 3) -> dict[str, Any]:
    """Arguments of a family's call; the first prompt draws its noise from ``seed``, the next from ``seed + 1`` …"""
    return {
        "num_inference_steps": steps,
        "output_type": "latent",
        "generator": [torch.Generator().manual_seed(seed + row) for row in range(len(prompts))],
        **FAMILIES[name].call(prompts),
    }


def draw(name: str, pipe: Any, prompts: list[int], seed: int = 0, steps: int = 3) -> torch.Tensor:
    """Latents (P, ...) of one call."""
    return torch.as_tensor(getattr(exam.draw(pipe, arguments(name, prompts, seed, steps)), FAMILIES[name].result))
