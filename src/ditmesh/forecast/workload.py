"""What a request is in tokens: the one way to count them, for plans, memory checks and `ditmesh inspect` alike."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import InputError
from ..generate.job import makes_videos
from ..generate.model_info import ModelInfo
from .auto import usual_text
from .catalogue import Shape
from .memory.phases import Request

# What a pipeline's call takes the number of frames as.
FRAMES = ("num_frames", "video_length")


def request_of(
    info: ModelInfo,
    size: tuple[int, int] | None = None,
    text: int | None = None,
    pictures: int = 1,
    guidance: bool | None = None,
    frames: int | None = None,
) -> Request:
    """A request of the pipeline in a folder; what is None is as usual.

    Args:
        info: the pipeline.
        size: width and height in pixels.
        text: text tokens.
        pictures: of one call.
        guidance: whether it has two branches; None: unless the transformer has guidance distilled in.
        frames: of a video, as the pipeline's call counts them; not those of the latents.

    Raises:
        InputError: the model cannot make that size or that number of frames.
    """
    if size is not None:
        info.check_size(*size)
    if frames is not None:
        check_frames(info, frames)
    width, height = size or usual_size(info)
    video = frames or usual_frames(info)
    cells, rows, cols = info.token_grid(width, height, video)
    distilled = bool(info.transformer.get("guidance_embeds"))
    branches = 2 - distilled if guidance is None else 1 + guidance
    length = usual_text(_class(info)) if text is None else text
    return Request(width, height, rows, cols, cells, length, pictures, branches, info.latent_frames(video))


def request_of_shape(
    shape: Shape,
    size: tuple[int, int] | None = None,
    text: int | None = None,
    pictures: int = 1,
    guidance: bool | None = None,
    frames: int | None = None,
) -> Request:
    """The same of a model whose sizes ship."""
    if frames is not None:
        if shape.num_frames == 1:
            raise InputError(f"--frames {frames}: {shape.name} makes images; leave --frames out")
        if (frames - 1) % shape.frames:
            less = frames - (frames - 1) % shape.frames
            raise InputError(
                f"frames {frames}: {shape.name} makes {shape.frames}k + 1; use {less} or {less + shape.frames}"
            )
    width, height = size or shape.size
    video = frames or shape.num_frames
    shape.tokens(width, height, video)
    return Request(
        width,
        height,
        height // shape.pixels,
        width // shape.pixels,
        (video - 1) // shape.frames + 1,
        shape.text if text is None else text,
        pictures,
        shape.branches if guidance is None else 1 + guidance,
    )


def check_frames(info: ModelInfo, frames: int) -> None:
    """Refuse frames of a pipeline that makes images, and a number that the autoencoder rounds to another one.

    Raises:
        InputError: naming the option, or the nearest possible numbers.
    """
    if makes_videos(info.pipeline_class) is False and not _defaults(info, FRAMES):
        raise InputError(f"--frames {frames}: {info.pipeline_class} makes images; leave --frames out")
    info.check_frames(frames)


def usual_size(info: ModelInfo) -> tuple[int, int]:
    """Width and height in pixels that a pipeline makes when it is not told; 1024 x 1024 where nothing says."""
    if info.default_size is not None:
        return info.default_size
    width, height = _defaults(info, ("width",)), _defaults(info, ("height",))
    return (width, height) if width and height else (1024, 1024)


def usual_frames(info: ModelInfo) -> int:
    """Frames of a video that a pipeline makes when it is not told; 1 of a pipeline that makes images."""
    own = info.transformer.get("sample_frames")
    return info.default_frames or _defaults(info, FRAMES) or (own if isinstance(own, int) else 1)


def _defaults(info: ModelInfo, names: tuple[str, ...]) -> int | None:
    """The first of these arguments that the pipeline's call has a number for."""
    kind = _class(info)
    given = {} if kind is None else inspect.signature(kind.__call__).parameters
    defaults = (given[name].default for name in names if name in given)
    return next((value for value in defaults if isinstance(value, int)), None)


def _class(info: ModelInfo) -> type[Any] | None:
    """The pipeline's class; None: it is none of diffusers."""
    import diffusers

    kind = getattr(diffusers, info.pipeline_class, None)
    return kind if isinstance(kind, type) else None
