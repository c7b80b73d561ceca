"""Draw pictures from prompts: the checks before ranks start, and what every rank then does."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import support
from .config import ParallelConfig
from .errors import ConfigError, InputError
from .launch import Report
from .model_info import ModelInfo
from .receipt import Receipt, library_versions, write_png

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Job:
    """Pictures to draw, in plain data that every rank gets alike.

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
        dtype: of the weights.
        timeout: deadline of every collective, in seconds.
    """

    model: str
    name: str
    pipeline_class: str
    prompts: tuple[str, ...]
    out: str
    config: ParallelConfig | Literal["auto"]
    labels: tuple[int, ...] = ()
    negative: str | None = None
    steps: int | None = None
    guidance: float | None = None
    size: tuple[int, int] | None = None
    max_sequence_length: int | None = None
    seed: int = 0
    images: int = 1
    dtype: Dtype = "float32"
    timeout: float = 600.0

    @property
    def total(self) -> int:
        """Number of pictures."""
        return len(self.prompts) * self.images


@dataclass(frozen=True)
class Restart:
    """Ranks were lost, and those that are left went on.

    Attributes:
        request: number of the prompt whose pictures were being drawn.
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
    """What is there already of a job that can be gone on with.

    Attributes:
        folder: the journal of its transformer calls, see `journal`.
        drawn: numbers of the pictures that are on disk.
        restarts: what has happened to it.
    """

    folder: str
    drawn: frozenset[int] = frozenset()
    restarts: tuple[Restart, ...] = ()


# What `draw` reports, from rank 0 only.


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
class Drawn:
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
    if job.steps is not None and job.steps < 1:
        raise InputError(f"{job.steps} steps draw nothing; use --steps 1 or more")
    if job.images < 1:
        raise InputError(f"{job.images} images per prompt draw nothing; use --num-images 1 or more")
    if not -(2**63) <= job.seed <= 2**63 - job.total:
        raise InputError(f"seed {job.seed} does not fit into 64 bits; use a smaller one")
    if not job.prompts:
        raise InputError('there is no prompt; write one, such as "a red fox", or give a file with --prompts')
    for number, prompt in enumerate(job.prompts, 1):
        if not prompt.strip():
            raise InputError(f'prompt {number} is empty; write what to draw, such as "a red fox"')
    if job.size is not None:
        model.check_size(*job.size)
        if model.labels and job.size != model.default_size:
            own = "x".join(map(str, model.default_size or ()))
            raise InputError(
                f"size {job.size[0]}x{job.size[1]}: {model.pipeline_class} draws one size only"
                f"{f', {own}' if own else ''}; leave --size out"
            )
    if not isinstance(job.config, str):
        check_config(job.config, model, devices, job.size)
    check_folder(job.out)
    if devices > 1:
        check_layout(model)


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
    from .layout import known_models
    from .layout.describe import checked

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


