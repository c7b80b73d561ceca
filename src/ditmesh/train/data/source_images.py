"""Images beside a caption that are made of the sample itself: the first frame of a video, or an image with a hole.

A family says by ``source_image`` that its pipeline makes a video of an image (``"first frame"``), or paints in an
image where a mask is white (``"hole"``), and takes the images by the parameter ``references`` of its `encode`.
"""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor

from ..families import Family

# The name in `source_image` of an image with a part that is to be painted.
HOLE = "hole"
# Sides of a hole that is drawn, in shares of the image's.
HOLE_SIDES = (0.25, 0.75)


def source_image_of(family: Family) -> str | None:
    """The image that a family makes conditions of; observed families know it after `check_size`."""
    return getattr(family, "source_image", None)


def source_image(kind: str, values: Tensor, seed: int, hole: Image.Image | None = None) -> Image.Image:
    """The image of a sample.

    Args:
        kind: ``"first frame"``, or ``"hole"``: with a transparent part.
        values: (3, H, W) of an image, (3, F, H, W) of a video, in [-1, 1].
        seed: of the rectangle that is transparent if there is no ``hole``.
        hole: a mask, ``L`` and of the image's size, white where it is to be transparent.
    """
    first = values if values.dim() == 3 else values[:, 0]
    whole = ((first.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    found = Image.fromarray(whole.permute(1, 2, 0).contiguous().cpu().numpy())
    if kind != HOLE:
        return found
    if hole is not None:
        found.putalpha(hole.point([255] * 128 + [0] * 128))
        return found
    drawn = torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
    sides = [
        max(1, round(side * (HOLE_SIDES[0] + (HOLE_SIDES[1] - HOLE_SIDES[0]) * one)))
        for side, one in zip(found.size, drawn[:2], strict=True)
    ]
    left, top = (round((side - hole) * one) for side, hole, one in zip(found.size, sides, drawn[2:], strict=True))
    alpha = Image.new("L", found.size, 255)
    alpha.paste(0, (left, top, left + sides[0], top + sides[1]))
    found.putalpha(alpha)
    return found
