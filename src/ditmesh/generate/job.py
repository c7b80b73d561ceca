"""What is asked for, as plain data that every rank gets alike, and the checks before a rank starts."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from ..config import ParallelConfig
from ..errors import ConfigError, InputError
from ..strategies import support
from .model_info import ModelInfo
from .receipt import LONGEST_PROMPT, MOST_PIXELS, MOST_STEPS, MOST_TOGETHER, Dtype, Receipt

# Pictures of one call of the pipeline when nobody says how many, and of a whole job at most.
PER_CALL = 64
MOST_PICTURES = 100_000


@dataclass(frozen=True)
class Job:
    """Pictures to generate, in plain data that every rank gets alike.

    Attributes:
        model: folder or hub id to load.
        name: the model as the user named it.
        pipeline_class: class of the pipeline, as ``model_index.json`` has it.
        prompts: one or more; class names when the model is class-conditional.
        labels: class numbers of the prompts when the model is class-conditional, else empty.
        out: folder for the PNGs.
        config: parallel configuration; ``"auto"``: the engine chooses.
        negative: negative prompt.
        steps: denoising steps; None: the pipeline's own number.
        guidance: guidance scale; None: the pipeline's own.
        size: width and height in pixels; None: the pipeline's own.
        max_sequence_length: longest prompt in tokens, where the pipeline takes it; None: the pipeline's own.
        seed: of the first picture; picture i has ``seed + i``.
        images: pictures per prompt.
        per_call: pictures that one call of the pipeline makes, at most.
        dtype: of the weights.
        timeout: deadline of every collective, in seconds.
        overwrite: pictures replace those of the same names that ditmesh has written.
        number: from 2 up, part of all the files' names: files of these names without it are there already.
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
    dtype: Dtype = "float32"
    timeout: float = 600.0
    overwrite: bool = False
    number: int = 1

    @property
    def total(self) -> int:
        """Number of pictures."""
        return len(self.prompts) * self.images

    @property
    def calls(self) -> int:
        """Number of calls of the pipeline."""
        return len(self.prompts) * self._calls_per_prompt

    @property
    def _calls_per_prompt(self) -> int:
        return -(-self.images // self.per_call)

    def call(self, number: int) -> Call:
        """Call ``number`` of the pipeline, from 0."""
        prompt, part = divmod(number, self._calls_per_prompt)
        start = part * self.per_call
        return Call(prompt, prompt * self.images + start, min(self.per_call, self.images - start))

    def call_of(self, index: int) -> int:
        """Number of the call that makes picture ``index``."""
        prompt, place = divmod(index, self.images)
        return prompt * self._calls_per_prompt + place // self.per_call


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
    """The pipeline is ready: seconds it took, and steps that every picture will take."""

    seconds: float
    steps: int


@dataclass(frozen=True)
class Stepped:
    """``pictures`` pictures have advanced by ``steps`` denoising steps; ``note``: what there is to say about them."""

    pictures: int
    steps: int
    note: str = ""


@dataclass(frozen=True)
class Generated:
    """A picture is on disk, with its receipt inside."""

    path: str
    receipt: Receipt


# --------------------------------------------------------------------------------------------------
# Before any rank starts


def check_job(job: Job, model: ModelInfo, devices: int) -> None:
    """Refuse what cannot be drawn, as far as the model's JSON files tell.

    Args:
        job: what is asked for.
        model: the model's files.
        devices: number of ranks.

    Raises:
        InputError: one sentence that names the thing, its value, and the way out.
    """
    _check_numbers(job)
    _check_texts(job)
    if job.size is not None:
        model.check_size(*job.size)
        if model.labels and job.size != model.default_size:
            own = "x".join(map(str, model.default_size or ()))
            raise InputError(
                f"size {job.size[0]}x{job.size[1]}: {model.pipeline_class} draws one size only"
                f"{f', {own}' if own else ''}; leave --size out"
            )
    _check_amount(job, job.size or model.default_size)
    if not isinstance(job.config, str):
        check_config(job.config, model, devices, job.size)
    check_folder(job.out)
    if devices > 1:
        check_layout(model)


def _check_numbers(job: Job) -> None:
    if job.steps is not None and job.steps < 1:
        raise InputError(f"{job.steps} steps draw nothing; use --steps 1 or more")
    if job.steps is not None and job.steps > MOST_STEPS:
        raise InputError(f"{job.steps} steps are more than any sampler has; use --steps {MOST_STEPS} or fewer")
    if job.guidance is not None and not isfinite(job.guidance):
        raise InputError(f"guidance {job.guidance} is not a number; use one such as --guidance 3.5")
    if job.images < 1:
        raise InputError(f"{job.images} images per prompt draw nothing; use --num-images 1 or more")
    if job.total > MOST_PICTURES:
        raise InputError(f"{job.total} pictures are more than {MOST_PICTURES}, the most of one job; use several jobs")
    if not 1 <= job.per_call <= MOST_TOGETHER:
        raise InputError(f"{job.per_call} pictures in one call are not possible; use --batch 1 to {MOST_TOGETHER}")
    if not -(2**63) <= job.seed <= 2**63 - job.total:
        raise InputError(f"seed {job.seed} does not fit into 64 bits; use a smaller one")


def _check_texts(job: Job) -> None:
    if not job.prompts:
        raise InputError('there is no prompt; write one, such as "a red fox", or give a file with --prompts')
    named = [(f"prompt {number}", prompt) for number, prompt in enumerate(job.prompts, 1)]
    for name, text in named:
        if not text.strip():
            raise InputError(f'{name} is empty; write what to draw, such as "a red fox"')
    for name, text in [*named, ("the negative prompt", job.negative or "")]:
        if len(text) > LONGEST_PROMPT:
            raise InputError(f"{name} has {len(text)} characters; use {LONGEST_PROMPT} at most")
        check_unicode(text, name)


def _check_amount(job: Job, size: tuple[int, int] | None) -> None:
    """Refuse pictures that are too many or too large for one call."""
    if size is None:
        return
    pixels, together = size[0] * size[1], min(job.images, job.per_call)
    if pixels * together > MOST_PIXELS:
        text = f"{together} pictures of {size[0]}x{size[1]} in one call are" if together > 1 else "the picture is"
        way = f"--batch {MOST_PIXELS // pixels}" if together > 1 and pixels <= MOST_PIXELS else "a smaller --size"
        raise InputError(f"{text} larger than {MOST_PIXELS} pixels, the most of one call; use {way}")


def check_unicode(text: str, name: str) -> None:
    """Refuse text that no file can hold: half of a surrogate pair, as bytes of another encoding become.

    Raises:
        InputError: naming the text.
    """
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
    if model.transformer_class in support.table():
        return
    from ..layout import known_models
    from ..layout.describe import checked

    if model.transformer_class not in known_models():
        checked(model.transformer_class, model.transformer)


def check_config(config: ParallelConfig, model: ModelInfo, devices: int, size: tuple[int, int] | None = None) -> None:
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
    heads = model.heads
    if heads is not None and config.ulysses > heads:
        raise ConfigError(
            f"ulysses={config.ulysses} is more than the {heads} attention heads of {model.transformer_class}; "
            f"use ulysses={heads} at most and ring for the rest"
        )
    size = size or model.default_size
    if size is not None:
        tokens = model.image_tokens(*size)
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
    check_unicode(str(out), option)


def check_folder(out: str | Path, option: str = "--out") -> None:
    """Make the folder and refuse one that cannot be written to.

    Args:
        out: the folder.
        option: of the command line that names it.

    Raises:
        InputError: naming the folder and the reason.
    """
    check_named(out, option)
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write to folder {str(out)!r} ({reason}); choose another one with {option}") from None


def job_for(
    model: ModelInfo, prompts: Sequence[str], out: str | Path, labels: Sequence[int] | None = None, **more: Any
) -> Job:
    """A job for a model.

    Args:
        model: the model's files.
        prompts, out: of the job.
        labels: numbers of the classes, when they are known; None: found by the prompts.
        more: the other fields of the job.

    Raises:
        InputError: a prompt is not one of the model's classes.
    """
    return Job(
        model=str(model.files) if model.local else model.name,
        name=model.name,
        pipeline_class=model.pipeline_class,
        prompts=tuple(prompts),
        out=str(out),
        labels=class_numbers(prompts, model) if labels is None else tuple(labels),
        **more,
    )


def class_numbers(prompts: Sequence[str], model: ModelInfo) -> tuple[int, ...]:
    """Class numbers for the prompts of a class-conditional model; empty for any other.

    Raises:
        InputError: a prompt is not one of the model's classes.
    """
    labels = model.labels
    if not labels:
        return ()
    folded = {name.casefold(): number for name, number in labels.items()}
    numbers = []
    for prompt in prompts:
        number = folded.get(prompt.strip().casefold())
        if number is None:
            close = difflib.get_close_matches(prompt.casefold(), list(folded), 3, 0.4) or list(folded)[:3]
            raise InputError(
                f"prompt {prompt!r}: {model.pipeline_class} draws classes and has none of that name; "
                f"use one of its {len(folded)}, such as {', '.join(map(repr, close))}"
            )
        numbers.append(number)
    return tuple(numbers)
