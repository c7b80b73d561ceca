"""What is asked for, as plain data that every rank gets alike, and the checks before a rank starts."""

from __future__ import annotations

import difflib
import inspect
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from ..config import ParallelConfig
from ..errors import ConfigError, InputError
from ..strategies import support
from ..strategies.heads import check_heads
from .files import MOST_VIDEO_PIXELS, PICTURES, InputFile, check_encoder, check_roles, open_video, pipeline_for
from .model_info import ModelInfo
from .receipt import LONGEST_PROMPT, MOST_PIXELS, MOST_STEPS, MOST_TOGETHER, Dtype, Offload, Receipt

# Pictures of one call of the pipeline when nobody says how many, and of a whole job at most.
PER_CALL = 64
MOST_PICTURES = 100_000
# Frames of a video, and frames per second.
MOST_FRAMES, MOST_FPS = 4096, 1000


@dataclass(frozen=True)
class Job:
    """Pictures to generate, in plain data that every rank gets alike.

    Attributes:
        model: folder or hub id to load.
        name: the model as the user named it.
        pipeline_class: class of the pipeline, as ``model_index.json`` has it.
        prompts: one or more; class names when the model is class-conditional.
        labels: class numbers of the prompts when the model is class-conditional, else empty.
        out: folder for the PNGs and MP4s.
        config: parallel configuration; ``"auto"``: the engine chooses.
        negative: negative prompt.
        steps: denoising steps; None: the pipeline's own number.
        guidance: guidance scale; None: the pipeline's own.
        size: width and height in pixels; None: the pipeline's own.
        max_sequence_length: longest prompt in tokens, where the pipeline takes it; None: the pipeline's own.
        seed: of the first picture; picture i has ``seed + i``.
        images: pictures per prompt.
        per_call: pictures that one call of the pipeline makes, at most.
        frames: of a video; None: the pipeline's own number. A pipeline that makes as many as its input video has is
            given so many of them.
        fps: frames per second of a video; None: the pipeline's own, or `video.FPS`.
        dtype: of the weights.
        timeout: deadline of every collective, in seconds.
        overwrite: pictures replace those of the same names that ditmesh has written.
        files: input pictures and adapters.
        strength: how much of the input picture is generated anew, from 0 to 1; None: the pipeline's own.
        variant: of the weights' files, such as ``"fp16"``.
        offload: which components are on the device only while they work, see `offload.offload`.
        scheduler: class of the scheduler that takes the place of the pipeline's own; None: that one stays.
        sampled: `Loaded` is to hold the weights' `sampled_fingerprint`, for a receipt of an earlier version.
        number: from 2 up, part of all the files' names: files of these names without it are there already.
        check_memory: refuse what does not fit, before anything is read.
        memory_limit: bytes that a rank may take; None: what its device has left.
    """

    model: str
    name: str
    pipeline_class: str
    prompts: tuple[str, ...]
    out: str
    config: ParallelConfig | Literal["auto"] = "auto"
    labels: tuple[int, ...] = ()
    negative: str | None = None
    steps: int | None = None
    guidance: float | None = None
    size: tuple[int, int] | None = None
    max_sequence_length: int | None = None
    seed: int = 0
    images: int = 1
    per_call: int = PER_CALL
    frames: int | None = None
    fps: float | None = None
    dtype: Dtype = "float32"
    timeout: float = 600.0
    overwrite: bool = False
    files: tuple[InputFile, ...] = ()
    strength: float | None = None
    variant: str | None = None
    offload: Offload = "none"
    scheduler: str | None = None
    sampled: bool = False
    number: int = 1
    check_memory: bool = True
    memory_limit: float | None = None

    @property
    def total(self) -> int:
        """Number of pictures."""
        return len(self.prompts) * self.images

    @property
    def calls(self) -> int:
        """Number of calls of the pipeline."""
        return len(self.prompts) * -(-self.images // self.per_call)

    def call(self, number: int) -> Call:
        """Call ``number`` of the pipeline, from 0."""
        prompt, part = divmod(number, self.calls // len(self.prompts))
        start = part * self.per_call
        return Call(prompt, prompt * self.images + start, min(self.per_call, self.images - start))

    def call_of(self, index: int) -> int:
        """Number of the call that makes picture ``index``."""
        prompt, place = divmod(index, self.images)
        return prompt * (self.calls // len(self.prompts)) + place // self.per_call


@dataclass(frozen=True)
class Call:
    """One call of the pipeline: the number of its prompt, and its pictures ``first``, ``first + 1``, …"""

    prompt: int
    first: int
    images: int

    @property
    def indices(self) -> range:
        """Numbers of its pictures in the job."""
        return range(self.first, self.first + self.images)


@dataclass(frozen=True)
class Restart:
    """Ranks were lost, and those that are left went on.

    Attributes:
        request: number of the pipeline's call that was under way.
        step: denoising steps of theirs that were behind.
        before, after: numbers of ranks.
    """

    request: int
    step: int
    before: int
    after: int

    def plain(self) -> dict[str, int]:
        """As receipts have it."""
        return {"step": self.step, "from": self.before, "to": self.after}


@dataclass(frozen=True)
class Kept:
    """What is there already of a job that is gone on with.

    Attributes:
        folder: the journal of its transformer calls, see `journal`.
        done: numbers of the pictures that are on disk.
        restarts: what has happened to it.
    """

    folder: str
    done: frozenset[int] = frozenset()
    restarts: tuple[Restart, ...] = ()


# What `generation.generate` reports, from rank 0 only.


@dataclass(frozen=True)
class Loaded:
    """The pipeline is ready: seconds it took, steps that every picture will take, weights' fingerprint if asked for."""

    seconds: float
    steps: int
    sampled: str | None = None


@dataclass(frozen=True)
class Noted:
    """Something to tell the user in one line."""

    text: str


@dataclass(frozen=True)
class Stepped:
    """``pictures`` pictures have advanced by ``steps`` denoising steps; ``note``: what there is to say about them."""

    pictures: int
    steps: int
    note: str = ""


@dataclass(frozen=True)
class Generated:
    """A picture or video is on disk, with its receipt inside."""

    path: str
    receipt: Receipt


def check_job(job: Job, model: ModelInfo, devices: int) -> None:
    """Refuse what cannot be generated, or not be written, as far as the model's JSON files say.

    Args:
        job: what is asked for.
        model: the model's files.
        devices: number of ranks.

    Raises:
        InputError: one sentence that names the thing, its value, and the way out.
    """
    check_content(job, model, devices)
    check_folder(job.out)
    if devices > 1:
        check_layout(model)


def check_content(job: Job, model: ModelInfo, devices: int) -> None:
    """As `check_job`, of what is to be generated alone."""
    for option, value, most in (
        ("--steps", job.steps, MOST_STEPS),
        ("--num-images", job.images, MOST_PICTURES // len(job.prompts)),
        ("--batch", job.per_call, MOST_TOGETHER),
        ("--frames", job.frames, MOST_FRAMES),
    ):
        if value is not None and not 1 <= value <= most:
            raise InputError(f"{option} {value} is not possible; use 1 to {most}")
    if job.guidance is not None and not isfinite(job.guidance):
        raise InputError(f"guidance {job.guidance} is not a number; use one such as --guidance 3.5")
    if not -(2**63) <= job.seed <= 2**63 - job.total:
        raise InputError(f"seed {job.seed} does not fit into 64 bits; use a smaller one")
    for number, prompt in enumerate(job.prompts, 1):
        if not prompt.strip():
            raise InputError(f'prompt {number} is empty; write what to generate, such as "a red fox"')
        check_text(prompt, f"prompt {number}")
    check_text(job.negative or "", "the negative prompt")
    check_roles(job.files, job.strength)
    if job.files:
        pipeline_for(model.pipeline_class, job.files, job.strength)
        check_encoder(job.files, model.index)
    _check_video(job, model)
    if job.size is not None:
        model.check_size(*job.size)
        if model.labels and job.size != model.default_size:
            own = "x".join(map(str, model.default_size or ()))
            raise InputError(
                f"size {job.size[0]}x{job.size[1]}: {model.pipeline_class} has one size only"
                f"{f', {own}' if own else ''}; leave --size out"
            )
    size = job.size or model.default_size
    if size is not None:
        pixels, together = size[0] * size[1] * (job.frames or 1), min(job.images, job.per_call)
        most = MOST_PIXELS if job.frames is None else MOST_VIDEO_PIXELS
        if pixels * together > most:
            way = f"--batch {most // pixels}" if together > 1 and pixels <= most else "a smaller --size"
            frames = "" if job.frames is None else f" of {job.frames} frames"
            raise InputError(
                f"{together} x {size[0]}x{size[1]}{frames} are more than {most} pixels, the most of one call; use {way}"
            )
    if not isinstance(job.config, str):
        check_config(job.config, model, devices, job.size, job.frames or 1)


def _check_video(job: Job, model: ModelInfo) -> None:
    """Refuse videos that are not of the frames asked for, and frames and fps of pictures."""
    if job.frames is None and job.fps is None and model.frame_step is None:
        # Most make pictures, and diffusers takes seconds to import.
        return
    name = pipeline_for(model.pipeline_class, job.files, job.strength)
    videos = makes_videos(name)
    if videos:
        _check_cleaning(name)
    for option, value in (("--frames", job.frames), ("--fps", job.fps)):
        if value is not None and videos is False:
            raise InputError(f"{option} {value:g}: {model.pipeline_class} makes pictures; leave {option} out")
    if job.fps is not None and not 0 < job.fps <= MOST_FPS:
        raise InputError(f"--fps {job.fps:g} is not possible; use more than 0 and at most {MOST_FPS}")
    if job.frames is not None:
        model.check_frames(job.frames)
    for file in job.files:
        if file.role == "video" and not says_frames(name):
            there = len(open_video(file, job.frames))
            if job.frames is not None and there < job.frames:
                raise InputError(f"--video {file.path!r} has {there} frames, fewer than --frames {job.frames}")
            if job.frames is None:
                try:
                    model.check_frames(there)
                except InputError as error:
                    raise InputError(f"--video {file.path!r}: {error}, as --frames") from None
        if file.role in ("image", "video") and videos and min(job.images, job.per_call) > 1:
            raise InputError(f"--{file.role}: such videos are generated one by one; leave --batch {job.per_call} out")


def _check_cleaning(pipeline: str) -> None:
    """Refuse a pipeline that would break off over prompts: some of diffusers' need ftfy and do not say so."""
    import diffusers

    module = sys.modules.get(getattr(diffusers, pipeline).__module__)
    try:
        getattr(module, "prompt_clean", str)("a")
    except NameError:
        raise InputError(f"{pipeline} cleans prompts with ftfy, which is not installed; pip install ftfy") from None


def makes_videos(pipeline: str) -> bool | None:
    """Whether a class of pipelines makes videos; None: it is no class of diffusers."""
    import diffusers

    kind = getattr(diffusers, pipeline, None)
    if not isinstance(kind, type):
        return None
    return video_call(inspect.signature(kind.__call__).parameters)


def says_frames(pipeline: str) -> bool:
    """Whether a class of pipelines is told how many frames to make; another one makes as many as its input has."""
    import diffusers

    return "num_frames" in inspect.signature(getattr(diffusers, pipeline).__call__).parameters


def video_call(parameters: Mapping[str, Any]) -> bool:
    """Whether a pipeline's call makes videos, by the names of what it takes."""
    return "num_frames" in parameters or PICTURES["video"] in parameters


def check_text(text: str, name: str) -> None:
    """Refuse text that is too long, or that no file can hold: half of a surrogate pair.

    Raises:
        InputError: naming the text.
    """
    if len(text) > LONGEST_PROMPT:
        raise InputError(f"{name} has {len(text)} characters; use {LONGEST_PROMPT} at most")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} is not Unicode: character {error.start + 1} is {text[error.start]!r}, half of a pair; "
            "write it in UTF-8"
        ) from None


def check_layout(model: ModelInfo) -> None:
    """Refuse a transformer whose tokens nobody can place, before any rank loads its weights.

    A class that the support table knows has a layout. Any other is probed here, with two blocks and random
    weights, as every rank will probe it with the real ones.

    Raises:
        LayoutError: the class has no reviewed layout and the probe failed.
        InputError: the installed diffusers has no such class.
    """
    if model.transformer_class not in support.table():
        from ..layout import known_models
        from ..layout.describe import checked

        if model.transformer_class not in known_models():
            checked(model.transformer_class, model.transformer)


def check_config(
    config: ParallelConfig, model: ModelInfo, devices: int, size: tuple[int, int] | None = None, frames: int = 1
) -> None:
    """Refuse a configuration that does not fit the ranks, the model or the picture.

    Raises:
        ConfigError: naming both numbers and the way out.
    """
    config.check_world_size(devices)
    if config.inputs == "per-data-rank" and config.data > 1:
        raise ConfigError(
            f"inputs='per-data-rank' is for data={config.data} ranks with prompts of their own, but here all have "
            "the same; leave inputs out"
        )
    check_heads(config, model.heads, model.transformer_class)
    size = size or model.default_size
    if size is not None:
        tokens = model.image_tokens(*size, frames)
        if config.sequence > tokens:
            raise ConfigError(
                f"{config.sequence} ranks are to share the {tokens} image tokens of {size[0]}x{size[1]} pixels; "
                f"use at most {tokens} devices, or a larger --size"
            )


def check_named(out: str | Path, option: str = "--out") -> None:
    """Refuse the name of a folder that is none.

    Raises:
        InputError: naming the option.
    """
    if not str(out):
        raise InputError(f"{option} names no folder; write {option} . for the one you are in")
    check_text(str(out), option)


def check_folder(out: str | Path, option: str = "--out") -> None:
    """Make the folder and refuse one that cannot be written to.

    Args:
        out: the folder.
        option: of the command line that names it.

    Raises:
        InputError: naming the folder and the reason.
    """
    check_named(out, option)
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write to folder {str(out)!r} ({reason}); choose another one with {option}") from None


def job_for(model: ModelInfo, prompts: Sequence[str], out: str | Path, **more: Any) -> Job:
    """A job for a model.

    Args:
        model: the model's files.
        prompts, out: of the job.
        more: the other fields of the job; ``labels`` are found by the prompts if not given. ``size`` and ``frames`` of
            an embedded model are its own if not given: its pipeline's defaults are those of a model a thousand times
            as large.

    Raises:
        InputError: a prompt is not one of the model's classes.
    """
    if "sample_size" not in model.transformer:
        more["size"] = more.get("size") or model.default_size
    more["frames"] = more.get("frames") or model.default_frames
    return Job(
        model=str(model.files) if model.local else model.name,
        name=model.name,
        pipeline_class=model.pipeline_class,
        prompts=tuple(prompts),
        out=str(out),
        **(more if "labels" in more else {"labels": class_numbers(prompts, model), **more}),
    )


def class_numbers(prompts: Sequence[str], model: ModelInfo) -> tuple[int, ...]:
    """Class numbers for the prompts of a class-conditional model; empty for any other.

    Raises:
        InputError: a prompt is not one of the model's classes.
    """
    folded = {name.casefold(): number for name, number in model.labels.items()}
    for prompt in prompts if folded else ():
        if prompt.strip().casefold() not in folded:
            close = difflib.get_close_matches(prompt.casefold(), list(folded), 3, 0.4) or list(folded)[:3]
            raise InputError(
                f"prompt {prompt!r}: {model.pipeline_class} takes classes and has none of that name; "
                f"use one of its {len(folded)}, such as {', '.join(map(repr, close))}"
            )
    return tuple(folded[prompt.strip().casefold()] for prompt in prompts) if folded else ()
