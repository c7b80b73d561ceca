"""Images as arrays: floats (H, W, C) with values from 0 to 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..media.images import as_seen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Picture = NDArray[np.floating]


def as_picture(image: Any) -> Picture:
    """An image from a PIL image, an array of 8-bit or float values, or a tensor: float64 (H, W, C), 0 to 1.

    ``image``: PIL image, seen as `ditmesh.media.images` sees it, or (H, W) or (H, W, C) values: integers up to 255, or
    floats up to 1; an `InputError` if it has other dimensions.
    """
    if hasattr(image, "convert"):
        image = image if image.mode == "RGB" and not image.info else as_seen(image, "the image")
    elif hasattr(image, "detach"):
        image = image.detach().cpu().float().numpy()
    values = np.asarray(image)
    if values.ndim == 2:
        values = values[:, :, None]
    if values.ndim != 3:
        raise InputError(f"an image has (H, W, C) values, not {values.ndim} dimensions of {values.shape}")
    scale = 255.0 if np.issubdtype(values.dtype, np.integer) else 1.0
    return values.astype(np.float64) / scale
