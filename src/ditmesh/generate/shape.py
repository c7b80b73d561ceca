"""The output size for input images: the image's shape, unless another size is requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from .files import IMAGE_ARGUMENTS, InputFile, open_picture, open_video, pipeline_for
from .model_info import ModelInfo, parameters_of

# Default pixels of an image if neither the model's files nor the pipeline give a size.
USUAL_PIXELS = 1024 * 1024
# Inputs that determine the size; the first one given decides. A mask belongs to its image.
SHAPING = ("image", "video", "control")


def input_size(model: ModelInfo, files: Sequence[InputFile], strength: float | None = None) -> tuple[int, int] | None:
    """The output's width and height for a job's input files (see `ModelInfo.size_like`); None: the model's own size."""
    inputs = {file.role: file for file in files if file.role in (*SHAPING, "mask")}
    role = next((role for role in SHAPING if role in inputs), None)
    if role is None or model.labels:
        return None
    file = inputs[role]
    size = (open_video(file, 1)[0] if role == "video" else open_picture(file)).size
    if role == "image" and "mask" in inputs:
        check_mask_shape(size, open_picture(inputs["mask"]).size)
    if model.default_size is not None:
        return model.size_like(*size, model.default_size[0] * model.default_size[1])
    parameters = parameters_of(pipeline_for(model.pipeline_class, files, strength))
    width, height = (getattr(parameters.get(name), "default", None) for name in ("width", "height"))
    pixels = width * height if isinstance(width, int) and isinstance(height, int) else USUAL_PIXELS
    return model.size_like(*size, pixels)


def check_mask_shape(image: tuple[int, int], mask: tuple[int, int]) -> None:
    """Reject a mask of another shape than its image; one of the same shape and another size is scaled."""
    small, large = sorted((mask, image))
    if abs(small[0] * large[1] / large[0] - small[1]) > 1:
        raise InputError(
            f"the mask has {mask[0]}x{mask[1]} pixels and the image {image[0]}x{image[1]}, which is another shape; "
            "give a mask of the image's size"
        )


def stretched(pictures: Mapping[str, Any], size: tuple[int, int], step: int) -> str | None:
    """A sentence about input images of another shape than the output, of sides in multiples of ``step``; or None."""
    for role in SHAPING:
        picture = pictures.get(IMAGE_ARGUMENTS[role])
        picture = picture[0] if isinstance(picture, Sequence) and picture else picture
        found = getattr(picture, "size", None)
        if found is not None and abs(found[0] * size[1] / found[1] - size[0]) > step:
            return (
                f"--{role} has {found[0]}x{found[1]} pixels, and the size {size[0]}x{size[1]} has another shape: most "
                "pipelines stretch it; leave --size out to keep its shape"
            )
    return None
