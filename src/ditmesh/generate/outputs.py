"""The outputs of a pipeline's call: images or videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import InputError


@dataclass(frozen=True)
class Picture:
    """A PIL image, or (h, w, 3) float32 from 0 to 1."""

    image: Any

    @property
    def frames(self) -> Sequence[Any]:
        """The image alone."""
        return [self.image]


@dataclass(frozen=True)
class VideoFrames:
    """PIL images, or (frames, h, w, 3) float32 from 0 to 1."""

    frames: Sequence[Any]


PipelineOutput: TypeAlias = Picture | VideoFrames


def outputs_of(output: Any) -> list[PipelineOutput]:
    """The images or videos in a pipeline's output; an `InputError` if it holds something else."""
    images = getattr(output, "images", None)
    # Modular pipelines call them otherwise.
    videos = getattr(output, "frames", getattr(output, "videos", None))
    if images is not None and len(images) and not any(isinstance(image, (list, tuple)) for image in images):
        return [Picture(image) for image in images]
    if images is None and videos is not None and len(videos):
        return [VideoFrames(frames) for frames in videos]
    raise InputError(
        f"{type(output).__name__} holds neither images nor videos that can be written; call it from Python"
    )
