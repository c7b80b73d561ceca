"""Pictures generated from prompts: what every rank does."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from .._version import library_versions
from ..core.files import free_names
from ..errors import InputError
from ..launch import Report
from .job import Call, Generated, Job, Kept, Loaded, Stepped
from .receipt import Receipt, holds_receipt, write_png

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


def generate(job: Job, kept: Kept | None = None, *, report: Report | None = None) -> float:
    """Load the pipeline, make it parallel, generate everything. Every rank of the job calls this.

    Rank 0 writes each PNG as soon as it has it and reports `Loaded`, `Stepped` and `Generated`. It never replaces a
    file that ditmesh has not written, and one that it has only when ``job.overwrite`` says so: see `save`.

    Args:
        job: what to generate.
        kept: keep a journal, and go on from what it holds; None: generate everything, keep nothing.
        report: takes the reports; may be left out.

    Returns:
        Seconds that the pipeline's calls took on this rank, loading not included.

    Raises:
        InputError: the pipeline cannot do what is asked.
        LayoutError: the transformer's tokens could not be found out.
        JournalError: what the journal holds is of another request.
    """
    import torch.distributed as dist

    from ..comm.mesh import Mesh
    from ..engine import parallelize

    grouped = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if grouped else 0
    say: Report = report if report is not None and rank == 0 else _nobody
    device = device_of_rank()
    started = time.perf_counter()
    pipe = load(job, device)
    parameters = call_parameters(pipe)
    steps = steps_of(job, parameters)
    facts = _facts(job, pipe, device) if rank == 0 else {}
    mesh = None if isinstance(job.config, str) else Mesh(job.config, device=device, timeout=job.timeout)
    parallelize(pipe, job.config, mesh=mesh, timeout=job.timeout)
    journal = _journal(pipe, kept, rank) if kept is not None else None
    say(Loaded(time.perf_counter() - started, steps))
    total = 0.0
    for number in range(job.calls):
        call = job.call(number)
        if kept is not None and kept.done.issuperset(call.indices):
            continue
        arguments = call_arguments(job, pipe, number)
        if "callback_on_step_end" in parameters:
            arguments["callback_on_step_end"] = _on_step(say, call.images)
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
            say(Stepped(call.images, steps, _note(pipe)))
        if rank == 0:
            facts |= {"seconds": seconds, "max_sequence_length": arguments.get("max_sequence_length")}
            _save_all(job, number, images, receipt_of(job, pipe, call, facts), kept, say)
    if journal is not None:
        journal.close()
    return total


def _facts(job: Job, pipe: Any, device: torch.device) -> dict[str, Any]:
    """What a receipt says about weights and environment, of a pipeline whose weights are not cut yet."""
    from ..core.digests import weights_fingerprint
    from ..launch.hardware import environment
    from ..strategies.determinism import deterministic

    reproducible = not isinstance(job.config, str) and job.config.reproducible
    # With the settings that are in force while the pipeline runs.
    with deterministic(device) if reproducible else contextlib.nullcontext():
        return {"weights": weights_fingerprint(pipe), "environment": environment(device), "device": device.type}


def _journal(pipe: Any, kept: Kept, rank: int) -> Any:
    """The journal of a job; around everything else, so that it sees the pipeline's own calls and whole outputs."""
    from ..engine import DENOISERS, denoisers, engine_of
    from .journal import Journal

    models = {name: getattr(pipe, name) for name in DENOISERS if getattr(pipe, name, None) in denoisers(pipe)}
    return Journal(models, kept.folder, rank, engine_of(pipe).clock)


def receipt_of(job: Job, pipe: Any, call: Call, facts: Mapping[str, Any]) -> Receipt:
    """The receipt of the first picture of a call, but for its size.

    Args:
        job, call: what was generated.
        pipe: the parallelised pipeline.
        facts: the receipt's fields that only the run knows.
    """
    import torch.distributed as dist

    from ..engine import engine_of

    parameters = call_parameters(pipe)
    guidance = job.guidance if job.guidance is not None else _default(parameters, "guidance_scale", 0.0)
    return Receipt(
        prompt=job.prompts[call.prompt],
        negative_prompt=job.negative,
        seed=job.seed + call.first,
        index=call.first,
        steps=steps_of(job, parameters),
        guidance=guidance,
        width=1,
        height=1,
        model=job.name,
        pipeline=type(pipe).__name__,
        dtype=job.dtype,
        devices=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        config=engine_of(pipe).config.model_dump(),
        versions=library_versions(),
        label=job.labels[call.prompt] if job.labels else None,
        together=call.images,
        **facts,
    )


