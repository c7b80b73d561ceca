"""A job as plain data, the same on every rank, and its checks before a rank starts."""

from __future__ import annotations

import difflib
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ..config import ParallelConfig
from ..errors import ConfigError, InputError, reason_of
from ..media.videos import MOST_VIDEO_PIXELS
from ..request import (
    MOST_TOGETHER,
    FieldConfigError,
    FieldError,
    Offload,
    PictureRequest,
    check_text,
    field_values,
    size_of,
)
from ..requirements import not_installed
from ..strategies.heads import check_heads
from .arguments import check_output, video_call
from .files import InputFile, check_encoder, check_mask_support, check_roles, input_size, open_video, pipeline_for
from .model_info import ModelInfo, parameters_of
from .receipt import MOST_PIXELS, Dtype, Receipt

# Default number of images per pipeline call, and maximum number of a job.
PER_CALL = 64
MOST_PICTURES = 100_000
# Words in component names of models that generate audio or layered images.
_ODD = re.compile("audio|oobleck|vocoder|layered|acestep", re.IGNORECASE)


class PictureJob(PictureRequest):
    """A request for images of one or more prompts with its model and configuration: plain data for every rank.

    Attributes:
        model, name: folder or hub id to load, and the model as the user named it.
        prompts: in the place of ``prompt``; class names when the model is class-conditional (then ``labels`` has their
            numbers). Image i of all has ``seed + i``.
        config: ``"auto"``: the engine chooses.
        max_sequence_length: longest prompt in tokens, where the pipeline takes it; None: the pipeline's own.
        per_call: images that one call of the pipeline makes, at most.
        overwrite: images replace those of the same names that ditmesh has written.
        scheduler: class of the scheduler that takes the place of the pipeline's own; None: that one stays.
        check_memory, memory_limit: refuse what does not fit into so many bytes of a rank (None: what its device has
            left), before anything is read.
    """

    model: str
    name: str
    pipeline_class: str
    prompts: tuple[str, ...] = Field(min_length=1)
    out: str
    config: ParallelConfig | Literal["auto"] = "auto"
    labels: tuple[int, ...] = ()
    max_sequence_length: int | None = None
    per_call: int = PER_CALL
    dtype: Dtype = "float32"
    timeout: float = 600.0
    overwrite: bool = False
    files: tuple[InputFile, ...] = ()
    variant: str | None = None
    offload: Offload = "none"
    scheduler: str | None = None
    check_memory: bool = True
    memory_limit: float | None = None

    def changed(self, **fields: Any) -> PictureJob:
        """The job with other values of some fields."""
        return self.model_copy(update=fields)

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height in pixels; None: the pipeline's own."""
        return size_of(self)

    @property
    def total(self) -> int:
        """Number of images."""
        return len(self.prompts) * self.n

    @property
    def calls(self) -> int:
        """Number of calls of the pipeline."""
        return len(self.prompts) * -(-self.n // self.per_call)

    def call(self, number: int) -> PictureCall:
        """Call ``number`` of the pipeline, from 0."""
        prompt, part = divmod(number, self.calls // len(self.prompts))
        start = part * self.per_call
        return PictureCall(prompt, prompt * self.n + start, min(self.per_call, self.n - start))


@dataclass(frozen=True)
class PictureCall:
    """One call of the pipeline: the number of its prompt, and its images ``first``, ``first + 1``, …"""

    prompt: int
    first: int
    images: int

    @property
    def indices(self) -> range:
        """Numbers of its images in the job."""
        return range(self.first, self.first + self.images)


# Reports of `run.generate`, from rank 0 only.


@dataclass(frozen=True)
class Loaded:
    """The pipeline is ready: seconds that it took, steps that every image will take, and the configuration as data."""

    seconds: float
    steps: int
    config: dict[str, Any] | None = None


@dataclass(frozen=True)
class UserNote:
    """A one-line note for the user."""

    text: str


@dataclass(frozen=True)
class StepDone:
    """Progress: ``pictures`` images advanced by ``steps`` of ``of`` denoising steps; ``note`` is shown with it."""

    pictures: int
    steps: int
    of: int
    note: str = ""


@dataclass(frozen=True)
class Generated:
    """An image or video is on disk, with its receipt."""

    path: str
    receipt: Receipt


def check_job(job: PictureJob, model: ModelInfo, devices: int) -> None:
    """Reject a job that cannot be generated or written, as far as the model's JSON files tell, in one sentence."""
    check_content(job, model, devices)
    check_folder(job.out)


def check_content(job: PictureJob, model: ModelInfo, devices: int) -> None:
    """As `check_job`, for the content only."""
    for field, value, most in (("n", job.n, MOST_PICTURES // len(job.prompts)), ("batch", job.per_call, MOST_TOGETHER)):
        if not 1 <= value <= most:
            raise FieldError(field, "{" + field + "} {} is not possible; use 1 to {}", value, most)
    if not -(2**63) <= job.seed <= 2**63 - job.total:
        raise InputError(f"seed {job.seed} is not from -2**63 to 2**63 - {job.total}; use one of these")
    check_roles(job.files, job.strength)
    if job.files:
        kind = pipeline_for(model.pipeline_class, job.files, job.strength)
        check_mask_support(kind, job.files, model.transformer.get("in_channels"))
        check_encoder(job.files, model.index)
    if _ODD.search(f"{model.index} {model.vae.get('_class_name')}"):
        # Other models are checked on the ranks.
        check_output(model.pipeline_class, parameters_of(model.pipeline_class))
    _check_video(job, model)
    if job.size is not None:
        model.check_size(*job.size)
    if (size := job.size or model.default_size) is not None:
        _check_pixels(job, size)
    if not isinstance(job.config, str):
        check_config(job.config, model, devices, job.size, job.frames or 1)


def _check_pixels(job: PictureJob, size: tuple[int, int]) -> None:
    pixels, together = size[0] * size[1] * (job.frames or 1), min(job.n, job.per_call)
    most = MOST_PIXELS if job.frames is None else MOST_VIDEO_PIXELS
    if pixels * together > most:
        way = f"{{batch}} {most // pixels}" if together > 1 and pixels <= most else "a smaller {size}"
        frames = "" if job.frames is None else f" of {job.frames} frames"
        raise FieldError(
            "size",
            "{} x {}x{}{} are more than {} pixels, the most of one call; use " + way,
            *(together, *size, frames, most),
        )


def _check_video(job: PictureJob, model: ModelInfo) -> None:
    """Reject frame counts that the model does not generate, and frames and fps for image models."""
    images = model.frame_counts is None
    if job.frames is None and job.fps is None and (images or (not job.files and find_spec("ftfy") is not None)):
        # Most models generate images, and nothing is asked here that needs a pipeline class. Importing diffusers takes
        # seconds, and makes every later collection of garbage twice as long.
        return
    import diffusers

    name = pipeline_for(model.pipeline_class, job.files, job.strength)
    kind: Any = getattr(diffusers, name, None)
    videos = makes_videos(name)
    if videos:
        try:
            # Some pipelines clean prompts with ftfy without declaring it.
            getattr(sys.modules.get(kind.__module__), "prompt_clean", str)("a")
        except NameError:
            raise InputError(not_installed(f"{name}, which cleans prompts,", "ftfy", "video")) from None
    for field, value in (("frames", job.frames), ("fps", job.fps)):
        if value is not None and videos is False:
            why = "{" + field + "} {:g}: {} generates images; leave {" + field + "} out"
            raise FieldError(field, why, value, model.pipeline_class)
    if job.frames is not None:
        model.check_frames(job.frames)
    for file in job.files:
        if file.role == "video" and "num_frames" not in parameters_of(name):
            _check_input_frames(job, model, file)
        if file.role in ("image", "video") and videos and min(job.n, job.per_call) > 1:
            why = "{" + file.role + "}: such videos are generated one by one; leave {batch} {} out"
            raise FieldError(file.role, why, job.per_call)


def _check_input_frames(job: PictureJob, model: ModelInfo, file: InputFile) -> None:
    """Reject an input video with fewer frames than requested."""
    count = len(open_video(file, job.frames))
    if job.frames is not None and count < job.frames:
        why = "{video} {!r} has {} frames, fewer than {frames} {}"
        raise FieldError("video", why, file.path, count, job.frames)
    try:
        model.check_frames(count)
    except InputError as error:
        raise FieldError("video", "{video} {!r}: {}, as {frames}", file.path, error) from None


def makes_videos(pipeline: str) -> bool | None:
    """True if a pipeline class generates videos; None: it is not a diffusers class."""
    parameters = parameters_of(pipeline)
    return video_call(parameters) if parameters else None


def check_config(
    config: ParallelConfig, model: ModelInfo, devices: int, size: tuple[int, int] | None = None, frames: int = 1
) -> None:
    """Reject a configuration that does not fit the ranks, the model or the image, with a `ConfigError`."""
    config.check_world_size(devices)
    if config.inputs == "per-data-rank" and config.data > 1:
        raise ConfigError(
            f"inputs='per-data-rank' is for data={config.data} ranks with prompts of their own, but here all have "
            "the same; leave inputs out"
        )
    check_heads(config, model.heads, model.transformer_class)
    blocks = model.most_blocks
    if blocks is not None and config.pipe > blocks:
        raise ConfigError(
            f"pipe={config.pipe} is more stages than the {blocks} blocks of {model.transformer_class}; "
            f"use pipe={blocks} at most"
        )
    size = size or model.default_size
    if size is not None:
        tokens = model.image_tokens(*size, frames)
        if config.sequence > tokens:
            raise FieldConfigError(
                "size",
                "{} ranks cannot share the {} image tokens of {}x{} pixels; use at most {} devices, or a larger {size}",
                *(config.sequence, tokens, *size, tokens),
            )


def check_named(out: str | Path, option: str = "--out") -> None:
    """Reject a path that is not a folder."""
    if not str(out):
        raise InputError(f"{option} names no folder; write {option} . for the one you are in")
    check_text(str(out), option)


def check_folder(out: str | Path, option: str = "--out") -> None:
    """Create the folder that an option names, and reject one that cannot be written to."""
    check_named(out, option)
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot write to folder {str(out)!r} ({reason_of(error)}); choose another one with {option}"
        ) from None


def job_for(
    model: ModelInfo, request: PictureRequest, out: str | Path, prompts: Sequence[str] = (), **more: Any
) -> PictureJob:
    """A job for a model.

    `InputError`: a prompt is empty, too long or not one of the model's classes, or an input image cannot be read.

    Args:
        request: without a size, that of an input image is taken, see `input_size`; an embedded model has its own.
        more: the other fields of the job; ``labels`` are found by the prompts if not given.
    """
    fields, prompts = field_values(request), tuple(prompts) or (request.prompt,)
    size = size_of(request) or input_size(model, more.get("files", ()), request.strength)
    if "sample_size" not in model.transformer:
        size = size or model.default_size
    fields["width"], fields["height"] = size or (None, None)
    fields["frames"] = request.frames or model.default_frames
    if "labels" not in more:
        more["labels"] = class_numbers(prompts, model)
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise InputError(f'prompt {number} is empty; write what to generate, such as "a red fox"')
        check_text(prompt, f"prompt {number}")
    return PictureJob.read(
        **fields | {"prompt": ""},
        model=str(model.files) if model.local else model.name,
        name=model.name,
        pipeline_class=model.pipeline_class,
        prompts=prompts,
        out=str(out),
        **more,
    )


def class_numbers(prompts: Sequence[str], model: ModelInfo) -> tuple[int, ...]:
    """Class numbers for the prompts of a class-conditional model, which name its classes; empty for any other."""
    folded = {name.casefold(): number for name, number in model.labels.items()}
    for prompt in prompts if folded else ():
        if prompt.strip().casefold() not in folded:
            close = difflib.get_close_matches(prompt.casefold(), list(folded), 3, 0.4) or list(folded)[:3]
            raise InputError(
                f"prompt {prompt!r}: {model.pipeline_class} takes classes and has none of that name; "
                f"use one of its {len(folded)}, such as {', '.join(map(repr, close))}"
            )
    return tuple(folded[prompt.strip().casefold()] for prompt in prompts) if folded else ()