def check_folder(out: str | Path) -> None:
    """Make the folder and refuse one that cannot be written to.

    Raises:
        InputError: naming the folder and the reason.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write to folder {str(out)!r} ({error.strerror or error}); choose another one with --out"
        ) from None


def class_numbers(prompts: Sequence[str], model: ModelInfo) -> tuple[int, ...]:
    """Class numbers for the prompts of a class-conditional model; empty for any other.

    Raises:
        InputError: a prompt is not one of the model's classes.
    """
    labels = model.labels
    if not labels:
        return ()
    import difflib

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


# --------------------------------------------------------------------------------------------------
# What every rank does


def draw(job: Job, kept: Kept | None = None, *, report: Report | None = None) -> float:
    """Load the pipeline, make it parallel, draw everything. Every rank of the job calls this.

    Rank 0 writes each PNG as soon as it has it and reports `Loaded`, `Stepped` and `Drawn`.

    Args:
        job: what to draw.
        kept: keep a journal, and go on from what it holds; None: draw everything, keep nothing.
        report: takes the reports; may be left out.

    Returns:
        Seconds that the pipeline's calls took on this rank, loading not included.

    Raises:
        InputError: the pipeline cannot do what is asked.
        LayoutError: the transformer's tokens could not be found out.
        JournalError: what the journal holds is of another request.
    """
    import torch.distributed as dist

    from .determinism import deterministic
    from .digests import weights_fingerprint
    from .engine import DENOISERS, denoisers, engine_of, parallelize
    from .hardware import environment
    from .journal import Journal
    from .mesh import Mesh

    grouped = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if grouped else 0
    say: Report = report if report is not None and rank == 0 else _nobody
    device = device_of_rank()
    started = time.perf_counter()
    pipe = load(job, device)
    parameters = call_parameters(pipe)
    steps = job.steps or _default(parameters, "num_inference_steps", 50)
    guidance = job.guidance if job.guidance is not None else _default(parameters, "guidance_scale", 0.0)
    facts: dict[str, Any] = {}
    if rank == 0:
        reproducible = not isinstance(job.config, str) and job.config.reproducible
        # With the settings that are in force while the pipeline runs; the weights before any is cut.
        with deterministic(device) if reproducible else contextlib.nullcontext():
            facts = {"weights": weights_fingerprint(pipe), "environment": environment(device)}
    mesh = None if isinstance(job.config, str) else Mesh(job.config, device=device, timeout=job.timeout)
    parallelize(pipe, job.config, mesh=mesh, timeout=job.timeout)
    journal = None
    if kept is not None:
        # Around everything else: it sees the calls that the pipeline makes, and whole outputs.
        models = {name: getattr(pipe, name) for name in DENOISERS if getattr(pipe, name, None) in denoisers(pipe)}
        journal = Journal(models, kept.folder, rank, engine_of(pipe).clock)
    done = kept.drawn if kept is not None else frozenset()
    say(Loaded(time.perf_counter() - started, steps))
    total = 0.0
    for number, prompt in enumerate(job.prompts):
        first = number * job.images
        if done.issuperset(range(first, first + job.images)):
            continue
        seeds = seeds_of(job, number)
        arguments = call_arguments(job, pipe, number)
        if "callback_on_step_end" in parameters:
            arguments["callback_on_step_end"] = _on_step(say, job.images)
        if journal is not None:
            journal.begin(number)
        if grouped:
            # The clock starts when all are here.
            dist.barrier()
        started = time.perf_counter()
        images: list[Image] = pipe(**arguments).images
        seconds = time.perf_counter() - started
        total += seconds
        if "callback_on_step_end" not in parameters:
            say(Stepped(job.images, steps, _note(pipe)))
        if rank > 0:
            continue
        for image, seed, index in zip(images, seeds, range(first, first + job.images), strict=True):
            if index in done:
                continue
            receipt = Receipt(
                prompt=prompt,
                negative_prompt=job.negative,
                seed=seed,
                index=index,
                steps=steps,
                guidance=guidance,
                max_sequence_length=arguments.get("max_sequence_length"),
                width=image.width,
                height=image.height,
                model=job.name,
                pipeline=type(pipe).__name__,
                dtype=job.dtype,
                device=device.type,
                devices=dist.get_world_size() if grouped else 1,
                config=engine_of(pipe).config.model_dump(),
                versions=library_versions(),
                seconds=seconds,
                label=job.labels[number] if job.labels else None,
                together=job.images,
                place=index - first,
                **facts,
                restarts=[past.plain() for past in kept.restarts if past.request == number] if kept is not None else [],
            )
            path = write_png(image, Path(job.out) / file_name(index, prompt, seed), receipt)
            say(Drawn(str(path), receipt))
    if journal is not None:
        journal.close()
    return total


def device_of_rank() -> torch.device:
    """Where this rank computes: its GPU when the job's ranks talk over NCCL, else the CPU."""
    import torch
    import torch.distributed as dist

    on_cuda = dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def load(job: Job, device: torch.device) -> Any:
    """The job's pipeline on its device, checked and quiet, on one device still.

    Raises:
        InputError: it cannot be loaded, or cannot do what the job asks.
    """
    # Before the class is imported, which says what optional packages are missing.
    quieten()
    _check_class(job)
    pipe = load_pipeline(job.model, job.name, job.dtype, device)
    _check_call(job, type(pipe).__name__, call_parameters(pipe))
    return pipe


def load_pipeline(model: str, name: str, dtype: str, device: torch.device | str) -> Any:
    """A diffusers pipeline on its device, without a progress bar of its own.

    Args:
        model: its folder.
        name: what the user calls it.
        dtype: of the weights, by name.

    Raises:
        InputError: it cannot be loaded.
    """
    import torch
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    # The argument was renamed in diffusers 0.42.
    renamed = tuple(map(int, version("diffusers").split(".")[:2])) >= (0, 42)
    kind = {"dtype" if renamed else "torch_dtype": getattr(torch, dtype)}
    try:
        pipe = DiffusionPipeline.from_pretrained(model, **kind)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"model {name!r} cannot be loaded: {str(error).strip()}") from error
    pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeds_of(job: Job, number: int) -> list[int]:
    """The seeds of the pictures of prompt ``number``."""
    first = job.seed + number * job.images
    return list(range(first, first + job.images))


