"""Reference images of edit and control models: how they reach the conditions of a sample.

A family that takes them has a parameter ``references`` in its `encode`: for every caption an image (RGB, of the size of
the sample's bucket) or None. It may have an attribute ``reference``: what the images are for, or None if the pipeline
at hand takes none; with a name there, every sample has to have one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageOps

from ...errors import ConfigError, InputError
from ..config import TrainConfig
from ..families import Conditions, Family
from .samples import Sample, crop_to_fill


def takes_references(family: Family) -> bool:
    """True if a family makes conditions of reference images."""
    takes = "references" in inspect.signature(family.encode).parameters
    return takes and getattr(family, "reference", "any") is not None


def check_references(pipe: Any, family: Family, config: TrainConfig, samples: Sequence[Sample]) -> None:
    """Refuse reference images that the pipeline does not take, and a data set without those that it needs.

    Observed families know their inputs after `check_size`.

    Raises:
        ConfigError, InputError: one sentence.
    """
    name = type(pipe).__name__
    given = [one for one in config.data.sets if one.has_references]
    if given and not takes_references(family):
        one = given[0]
        setting = "conditioning_dir" if one.conditioning_dir is not None else "conditioning_image_column"
        raise ConfigError(
            f"{setting}={getattr(one, setting)!r}: {name} is trained without reference images; leave it out, or take "
            "an edit or control pipeline"
        )
    for sample in samples:
        if len(sample.attached.references) > 1:
            raise InputError(
                f"{sample.name} has {len(sample.attached.references)} conditioning images, and {name} is trained with "
                "one of each sample; give one"
            )
    if takes_references(family) and hasattr(family, "reference"):
        without = [sample.name for sample in samples if not sample.attached.references]
        if without:
            raise InputError(
                f"{name} is trained with reference images, and {len(without)} of {len(samples)} samples have none "
                f"({without[0]}); name them with conditioning_dir or conditioning_image_column"
            )


def reference_image(sample: Sample, size: tuple[int, int], flip: bool) -> Image.Image | None:
    """The reference image of a sample, cut to its bucket as its image is, and mirrored with it; None: it has none.

    Raises:
        OSError: it is corrupt; names it.
    """
    if not sample.attached.references:
        return None
    found = crop_to_fill(sample.attached.references[0].picture(), size)
    return ImageOps.mirror(found) if flip else found


def conditions_of(
    family: Family,
    pipe: Any,
    said: Sequence[Any],
    length: int | None,
    references: Sequence[Image.Image | None] | None,
) -> Conditions:
    """The conditions of captions, and of the image that belongs to each; None: of captions alone."""
    if references is None:
        return family.encode(pipe, said, length)
    # Families without the parameter were refused before.
    encode: Any = family.encode
    return encode(pipe, said, length, references=references)
