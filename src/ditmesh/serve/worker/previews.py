"""Previews: the image that a step points to, as a small file."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from torch import Tensor

from ...generate.steps import SchedulerStep

if TYPE_CHECKING:
    from PIL.Image import Image

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
