"""Small pictures of what latents show, without the autoencoder.

A linear map from a latent's channels to red, green and blue gives a recognisable thumbnail, at the latents' resolution.
It is fitted by least squares to the pictures that have been finished so far, whatever the model packs its latents into.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

# Longest side of a preview in pixels, at least, where it is made larger than the latents.
SIDE = 128
# What an earlier picture counts for beside the latest; what keeps a fit to few pixels tame, of the largest channel.
DECAY, RIDGE = 0.9, 1e-3


def grid(latents: Tensor, ratio: float) -> Tensor | None:
    """The first sample's latents as (C, h, w), float32 on the CPU; None: they are no picture's.

    Args:
        latents: (B, C, h, w), the middle frame of (B, C, F, h, w), or tokens (B, S, C).
        ratio: width / height of the picture.
    """
    first = latents.detach()[0].float().cpu()
    if first.dim() == 4:
        first = first[:, first.shape[1] // 2]
    if first.dim() == 2:
        height = round((first.shape[0] / ratio) ** 0.5)
        if height < 1 or first.shape[0] % height:
            return None
        return first.T.reshape(first.shape[1], height, -1)
    return first if first.dim() == 3 else None


class Projection:
    """The linear map of one model, and what it was learned from."""

    def __init__(self) -> None:
        # Of products of channels, and of channels and colours.
        self._sums: tuple[np.ndarray, np.ndarray] | None = None
        self._map: np.ndarray | None = None

    def learn(self, latents: Tensor, image: Image) -> None:
        """Take in a picture and the latents that it was decoded from, (C, h, w); not those that are not finite."""
        from PIL.Image import Resampling

        if not bool(torch.isfinite(latents).all()):
            # The sums would hold it for ever.
            return
        channels, height, width = latents.shape
        small = image.convert("RGB").resize((width, height), Resampling.BOX)
        x = _with_one(latents)
        y = np.asarray(small, dtype=np.float64).reshape(-1, 3) / 255
        products, targets = x @ x.T / x.shape[1], x @ y / x.shape[1]
        if self._sums is not None and len(self._sums[0]) == channels + 1:
            products, targets = products + DECAY * self._sums[0], targets + DECAY * self._sums[1]
        self._sums = products, targets
        self._map = np.linalg.solve(products + RIDGE * products.diagonal().max() * np.eye(channels + 1), targets)

    def learn_from(self, latents: Tensor, image: Image) -> None:
        """Take in a picture and the latents of its last step."""
        placed = grid(latents, image.width / image.height)
        if placed is not None:
            self.learn(placed, image)

    def jpeg(self, latents: Tensor) -> tuple[bytes, int, int] | None:
        """A JPEG of latents (C, h, w), its width and height; None while nothing was learned."""
        from PIL import Image

        channels, height, width = latents.shape
        if self._map is None or len(self._map) != channels + 1 or not bool(torch.isfinite(latents).all()):
            return None
        rgb = (_with_one(latents).T @ self._map).clip(0, 1).reshape(height, width, 3)
        picture = Image.fromarray((rgb * 255).round().astype(np.uint8))
        times = max(1, SIDE // max(width, height))
        picture = picture.resize((width * times, height * times), Image.Resampling.BICUBIC)
        data = BytesIO()
        picture.save(data, format="JPEG", quality=80)
        return data.getvalue(), picture.width, picture.height


def _with_one(latents: Tensor) -> np.ndarray:
    flat = latents.reshape(latents.shape[0], -1).double().numpy()
    return np.concatenate([flat, np.ones((1, flat.shape[1]))])
