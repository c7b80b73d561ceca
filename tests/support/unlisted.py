"""Tiny transformers that no table knows, in the forms that their pipelines call them in."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from support.models import fresh

WIDTHS = {"text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 2}
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "Helios": ("HeliosTransformer3DModel", {"in_channels": 16, "out_channels": 16}),
    "SkyReels": ("SkyReelsV2Transformer3DModel", {}),
    "SkyReels fps": ("SkyReelsV2Transformer3DModel + diffusion forcing", {}),
}


@cache
def unlisted(name: str) -> nn.Module:
    """The tiny model, the same weights in every process."""
    part, changes = MADE[name]
    return fresh(part, **WIDTHS, **changes)


def call_of(name: str, form: str, batch: int = 2) -> dict[str, Any]:
    """Arguments as a pipeline passes them: ``form`` is "plain", or "history", "forcing" for those that know it."""
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    channels = 16 if name == "Helios" else 4
    given: dict[str, Any] = {
        "hidden_states": noise(batch, channels, 3, 10, 14),
        "timestep": torch.tensor([300, 700][:batch]),
        "encoder_hidden_states": noise(batch, 9, 16),
        "return_dict": False,
    }
    if form == "history":
        indices = torch.arange(1 + 16 + 2 + 1 + 3).split([1, 16, 2, 1, 3])
        given |= {
            "indices_hidden_states": indices[4][None],
            "indices_latents_history_short": torch.cat([indices[0], indices[3]])[None],
            "indices_latents_history_mid": indices[2][None],
            "indices_latents_history_long": indices[1][None],
            "latents_history_short": noise(batch, channels, 2, 10, 14),
            "latents_history_mid": noise(batch, channels, 2, 10, 14),
            "latents_history_long": noise(batch, channels, 16, 10, 14),
        }
    if form == "forcing":
        given["timestep"] = torch.tensor([[100, 400, 800], [200, 500, 900]][:batch])
        given["enable_diffusion_forcing"] = True
        given["fps"] = [1, 0][:batch]
    return given
