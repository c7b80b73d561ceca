"""Previews: the image that a step points to, what its latents show, and that as a small file."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...generate.steps import SchedulerStep

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

# Colours that are decoded to find out what latents mean, and pixels of latents of each.
SAMPLES, SIDE = 96, 4
# Longest side of a preview in pixels, at least, where it is made larger than the latents.
SHOWN_SIDE = 128


def estimated_image(step: SchedulerStep) -> Tensor | None:
    """The image (as latents) that a step's prediction points to; None: this scheduler does not tell.

    For flow matching x0 = x - sigma v; for DDPM-like schedulers as their ``prediction_type`` says.
    """
    scheduler, output, sample = step.scheduler, step.prediction, step.sample
    if not isinstance(output, Tensor) or not isinstance(sample, Tensor):
        return None
    if output.shape[1:2] != sample.shape[1:2] and output.dim() > 1:
        # It predicts a variance as well.
        output = output.chunk(2, dim=1)[0]
    kind = getattr(scheduler.config, "prediction_type", "flow_prediction")
    sigmas, alphas = getattr(scheduler, "sigmas", None), getattr(scheduler, "alphas_cumprod", None)
    if isinstance(alphas, Tensor) and kind in ("epsilon", "v_prediction", "sample"):
        alpha = float(alphas[min(int(step.timestep), len(alphas) - 1)])
        if kind == "sample":
            return output
        if kind == "epsilon":
            return (sample - (1 - alpha) ** 0.5 * output) / alpha**0.5
        return alpha**0.5 * sample - (1 - alpha) ** 0.5 * output
    if isinstance(sigmas, Tensor) and step.index is not None and step.index < len(sigmas):
        return sample - float(sigmas[step.index]) * output
    return None


def preview_jpeg(picture: Image) -> tuple[bytes, int, int]:
    """An image of latents as a JPEG that is large enough to be looked at, its width and height."""
    from PIL.Image import Resampling

    times = max(1, SHOWN_SIDE // max(picture.size))
    picture = picture.resize((picture.width * times, picture.height * times), Resampling.BICUBIC)
    data = BytesIO()
    picture.save(data, format="JPEG", quality=80)
    return data.getvalue(), picture.width, picture.height


@dataclass(frozen=True)
class LatentColours:
    """The colour that a latent pixel stands for, as a linear function of its channels.

    Attributes:
        factors: (channels + 1, 3) float32; the last row is added. Colours are from 0 to 1.
        scale: pixels of the image for one of the VAE's latents, along a side.
    """

    factors: Tensor
    scale: int

    def picture(self, latents: Tensor, width: int, height: int) -> Image | None:
        """An image of the first latents of a batch, one pixel each, of frames the middle one; None: of another form.

        Latents are (batch, channels, [frames,] height, width), or tokens of one latent pixel, or of two by two, in
        rows, for which the width and height of the image that is generated are needed.
        """
        from PIL import Image

        shown = latents.detach()[0].float().cpu()
        channels = self.factors.shape[0] - 1
        if shown.ndim == 2 and (patch := {channels: 1, 4 * channels: 2}.get(shown.shape[1])) is not None:
            down, across = height // self.scale // patch, width // self.scale // patch
            if not down * across or shown.shape[0] % (down * across):
                return None
            blocks = shown.reshape(-1, down, across, channels, patch, patch).permute(3, 0, 1, 4, 2, 5)
            shown = blocks.reshape(channels, -1, down * patch, across * patch)
        if shown.ndim == 4:
            shown = shown[:, shown.shape[1] // 2]
        if shown.ndim != 3 or shown.shape[0] != channels or not bool(shown.isfinite().all()):
            return None
        colours = (shown.movedim(0, -1) @ self.factors[:-1] + self.factors[-1]).clamp(0, 1)
        return Image.fromarray((colours * 255).round().to(torch.uint8).numpy())


def latent_colours(pipe: Any) -> LatentColours | None:
    """A linear map from a pipeline's latents to colours, by least squares over the VAE's images of plain latents.

    None: it has no VAE that is understood.
    """
    vae = getattr(pipe, "vae", None)
    config = getattr(vae, "config", {})
    channels = config.get("latent_channels") or config.get("z_dim")
    if vae is None or not channels:
        return None
    try:
        # Of an offloaded VAE the weights are elsewhere until it is called.
        weight = next(vae.parameters())
        device = getattr(pipe, "_execution_device", None) or weight.device
        latents = torch.randn(SAMPLES, channels, generator=torch.Generator().manual_seed(0))
        mean, deviation = config.get("latents_mean"), config.get("latents_std")
        if mean is not None and deviation is not None:
            plain = latents * torch.tensor(deviation).flatten() + torch.tensor(mean).flatten()
        else:
            plain = latents / (config.get("scaling_factor") or 1.0) + (config.get("shift_factor") or 0.0)
        frames = [1] * any(isinstance(part, torch.nn.Conv3d) for part in vae.modules())
        plain = plain.reshape(SAMPLES, channels, *frames, 1, 1).expand(-1, -1, *frames, SIDE, SIDE)
        with torch.no_grad():
            parts = plain.to(device, weight.dtype).split(8)
            shown = torch.cat([vae.decode(part, return_dict=False)[0].float().cpu() for part in parts])
        colours = shown.flatten(2).mean(dim=2)[:, :3] / 2 + 0.5
        factors = torch.linalg.lstsq(torch.cat([latents, torch.ones(SAMPLES, 1)], dim=1), colours).solution
        scale = getattr(pipe, "vae_scale_factor", getattr(pipe, "vae_spatial_compression_ratio", 8))
        return LatentColours(factors, scale) if factors.shape[1] == 3 and factors.isfinite().all() else None
    except Exception as error:
        # Previews are not worth a pipeline that cannot be loaded.
        log.warning("there are no previews: %s cannot be looked at (%s)", type(vae).__name__, error)
        return None
