"""Tiny transformers with random weights, one per class, and inputs for them. All float32, 8 heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import diffusers
import torch
from torch import nn

from ditmesh.layout.conventions import Conventions, Size, Way

# B=1 with lengths that divide by nothing, B=2 with ragged masks where the model takes masks.
ODD = Size(rows=7, cols=7, text=13, batch=1)
RAGGED = Size(rows=8, cols=8, text=32, batch=2)


def _dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=8,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )


def _pixart() -> nn.Module:
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=8,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=64,
        caption_channels=32,
    )


def _sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=8,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=16,
        pos_embed_max_size=12,
        dual_attention_layers=(0,),  # as in SD3.5-medium
        qk_norm="rms_norm",
    )


def _flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=8,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )


# How the pipelines call the model, where that is not with (B, C, H, W) latents.
WAYS = {"PixArt": Way("bchw", masked="image"), "Flux": Way("bsc")}

MAKERS: dict[str, Callable[[], nn.Module]] = {"DiT": _dit, "PixArt": _pixart, "SD3": _sd3, "Flux": _flux}


@cache
def tiny(name: str) -> nn.Module:
    """The tiny model of a family, the same weights in every process."""
    torch.manual_seed(0)
    model = MAKERS[name]().eval()
    # Fresh models hold zeros and ones in places (biases, scale tables); a mistake there would not show.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def inputs(name: str, size: Size, masks: bool = True) -> dict[str, Any]:
    """Arguments of the model's forward; with B=2 every mask is ragged."""
    model = tiny(name)
    made = Conventions(model, replace(WAYS.get(name, Way("bchw")), optional=masks)).inputs(size)
    for key, value in [*made.items(), *made.get("joint_attention_kwargs", {}).items()]:
        if "mask" in key and isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            value.fill_(True)
            if size.batch > 1 and masks:
                value[0, ..., -5 if value.shape[-1] > 5 else -1 :] = False
    return made


def run(model: nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    """One forward without gradients."""
    with torch.no_grad():
        return model(**arguments)[0]


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of the truth."""
    return float((value - truth).abs().max() / truth.abs().max())
