"""Masks of the loss: a weight for every latent, with a mean of one over a sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .attached import Part
from .samples import crop_to_fill


def mask_of(part: Part, size: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """The weights of a sample's latents, (h, w) in float32 with a mean of one.

    Args:
        part: the mask's image: white is what counts.
        size: (height, width) in pixels, to which it is cut as its image is.
        shape: (h, w) of the latents.

    Raises:
        OSError: it is corrupt, or black throughout; names it.
    """
    levels = np.asarray(crop_to_fill(part.mask(), size))
    values = torch.from_numpy(levels.copy()).float() / 255
    weights = F.adaptive_avg_pool2d(values[None], shape)[0]
    mean = weights.mean()
    if not mean > 0:
        raise OSError(
            f"the mask {part.name} is black throughout what is trained of its image, so nothing counts; make it white "
            "where the loss counts"
        )
    return weights / mean


def stacked_masks(masks: Sequence[Tensor | None], latents: Tensor) -> Tensor | None:
    """The masks of a batch in the form of its latents, (B, 1, [1,] h, w), on the CPU; None: no sample has one."""
    if all(mask is None for mask in masks):
        return None
    shape = latents.shape[-2:]
    every = torch.stack([torch.ones(shape) if mask is None else mask for mask in masks])
    return every.view(len(masks), *[1] * (latents.dim() - 3), *shape)
