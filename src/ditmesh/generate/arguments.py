"""The arguments of a pipeline's call, from its signature and a job."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..request import FieldError, PictureRequest, request_fields
from .files import IMAGE_ARGUMENTS
from .video import FPS

if TYPE_CHECKING:
    from .job import PictureJob

# The argument for a callback after every denoising step.
CALLBACK = "callback_on_step_end"
# Arguments with the frame rate.
RATES = ("frame_rate", "fps")
# Arguments that only audio pipelines have.
AUDIO = ("num_waveforms_per_prompt", "audio_end_in_s", "audio_length_in_s", "audio_duration", "audio_duration_s")


def steps_of(job: PictureJob, parameters: Mapping[str, Any]) -> int:
    """Denoising steps of a job: its own, or the default of the pipeline's call."""
    return job.steps or _default(parameters, "num_inference_steps", 50)


def denoising_steps(job: PictureJob, parameters: Mapping[str, Any]) -> int:
    """The denoising steps that actually run: an input image replaces the first steps."""
    steps = steps_of(job, parameters)
    strength = job.strength if job.strength is not None else _default(parameters, "strength", 1.0)
    return (
        max(1, min(int(steps * strength), steps))
        if any(file.role in ("image", "video") for file in job.files)
        else steps
    )


def call_arguments(
    job: PictureJob, parameters: Mapping[str, Any], number: int, pictures: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The arguments of call ``number`` of the pipeline, except the form of its result.

    ``pictures``: the job's input images, by the argument that takes each.
    """
    import torch

    call = job.call(number)
    # One generator for each image, on the CPU: an image depends on its own seed alone, not on the device
    # nor on what else is generated.
    generators = [torch.Generator("cpu").manual_seed(job.seed + index) for index in call.indices]
    arguments: dict[str, Any] = {"num_inference_steps": steps_of(job, parameters), "generator": generators}
    if "guidance_scale" in parameters:
        arguments["guidance_scale"] = _default(parameters, "guidance_scale", 0.0)
    if job.labels:
        arguments["class_labels"] = [job.labels[call.prompt]] * call.images
    else:
        arguments["prompt"] = job.prompts[call.prompt]
        for many in ("num_images_per_prompt", "num_videos_per_prompt"):
            if many in parameters:
                arguments[many] = call.images
    for name, field in request_fields().items():
        if field.argument is not None and (value := getattr(job, name)) is not None:
            arguments[field.argument] = value
    if job.strength is not None:
        arguments["strength"] = job.strength
    for file in job.files:
        if file.role == "controlnet":
            arguments["controlnet_conditioning_scale"] = file.scale
    for name, picture in (pictures or {}).items():
        # One for each generated image: pipelines encode them with a generator of its own. These they repeat.
        many = call.images > 1 and name not in (IMAGE_ARGUMENTS["ip-image"], IMAGE_ARGUMENTS["control"])
        arguments[name] = [picture] * call.images if many else picture
    return arguments | _sizes(job, parameters)


def _sizes(job: PictureJob, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Size, frames, frame rate and the text's length, where the call takes them; of a video always a rate."""
    width, height = job.size or (None, None)
    given: dict[str, Any] = {
        "width": width,
        "height": height,
        "max_sequence_length": job.max_sequence_length,
        "num_frames": job.frames,
    }
    for name in RATES if video_call(parameters) else ():
        # Some models take the frame rate; some need a whole number.
        fps = _default(parameters, name, FPS) if job.fps is None else job.fps
        given[name] = int(fps) if fps == int(fps) else fps
    return {name: value for name, value in given.items() if name in parameters and value is not None}


def _default(parameters: Any, name: str, otherwise: Any) -> Any:
    parameter = parameters.get(name)
    if parameter is None or parameter.default in (inspect.Parameter.empty, None):
        return otherwise
    return parameter.default


def check_call(job: PictureJob, name: str, parameters: Any) -> None:
    """Reject a job that a pipeline of class ``name`` does not accept, with an `InputError` that names the option."""
    check_output(name, parameters)
    if job.labels:
        if "class_labels" not in parameters:
            raise InputError(f"{name} takes no class; give a model of class DiTPipeline")
    elif "prompt" not in parameters:
        raise InputError(f"{name} takes no prompt; give a text-to-image model")
    given = {file.role for file in job.files}
    for role, needed in IMAGE_ARGUMENTS.items():
        if needed in parameters and parameters[needed].default is inspect.Parameter.empty and role not in given:
            what = "video" if role == "video" else "picture"
            raise InputError(f"{name} needs an input {what} ({needed}); give one with --{role}")
    check_options(name, parameters, job, None if job.labels else job.size)


def check_options(name: str, parameters: Any, request: PictureRequest, size: tuple[int, int] | None = None) -> None:
    """Reject fields of a request, or a size, that a pipeline of class ``name`` does not accept, with a `FieldError`."""
    for field, of in request_fields().items():
        value = getattr(request, field)
        if value is not None and of.argument is not None and of.argument not in parameters:
            why = "{" + field + "} {!r}: {} takes no {}; leave {" + field + "} out"
            raise FieldError(field, why, value, name, of.argument)
    if size is not None and not {"width", "height"} <= set(parameters):
        raise FieldError("size", "{size} {}x{}: {} has one size only; leave {size} out", *size, name)


def check_output(pipeline: str, parameters: Mapping[str, Any]) -> None:
    """Reject a pipeline that makes sound, or images in layers, before anything is computed."""
    if (sentence := unwritten(pipeline, parameters)) is not None:
        raise InputError(sentence)


def unwritten(pipeline: str, parameters: Mapping[str, Any]) -> str | None:
    """The sentence that refuses a pipeline which makes more than is written; None: all of its output is."""
    layers = "the layers of an image, which are" if "layers" in parameters else None
    audio = "audio, which is" if any(name in parameters for name in AUDIO) else layers
    what = "sound too, which is" if "audio_latents" in parameters else audio
    return f"{pipeline} makes {what} not written; call it from Python" if what else None


def video_call(parameters: Mapping[str, Any]) -> bool:
    """True if a pipeline's call generates videos, by its parameter names."""
    return "num_frames" in parameters or IMAGE_ARGUMENTS["video"] in parameters
