"""Whole diffusers pipelines made of tiny random parts, driven by prompt embeddings; they return latents."""

from __future__ import annotations

from typing import Any

import torch

from support import exam
from support.exam import build, flow
from support.models import tiny

# Every prompt is a seed: its embedding is noise drawn from it.
WIDTH, POOLED, TOKENS = 32, 16, 12


def embeddings(prompts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt embeddings (P, T, C) and pooled embeddings (P, C) of prompts given by number."""
    text, pooled = [], []
    for prompt in prompts:
        generator = torch.Generator().manual_seed(1000 + prompt)
        text.append(torch.randn(TOKENS, WIDTH, generator=generator))
        pooled.append(torch.randn(POOLED, generator=generator))
    return torch.stack(text), torch.stack(pooled)


def sd3() -> Any:
    """Stable Diffusion 3, with guidance in one batched call."""
    return build("StableDiffusion3Pipeline", transformer=tiny("SD3"), scheduler=flow(shift=3.0))


def flux() -> Any:
    """Flux, with true guidance: two calls a step."""
    return build("FluxPipeline", transformer=tiny("Flux"), scheduler=flow())


MAKERS = {"sd3": sd3, "flux": flux}


def arguments(name: str, prompts: list[int], seed: int = 0, steps: int = 4, **more: Any) -> dict[str, Any]:
    """Arguments of the pipeline's call for prompts given by number; the negative prompt is number 0."""
    text, pooled = embeddings(prompts)
    negative, negative_pooled = embeddings([0] * len(prompts))
    made: dict[str, Any] = {
        "prompt_embeds": text,
        "pooled_prompt_embeds": pooled,
        "negative_prompt_embeds": negative,
        "negative_pooled_prompt_embeds": negative_pooled,
        "num_inference_steps": steps,
        "height": 64,
        "width": 64,
        "output_type": "latent",
        "generator": [torch.Generator().manual_seed(seed + row) for row in range(len(prompts))],
    }
    if name == "flux":
        made["true_cfg_scale"] = 3.0
    return {**made, **more}


def draw(pipe: Any, made: dict[str, Any]) -> torch.Tensor:
    """Latents of one call."""
    return exam.draw(pipe, made).images
