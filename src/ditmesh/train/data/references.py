"""Images beside a caption: a sample's reference image, the first frame of a video, or the sample with a hole.

Pipelines that edit or are controlled take an image that the data set has for every sample. Those that make a video of
an image (``"first frame"``), or paint where a mask is white (``"hole"``), take the sample itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from ...errors import ConfigError, InputError
from ..config import TrainConfig
from ..observed.family import ObservedFamily
from .samples import Sample, crop_to_fill

# The name in `source_image` of an image with a part that is to be painted.
HOLE = "hole"
# Sides of a hole that is drawn, in shares of the image's.
HOLE_SIDES = (0.25, 0.75)


def check_references(pipe: Any, family: ObservedFamily, config: TrainConfig, samples: Sequence[Sample]) -> None:
    """Refuse reference images that the pipeline does not take, and a data set without those that it needs.

    Raises `ConfigError`, `InputError`: one sentence.
    """
    name = type(pipe).__name__
    given = [entry for entry in config.data.sets if entry.has_references]
    if given and family.reference is None:
        entry = given[0]
        setting = "conditioning_dir" if entry.conditioning_dir is not None else "conditioning_image_column"
        raise ConfigError(
            f"{setting}={getattr(entry, setting)!r}: {name} is trained without reference images; leave it out, or take "
            "an edit or control pipeline"
        )
    if family.reference is not None:
        without = [sample.name for sample in samples if sample.attached.reference is None]
        if without:
            raise InputError(
                f"{name} is trained with reference images, and {len(without)} of {len(samples)} samples have none "
                f"({without[0]}); name them with conditioning_dir or conditioning_image_column"
            )


def reference_image(sample: Sample, size: tuple[int, int], flip: bool) -> Image.Image | None:
    """The reference image of a sample, cut to its bucket as its image is, and mirrored with it; None: it has none.

    Raises `OSError`: it is corrupt; names it.
    """
    if sample.attached.reference is None:
        return None
    found = crop_to_fill(sample.attached.reference.picture(), size)
    return ImageOps.mirror(found) if flip else found


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
    image = Image.fromarray(whole.permute(1, 2, 0).contiguous().cpu().numpy())
    if kind != HOLE:
        return image
    if hole is not None:
        image.putalpha(hole.point([255] * 128 + [0] * 128))
        return image
    drawn = torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
    sides = [
        max(1, round(side * (HOLE_SIDES[0] + (HOLE_SIDES[1] - HOLE_SIDES[0]) * one)))
        for side, one in zip(image.size, drawn[:2], strict=True)
    ]
    left, top = (round((side - hole) * one) for side, hole, one in zip(image.size, sides, drawn[2:], strict=True))
    alpha = Image.new("L", image.size, 255)
    alpha.paste(0, (left, top, left + sides[0], top + sides[1]))
    image.putalpha(alpha)
    return image
