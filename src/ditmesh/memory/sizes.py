"""The sizes of a request: the only place that counts tokens, for memory checks, `inspect` and `plan`."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..generate.model_info import ModelInfo, parameters_of
from .catalogue import Shape, shapes

# Argument names for the number of frames.
FRAMES = ("num_frames", "video_length")
# Text tokens where the pipeline's call has no number for them.
TEXT_TOKENS = 256


@dataclass(frozen=True)
class Workload:
    """The sizes of a request, as every prediction of seconds and of bytes reads them.

    Attributes:
        rows, cols, frames: image tokens of a sample along height, width and time; text: its text tokens.
        batched: whether images and branches of guidance are rows of one call of the transformer; else each has its own.
        element: bytes of an element of the weights.
        width, height: in pixels; 0 where only tokens are known, which do not say what decoding takes.
        latent_frames: that the autoencoder decodes; 0: as many as there are tokens along time.
    """

    rows: int
    cols: int
    frames: int = 1
    text: int = 256
    pictures: int = 1
    branches: int = 1
    batched: bool = True
    steps: int = 28
    element: int = 2
    width: int = 0
    height: int = 0
    latent_frames: int = 0

    @property
    def image(self) -> int:
        """Image tokens of a sample."""
        return self.rows * self.cols * self.frames

    def calls(self, pictures: int, branches: int) -> tuple[int, int]:
        """Rows per call, and calls per step, for a number of images with several branches each."""
        return (pictures * branches, 1) if self.batched else (pictures, branches)


def workload_of(
    model: ModelInfo | Shape,
    size: tuple[int, int] | None = None,
    text: int | None = None,
    pictures: int = 1,
    guidance: bool | None = None,
    frames: int | None = None,
    **more: Any,
) -> Workload:
    """The request for a pipeline in a folder, or for one with sizes that ship; None: the default.

    `InputError`: the model cannot make that size or that number of frames.

    Args:
        pictures: of one call.
        guidance: whether it has two branches; None: unless the transformer has guidance distilled in.
        frames: of a video, as the pipeline's call counts them; not those of the latents.
        more: other fields of `Workload`.
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
        usual, latent_frames = _defaults(model, ("max_sequence_length",)) or TEXT_TOKENS, model.latent_frames(video)
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
    """Reject frames for an image pipeline, and a number that the VAE would round: `InputError` with the nearest."""
    if (given := parameters_of(info.pipeline_class)) and not {*FRAMES, "video"} & given.keys():
        raise InputError(f"--frames {frames}: {info.pipeline_class} makes images; leave --frames out")
    info.check_frames(frames)


def usual_size(info: ModelInfo) -> tuple[int, int]:
    """Width and height in pixels that a pipeline makes when it is not told; 1024 x 1024 where nothing says."""
    if info.default_size is not None:
        return info.default_size
    width, height = _defaults(info, ("width",)), _defaults(info, ("height",))
    shape = _shape(info)
    return (width, height) if width and height else (1024, 1024) if shape is None else shape.size


def usual_frames(info: ModelInfo) -> int:
    """Frames of a video that a pipeline makes when it is not told; 1 of a pipeline that makes images."""
    own = info.transformer.get("sample_frames")
    found = info.default_frames or _defaults(info, FRAMES) or (own if isinstance(own, int) else None)
    shape = _shape(info) if found is None else None
    return found or (1 if shape is None else shape.num_frames)


def _shape(info: ModelInfo) -> Shape | None:
    """The shape that ships for a pipeline's class."""
    return next((shape for shape in shapes().values() if shape.pipeline == info.pipeline_class), None)


def _defaults(info: ModelInfo, names: tuple[str, ...]) -> int | None:
    """The first of these arguments that the pipeline's call has a number for."""
    given = parameters_of(info.pipeline_class)
    defaults = (given[name].default for name in names if name in given)
    return next((value for value in defaults if isinstance(value, int)), None)


def batched(pipeline: str | None) -> bool:
    """True if a pipeline puts both branches of guidance into one call of its transformer, as its code says.

    Of a class that is not known: it does, which needs more.
    """
    import diffusers

    kind = getattr(diffusers, pipeline or "", None)
    if kind is None:
        return True
    code = inspect.getsource(kind.__call__)
    joined = r"cat\(\s*\[\s*(latents|latent_model_input)\s*(\]\s*\*\s*2|,\s*\1\s*\])"
    return re.search(joined + r"|latent_model_input = \w+\.repeat\(2\b", code) is not None
