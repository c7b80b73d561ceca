"""Small inputs for any diffusers transformer, made from the names of its forward's parameters.

diffusers' transformers share a vocabulary (`hidden_states`, `encoder_hidden_states`, `timestep`, `img_ids` …)
and say their widths in their config. That is enough to call most of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

# Config entries that hold the width of `encoder_hidden_states`, most specific first.
TEXT_WIDTHS = (
    "caption_channels",
    "joint_attention_dim",
    "cross_attention_dim",
    "text_embed_dim",
    "text_dim",
    "cap_feat_dim",
)


@dataclass(frozen=True)
class Size:
    """Size of a sample: image tokens are rows × cols (× frames), text tokens are text."""

    rows: int
    cols: int
    text: int
    batch: int = 2
    frames: int = 1


class Conventions:
    """Makes the keyword arguments of a transformer's forward.

    Args:
        model: the transformer; its config tells widths.
        dims: dimensions of `hidden_states`: 4 (B, C, H, W), 3 (B, S, C) or 5 (B, C, F, H, W).
        optional: also pass optional masks, so that a probe sees what follows them.
    """

    def __init__(self, model: nn.Module, dims: int, optional: bool) -> None:
        self.config: Any = model.config
        self.dims = dims
        self.optional = optional
        self.parameters = inspect.signature(type(model).forward).parameters
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

    def inputs(self, size: Size, seed: int = 0) -> dict[str, Any]:
        """Arguments by name, the same for the same size and seed."""
        generator = torch.Generator().manual_seed(seed)
        made = {name: self._make(name, size, generator) for name in self.parameters}
        return {name: value for name, value in made.items() if value is not None}

    def _make(self, name: str, size: Size, generator: torch.Generator) -> Any:
        tokens = size.rows * size.cols * size.frames

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        match name:
            case "hidden_states":
                return noise(*self._latent_shape(size))
            case "encoder_hidden_states":
                width = self._first(TEXT_WIDTHS)
                return noise(size.batch, size.text, width) if width else None
            case "pooled_projections":
                width = self._first(("pooled_projection_dim",))
                return noise(size.batch, width) if width else None
            case "timestep":
                return torch.full((size.batch,), 500, device=self.device)
            case "class_labels":
                return torch.zeros(size.batch, dtype=torch.long, device=self.device)
            case "guidance" if self._first(("guidance_embeds",)):
                return torch.full((size.batch,), 3.5, device=self.device)
            case "img_ids":
                rows = torch.arange(size.rows * size.frames).repeat_interleave(size.cols)
                cols = torch.arange(size.cols).repeat(size.rows * size.frames)
                return torch.stack([torch.zeros_like(rows), rows, cols], dim=-1).to(self.device, self.dtype)
            case "txt_ids":
                return torch.zeros(size.text, 3, device=self.device, dtype=self.dtype)
            case "added_cond_kwargs":
                return {"resolution": None, "aspect_ratio": None}
            case "return_dict":
                return False
            case "attention_mask" if self.optional:
                return torch.ones(size.batch, tokens, device=self.device)
            case "encoder_attention_mask" if self.optional:
                return torch.ones(size.batch, size.text, device=self.device)
            case "joint_attention_kwargs" if self.optional:
                ones = torch.ones(size.batch, 1, 1, tokens + size.text, dtype=torch.bool, device=self.device)
                return {"attention_mask": ones}
        return None

    def _latent_shape(self, size: Size) -> tuple[int, ...]:
        channels = self._first(("in_channels",)) or 4
        patch = self._first(("patch_size",)) or 1
        if isinstance(patch, (tuple, list)):
            patch = patch[-1]
        if self.dims == 3:
            return (size.batch, size.rows * size.cols * size.frames, channels)
        plane = (size.rows * patch, size.cols * patch)
        return (size.batch, channels, *plane) if self.dims == 4 else (size.batch, channels, size.frames, *plane)

    def _first(self, names: tuple[str, ...]) -> Any:
        return next((value for name in names if (value := getattr(self.config, name, None)) is not None), None)


def candidates(model: nn.Module) -> Iterator[Conventions]:
    """Ways to call the model, the most informative first; the caller tries them in turn."""
    for optional, dims in product((True, False), (4, 3, 5)):
        yield Conventions(model, dims, optional)