def _save_all(job: Job, number: int, images: list[Image], first: Receipt, kept: Kept | None, say: Report) -> None:
    """Write the pictures of a call that are not on disk yet, and report them."""
    call = job.call(number)
    restarts = [past.plain() for past in kept.restarts if past.request == number] if kept is not None else []
    for place, (image, index) in enumerate(zip(images, call.indices, strict=True)):
        if kept is not None and index in kept.done:
            continue
        changed = {"seed": job.seed + index, "index": index, "place": place, "restarts": restarts}
        receipt = first.model_copy(update={**changed, "width": image.width, "height": image.height})
        # A rank that was lost may have written the picture and not said so.
        say(Generated(str(save(job, image, receipt, bool(kept and kept.restarts))), receipt))


def save(job: Job, image: Image, receipt: Receipt, replace: bool = False) -> Path:
    """Write a picture under the first of its names that is free.

    Args:
        job: which folder, and whether pictures of an earlier run may be replaced.
        image, receipt: the picture.
        replace: a picture of that name is this job's own.

    Raises:
        InputError: the file cannot be written.
    """
    path = Path(job.out) / file_name(receipt.index, receipt.prompt, receipt.seed)
    for free in free_names(path, job.number):
        try:
            return write_png(image, free, receipt, (replace or job.overwrite) and holds_receipt(free))
        except FileExistsError:
            continue
    raise AssertionError("names do not end")


def with_free_names(job: Job) -> Job:
    """The job with a number for its files such that none of them is there yet; the owner of the ranks calls this."""
    pattern = re.compile(r"(.*?)(?:-(\d+))?\.png")
    there = [match for name in os.listdir(job.out) if (match := pattern.fullmatch(name))]
    if job.overwrite or not there:
        return job
    first = {file_name(i, job.prompts[i // job.images], job.seed + i)[: -len(".png")] for i in range(job.total)}
    taken = [int(match[2] or 1) for match in there if match[1] in first]
    return replace(job, number=max(taken, default=0) + 1)


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
    except MemoryError:
        raise
    except Exception as error:
        # Somebody else's files: what is wrong with them can come out as anything.
        said = " ".join(str(error).split())[:400] or type(error).__name__
        if isinstance(error, UnpicklingError):
            said = "a file of weights is a pickled program and not only tensors, and is not run"
        elif not isinstance(error, (OSError, ValueError, ImportError)):
            said = f"{type(error).__name__}: {said}"
        raise InputError(
            f"model {name!r} cannot be loaded ({said}); check its files, or save the pipeline again"
        ) from error
    pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def steps_of(job: Job, parameters: Mapping[str, Any]) -> int:
    """Denoising steps of a job: its own, or the default of the pipeline's call."""
    return job.steps or _default(parameters, "num_inference_steps", 50)


def call_arguments(job: Job, pipe: Any, number: int) -> dict[str, Any]:
    """The arguments of call ``number`` of the pipeline, but for the form of its result."""
    import torch

    parameters, call = call_parameters(pipe), job.call(number)
    # One generator for each picture, on the CPU: a picture depends on its own seed alone, not on the device
    # nor on what else is generated.
    generators = [torch.Generator("cpu").manual_seed(job.seed + index) for index in call.indices]
    arguments: dict[str, Any] = {"num_inference_steps": steps_of(job, parameters), "generator": generators}
    if "guidance_scale" in parameters:
        default = _default(parameters, "guidance_scale", 0.0)
        arguments["guidance_scale"] = job.guidance if job.guidance is not None else default
    if job.labels:
        arguments["class_labels"] = [job.labels[call.prompt]] * call.images
    else:
        arguments |= {"prompt": job.prompts[call.prompt], "num_images_per_prompt": call.images}
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
    from ..engine import engine_of

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
