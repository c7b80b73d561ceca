"""Small pictures of what latents show while they are being denoised."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

# Colours that are decoded to find out what latents mean, and pixels of latents of each.
SAMPLES, SIDE = 96, 4


@dataclass(frozen=True)
class LatentColours:
    """The colour that a latent pixel stands for, as a linear function of its channels.

    Attributes:
        factors: (channels + 1, 3) float32; the last row is added. Colours are from 0 to 1.
        scale: pixels of the picture for one of the VAE's latents, along a side.
    """

    factors: Tensor
    scale: int

    def picture(self, latents: Tensor, pipeline: type[Any], width: int, height: int) -> Image | None:
        """A picture of the first latents of a batch, one pixel for each of theirs; None: they are of another form.

        Args:
            latents: as a pipeline's callback has them: (batch, channels, [frames,] height, width), or packed into
                tokens where the pipeline's class has ``_unpack_latents``.
            pipeline: class of the pipeline.
            width, height: of the picture that is generated; of use for packed latents only.
        """
        from PIL import Image

        latents = latents[:1].float()
        if latents.ndim == 3 and hasattr(pipeline, "_unpack_latents"):
            if latents.shape[1] != (width // self.scale // 2) * (height // self.scale // 2):
                return None
            latents = pipeline._unpack_latents(latents, height, width, self.scale)
        if latents.ndim == 5:
            latents = latents[:, :, 0]
        channels = self.factors.shape[0] - 1
        if latents.ndim != 4 or latents.shape[1] != channels:
            return None
        colours = latents[0].movedim(0, -1) @ self.factors[:-1] + self.factors[-1]
        return Image.fromarray((colours.nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8).numpy())


def latent_colours(pipe: Any) -> LatentColours | None:
    """What the latents of a pipeline mean, by least squares over what its VAE decodes plain ones to.

    None: it has no VAE that is understood.
    """
    vae = getattr(pipe, "vae", None)
    config = getattr(vae, "config", {})
    channels = config.get("latent_channels") or config.get("z_dim")
    if vae is None or not channels:
        return None
    try:
        return _fitted(vae, config, channels, getattr(pipe, "vae_scale_factor", 8))
    except Exception as error:
        # Previews are not worth a pipeline that cannot be loaded.
        log.warning("there are no previews: %s cannot be looked at (%s)", type(vae).__name__, error)
        return None


def _fitted(vae: Any, config: Mapping[str, Any], channels: int, scale: int) -> LatentColours | None:
    weight = next(vae.parameters())
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    latents = torch.randn(SAMPLES, channels, generator=torch.Generator().manual_seed(0))
    if mean is not None and deviation is not None:
        decoded = latents * torch.tensor(deviation).flatten() + torch.tensor(mean).flatten()
    else:
        decoded = latents / (config.get("scaling_factor") or 1.0) + (config.get("shift_factor") or 0.0)
    video = any(isinstance(part, torch.nn.Conv3d) for part in vae.modules())
    plain = decoded.reshape(SAMPLES, channels, *[1] * (3 if video else 2)).expand(-1, -1, *[1] * video, SIDE, SIDE)
    with torch.no_grad():
        parts = plain.to(weight.device, weight.dtype).split(8)
        shown = torch.cat([vae.decode(part, return_dict=False)[0].float().cpu() for part in parts])
    colours = shown.flatten(2).mean(dim=2)[:, :3] / 2 + 0.5
    if colours.shape[1] != 3 or not colours.isfinite().all():
        return None
    given = torch.cat([latents, torch.ones(SAMPLES, 1)], dim=1)
    factors = torch.linalg.lstsq(given, colours).solution
    return LatentColours(factors, scale)
