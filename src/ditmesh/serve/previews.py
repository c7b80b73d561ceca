"""Small pictures of what latents show, without the autoencoder.

A linear map from a latent's channels to red, green and blue gives a recognisable thumbnail, at the latents' resolution.
It is fitted by least squares to the pictures that have been finished so far, whatever the model packs its latents into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..core.patching import Patch

if TYPE_CHECKING:
    from PIL.Image import Image

# Longest side of a preview in pixels, at least, where it is made larger than the latents.
SIDE = 128
# What an earlier picture counts for beside the latest; what keeps a fit to few pixels tame, of the largest channel.
DECAY, RIDGE = 0.9, 1e-3


@dataclass
class Latents:
    """What a request's latents are after a step: as they are, and the picture that they point to, if that is known."""

    noisy: Tensor
    estimate: Tensor | None = None


def watch_steps(scheduler: Any, seen: Callable[[Callable[[], Latents | None]], None]) -> Callable[[], None]:
    """Call ``seen`` after every step of a scheduler, with a function that makes `Latents` of it; returns the undo."""

    def step(output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        index = getattr(scheduler, "step_index", None)
        result = patch.original(output, timestep, sample, *args, **kwargs)
        if index is None and (after := getattr(scheduler, "step_index", None)) is not None:
            index = after - 1

        def latents() -> Latents | None:
            noisy = result[0] if isinstance(result, tuple) else result.prev_sample
            if not isinstance(noisy, Tensor) or not isinstance(sample, Tensor):
                return None
            return Latents(noisy, estimated(scheduler, index, output, timestep, sample))

        seen(latents)
        return result

    patch = Patch(scheduler, "step", step)
    return patch.undo


def estimated(scheduler: Any, index: int | None, output: Any, timestep: Any, sample: Tensor) -> Tensor | None:
    """The picture (as latents) that a step's model output points to; None: this scheduler does not tell.

    For flow matching x0 = x - sigma v; for DDPM-like schedulers as their ``prediction_type`` says.

    Args:
        scheduler: of the pipeline, with its timesteps set.
        index: number of the step; None: it is looked up by the timestep.
        output: of the model, guided.
        timestep, sample: of the step.
    """
    if not isinstance(output, Tensor):
        return None
    if output.shape[1:2] != sample.shape[1:2] and output.dim() > 1:
        # It predicts a variance as well.
        output = output.chunk(2, dim=1)[0]
    kind = getattr(scheduler.config, "prediction_type", "flow_prediction")
    sigmas, alphas = getattr(scheduler, "sigmas", None), getattr(scheduler, "alphas_cumprod", None)
    if isinstance(alphas, Tensor) and kind in ("epsilon", "v_prediction", "sample"):
        alpha = float(alphas[min(int(timestep), len(alphas) - 1)])
        if kind == "sample":
            return output
        if kind == "epsilon":
            return (sample - (1 - alpha) ** 0.5 * output) / alpha**0.5
        return alpha**0.5 * sample - (1 - alpha) ** 0.5 * output
    if isinstance(sigmas, Tensor) and index is not None and index < len(sigmas):
        return sample - float(sigmas[index]) * output
    return None


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

    def learn_from(self, latents: Latents, image: Image) -> None:
        """Take in a picture and the latents of its last step."""
        placed = grid(latents.noisy, image.width / image.height)
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
