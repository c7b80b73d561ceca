"""Rewards that need no model. A video's number is the mean of its frames'; no number depends on the batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import BytesIO

import numpy as np
from PIL import Image

from ...errors import InputError, did_you_mean

COLOURS = {  # sRGB
    "red": (1.0, 0.0, 0.0), "orange": (1.0, 0.5, 0.0), "yellow": (1.0, 1.0, 0.0), "green": (0.0, 0.75, 0.0),
    "cyan": (0.0, 1.0, 1.0), "blue": (0.0, 0.0, 1.0), "purple": (0.5, 0.0, 0.75), "pink": (1.0, 0.4, 0.7),
}  # fmt: skip


def jpeg_size(images: np.ndarray, prompts: Sequence[str], compressible: bool = True) -> np.ndarray:
    """The bytes a pixel of an image as JPEG, negative. With ``compressible: false`` they are positive."""
    pixels = images.shape[-3] * images.shape[-2] * (-1 if compressible else 1)
    return _by_frame(images, prompts, lambda frame, _: len(encoded(frame, "JPEG", quality=95)) / pixels)


def colour(images: np.ndarray, prompts: Sequence[str], colour: str | None = None) -> np.ndarray:
    """How near, from 0 to 1, an image's mean (of pixels weighted by their saturation) is to a colour of `COLOURS`.
    Without ``colour`` it is the first one that the prompt names."""

    def of_frame(frame: np.ndarray, prompt: str) -> float:
        pixels = frame.reshape(-1, 3) / 255.0
        # The small number gives a grey image its plain mean.
        saturations = np.ptp(pixels, axis=1, keepdims=True) + 1e-6
        mean = (saturations * pixels).sum(axis=0) / saturations.sum()
        return 1.0 - float(np.sqrt(((mean - COLOURS[_named(colour, prompt)]) ** 2).sum() / 3.0))

    return _by_frame(images, prompts, of_frame)


def encoded(image: np.ndarray, format: str, **settings: int) -> bytes:
    """The file of an image."""
    file = BytesIO()
    Image.fromarray(image).save(file, format, **settings)
    return file.getvalue()


def _named(colour: str | None, prompt: str) -> str:
    words = re.findall(r"[a-z]+", prompt.lower()) if colour is None else [colour]
    if name := next((word for word in words if word in COLOURS), None):
        return name
    what = f"the prompt {prompt[:200]!r} names no colour" if colour is None else f"colour={colour!r} is no colour"
    near = "; give arguments: {colour: red}" if colour is None else did_you_mean(str(colour), COLOURS)
    raise InputError(f"{what} of {', '.join(COLOURS)}{near}")


def _by_frame(images: np.ndarray, prompts: Sequence[str], of_frame: Callable[[np.ndarray, str], float]) -> np.ndarray:
    pairs = zip(images if images.ndim == 5 else images[:, None], prompts, strict=True)
    return np.array([np.mean([of_frame(frame, prompt) for frame in video]) for video, prompt in pairs])


REWARDS = {"jpeg_size": jpeg_size, "colour": colour}