def call_arguments(job: Job, pipe: Any, number: int) -> dict[str, Any]:
    """The arguments of the pipeline's call that draws prompt ``number``, but for the form of its result."""
    import torch

    parameters = call_parameters(pipe)
    # One generator for each picture, on the CPU: a picture depends on its own seed alone, not on the device
    # nor on what else is drawn.
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds_of(job, number)]
    arguments: dict[str, Any] = {
        "num_inference_steps": job.steps or _default(parameters, "num_inference_steps", 50),
        "generator": generators,
    }
    if "guidance_scale" in parameters:
        default = _default(parameters, "guidance_scale", 0.0)
        arguments["guidance_scale"] = job.guidance if job.guidance is not None else default
    if job.labels:
        arguments["class_labels"] = [job.labels[number]] * job.images
    else:
        arguments |= {"prompt": job.prompts[number], "num_images_per_prompt": job.images}
    if job.negative is not None:
        arguments["negative_prompt"] = job.negative
    return arguments | sizes(parameters, job.size, job.max_sequence_length)


def sizes(parameters: Mapping[str, Any], size: tuple[int, int] | None, text_tokens: int | None) -> dict[str, Any]:
    """The arguments of a pipeline's call for the picture's width and height and the text's length, if it takes them.

    Args:
        parameters: of the pipeline's call.
        size: width and height in pixels; None: the pipeline's.
        text_tokens: None: the pipeline's.
    """
    given: dict[str, int] = {}
    if size is not None:
        given["width"], given["height"] = size
    if text_tokens is not None:
        given["max_sequence_length"] = text_tokens
    return {name: value for name, value in given.items() if name in parameters}


def file_name(index: int, prompt: str, seed: int) -> str:
    """Name of a picture's file: sorts by index, reads as the prompt."""
    words = re.sub(r"[^\w]+", "-", prompt.strip().casefold()).strip("-_")
    # File systems count bytes, and 255 of them are the limit everywhere.
    short = words.encode()[:80].decode(errors="ignore").strip("-_")
    return "-".join(filter(None, [f"{index:04d}", short, f"seed{seed}"])) + ".png"


def _nobody(message: Any) -> None:
    """Take a report that nobody waits for."""


def _on_step(say: Report, pictures: int) -> Callable[..., dict[str, Any]]:
    def on_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        say(Stepped(pictures, 1, _note(pipe)))
        return tensors

    return on_step


def _note(pipe: Any) -> str:
    """How many steps of a stale strategy have been synchronous so far."""
    from .engine import engine_of

    staleness = engine_of(pipe).staleness
    return staleness.summary() if staleness is not None else ""


def _check_class(job: Job) -> None:
    """What the pipeline's class tells, before its weights are loaded."""
    import diffusers

    kind = getattr(diffusers, job.pipeline_class, None)
    # A pipeline with code of its own is known only once it is loaded.
    if isinstance(kind, type):
        _check_call(job, job.pipeline_class, inspect.signature(kind.__call__).parameters)


def _check_call(job: Job, name: str, parameters: Any) -> None:
    if "num_frames" in parameters:
        raise InputError(f"{name} draws videos, and `ditmesh generate` saves pictures; call it from Python")
    if job.labels:
        if "class_labels" not in parameters:
            raise InputError(f"{name} takes no class; give a model of class DiTPipeline")
    elif "prompt" not in parameters:
        raise InputError(f"{name} takes no prompt; give a text-to-image model")
    for needed in ("image", "control_image", "mask_image"):
        if needed in parameters and parameters[needed].default is inspect.Parameter.empty:
            raise InputError(f"{name} needs an input picture ({needed}); call it from Python")
    for value, parameter, option in (
        (job.negative, "negative_prompt", "--negative"),
        (job.guidance, "guidance_scale", "--guidance"),
    ):
        if value is not None and parameter not in parameters:
            raise InputError(f"{option} {value!r}: {name} takes no {parameter}; leave {option} out")


def call_parameters(pipe: Any) -> Mapping[str, inspect.Parameter]:
    """What a pipeline's call takes."""
    return inspect.signature(type(pipe).__call__).parameters


def _default(parameters: Any, name: str, otherwise: Any) -> Any:
    parameter = parameters.get(name)
    if parameter is None or parameter.default in (inspect.Parameter.empty, None):
        return otherwise
    return parameter.default


def quieten() -> None:
    """N ranks that all show loading bars and say what optional package they lack tell the user nothing."""
    import diffusers
    import tqdm
    import transformers

    # Its own default is shared between processes, which we have no use for, and which Python's resource tracker
    # complains about when a rank is killed.
    tqdm.tqdm.set_lock(threading.RLock())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.utils.logging.set_verbosity_error()
