"""The tokens of a request: the only place that counts them, for plans, memory checks and `ditmesh inspect`."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import InputError
from ..generate.model_info import ModelInfo
from .auto import batched, usual_text
from .catalogue import Shape
from .costs.work import Workload

# Argument names for the number of frames.
FRAMES = ("num_frames", "video_length")


def workload_of(
    model: ModelInfo | Shape,
    size: tuple[int, int] | None = None,
    text: int | None = None,
    pictures: int = 1,
    guidance: bool | None = None,
    frames: int | None = None,
    **more: Any,
) -> Workload:
    """The request for a model; None: the default.

    Args:
        model: the pipeline in a folder, or one with sizes that ship.
        size: width and height in pixels.
        text: text tokens.
        pictures: of one call.
        guidance: whether it has two branches; None: unless the transformer has guidance distilled in.
        frames: of a video, as the pipeline's call counts them; not those of the latents.
        more: other fields of `Workload`.

    Raises:
        InputError: the model cannot make that size or that number of frames.
    """
    if isinstance(model, Shape):
        if frames is not None:
            model.check_frames(frames)
        width, height = size or model.size
        cells, rows, cols = model.token_grid(width, height, frames or model.num_frames)
        branches, usual, latent_frames, together = model.branches, model.text, 0, model.batched
    else:
        if size is not None:
            model.check_size(*size)
        if frames is not None:
            check_frames(model, frames)
        width, height = size or usual_size(model)
        video = frames or usual_frames(model)
        cells, rows, cols = model.token_grid(width, height, video)
        branches = 2 - bool(model.transformer.get("guidance_embeds"))
        usual, latent_frames = usual_text(_class(model)), model.latent_frames(video)
        together = batched(model.pipeline_class)
    return Workload(
        rows,
        cols,
        cells,
        usual if text is None else text,
        pictures,
        branches if guidance is None else 1 + guidance,
        together,
        width=width,
        height=height,
        latent_frames=latent_frames,
        **more,
    )


def check_frames(info: ModelInfo, frames: int) -> None:
    """Reject frames for an image pipeline, and a number that the VAE would round.

    Raises:
        InputError: naming the option, or the nearest possible numbers.
    """
    if (kind := _class(info)) and not {*FRAMES, "video"} & {*inspect.signature(kind.__call__).parameters}:
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
