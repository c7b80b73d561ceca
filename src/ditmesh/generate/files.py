"""Input files of a job: images, videos and adapters, and the pipeline class and the output size for them."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field, FiniteFloat

from ..core.files import digest_of_file
from ..errors import InputError, first_line, reason_of, shortened
from ..media.files import read_whole
from ..media.images import read_image, read_mask
from ..media.videos import read_frames
from ..request import FieldError
from .components import missing_weights_refused
from .lora_files import read_lora, settings_file
from .loras import load_lora, set_loras, takes_loras
from .model_info import HUB_ID, ModelInfo, parameters_of
from .modular import call_parameters

if TYPE_CHECKING:
    from PIL.Image import Image

Role = Literal["image", "mask", "control", "ip-image", "video", "lora", "ip-adapter", "controlnet"]

# Input images, and the argument of a pipeline's call for each.
IMAGE_ARGUMENTS = {
    "image": "image",
    "mask": "mask_image",
    "control": "control_image",
    "ip-image": "ip_adapter_image",
    "video": "video",
}
# Default pixels of an image if neither the model's files nor the pipeline give a size.
USUAL_PIXELS = 1024 * 1024
# Inputs that determine the size; the first one given decides. A mask belongs to its image.
SHAPING = ("image", "video", "control")
# Pipelines of diffusers that take an image or a video on the same components, beside those it pairs itself.
VIDEO_PIPELINES: dict[str, tuple[str, ...]] = {
    "CogVideoXPipeline": ("CogVideoXVideoToVideoPipeline",),
    "LTXPipeline": ("LTXImageToVideoPipeline", "LTXConditionPipeline"),
    "SkyReelsV2DiffusionForcingPipeline": (
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    ),
    "WanPipeline": ("WanVideoToVideoPipeline",),
}
# Input channels of the transformers that an inpainting pipeline of diffusers works with, where it has a list.
MASK_CHANNELS = {"StableDiffusion3InpaintPipeline": (16, 33)}
# Adapters, the method of a pipeline that loads each, and the file's name in a folder or a hub repository.
ADAPTER_LOADERS = {
    "lora": ("load_lora_weights", "pytorch_lora_weights.safetensors"),
    "ip-adapter": ("load_ip_adapter", "ip-adapter.safetensors"),
}

# Beginnings of the names of an IP-Adapter's weights in the files that diffusers reads.
IP_ADAPTER_WEIGHTS = ("ip_adapter.", "image_proj.", "double_blocks.", "ip_adapter_proj_model.")
# Files that are read in a ControlNet's folder.
CONTROLNET_FILES = ("config.json", "*.safetensors")


@dataclass(frozen=True)
class InputFile:
    """A file of a job, absolute, or a ControlNet's folder; its bounds hold in the receipts of strangers.

    ``digest``: see `file_digest`; ``scale``: of an adapter or a ControlNet.
    """

    role: Role
    path: Annotated[str, Field(max_length=4096)]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    scale: FiniteFloat = 1.0


def input_picture(role: Role, path: str | Path) -> InputFile:
    """An input image or video; an `InputError` if it cannot be read, or has no possible size."""
    path = _file(role, Path(path))
    file = InputFile(role, str(path), file_digest(path))
    pictures_of([file], 1)
    return file


def adapter(role: Role, text: str) -> InputFile:
    """An adapter from ``NAME[:scale]``: a safetensors file, a folder that holds one, or a repository of a hub.

    A ControlNet is the folder that its ``save_pretrained`` wrote. An `InputError` says what is wrong with it.
    """
    name, colon, last = text.rpartition(":")
    scale = 1.0
    if colon and not os.path.exists(text):
        try:
            scale = float(last)
        except ValueError:
            scale = nan
        if not isfinite(scale):
            raise InputError(f"--{role} {text!r}: the scale {last!r} is not a number; write it as NAME:0.8")
    else:
        name = text
    path = Path(name).expanduser()
    if not os.path.exists(path) and re.fullmatch(HUB_ID, name):
        path = _from_hub(role, name)
    if role != "controlnet":
        if os.path.isdir(path):
            usual, files = path / ADAPTER_LOADERS[role][1], sorted(path.glob("*.safetensors"))
            if usual not in files and len(files) != 1:
                others = f"{len(files)} other safetensors files"
                raise InputError(f"--{role} {str(path)!r}: the folder holds no {usual.name} and {others}; name one")
            # The name counts, which in a hub's cache is a link's.
            path = usual if usual in files else files[0]
        path = _file(role, path)
        _check_adapter(role, path)
    elif os.path.isdir(path):
        controlnet_class(path)
    else:
        way = "give the folder that controlnet.save_pretrained(...) wrote"
        raise InputError(f"--controlnet {name[:200]!r} is no folder here; {way}")
    return InputFile(role, str(path.absolute()), file_digest(path), scale)


def _from_hub(role: Role, name: str) -> Path:
    """The folder with the files of an adapter or a ControlNet that a repository of the hub has."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = CONTROLNET_FILES if role == "controlnet" else ADAPTER_LOADERS[role][1:]
    try:
        return Path(snapshot_download(name, allow_patterns=[*patterns]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"--{role} {name!r} is no file or folder here, and the hub says: {first_line(error)}"
        ) from None


def _file(role: str, path: Path) -> Path:
    path = path.expanduser()
    try:
        if path.is_file():
            return path.absolute()
        reason = "is a folder" if path.is_dir() else "is not a regular file" if path.exists() else "is not there"
    except (OSError, ValueError) as error:
        reason = f"cannot be a file ({reason_of(error)})"
    raise InputError(f"--{role} {str(path)[:200]!r} {reason}; give the name of a file")


def _check_adapter(role: str, path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if role == "lora":
        try:
            read_lora(path)
        except InputError as error:
            raise InputError(f"--lora {str(path)!r} {error}") from None
        return

    try:
        with safe_open(path, framework="np") as tensors:
            names = list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise InputError(f"--{role} {str(path)!r} is not a safetensors file ({error}); save it as one") from None
    if not any(name.startswith(IP_ADAPTER_WEIGHTS) for name in names):
        some = ", ".join(names[:3]) or "nothing"
        raise InputError(f"--{role} {str(path)!r} holds no IP-Adapter (it has {some}); give the adapter's file")


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file's bytes; of several files together that of their names and digests.

    Several belong together in a ControlNet's folder, and where peft has saved the strength of weights beside them.
    """
    try:
        path = Path(path)
        settings = settings_file(path)
        if settings is None and not path.is_dir():
            return digest_of_file(path)
        files = (
            [path, settings]
            if settings is not None
            else sorted(file for pattern in CONTROLNET_FILES for file in path.glob(pattern) if file.is_file())
        )
        lines = [f"{digest_of_file(file)}  {file.name}\n" for file in files]
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r} ({reason_of(error)})") from None


def open_picture(file: InputFile) -> Image:
    """An upright sRGB input image (a mask: grey), with the bytes checked at the creation of the job.

    `InputError`: it cannot be read, is no image of a possible size, or has changed since.
    """
    return (read_mask if file.role == "mask" else read_image)(BytesIO(_content(file)), f"--{file.role} {file.path!r}")


def open_video(file: InputFile, most: int | None = None) -> list[Image]:
    """The frames of an input video, RGB, at most ``most``; errors as of `open_picture`."""
    return read_frames(_content(file), f"--{file.role} {file.path!r}", most)


def _content(file: InputFile) -> bytes:
    content = read_whole(file.path, f"--{file.role} {file.path!r}")
    _check_same(file, hashlib.sha256(content).hexdigest())
    return content


def _check_same(file: InputFile, digest: str) -> None:
    if digest != file.digest:
        raise InputError(f"--{file.role} {file.path!r} is not the file it was; leave it as it is while ranks run")


def find_input_file(file: InputFile, beside: Path) -> InputFile:
    """A file with the bytes of a receipt's file: at its path, or with its name next to the image or in this folder."""
    name = Path(file.path).name
    changed = None
    for path in dict.fromkeys([Path(file.path), beside / name, Path(name)]):
        # A receipt may name anything: only regular files are read.
        if (path / CONTROLNET_FILES[0]).is_file() if file.role == "controlnet" else path.is_file():
            if file_digest(path) == file.digest:
                return InputFile(file.role, str(path.absolute()), file.digest, file.scale)
            changed = changed or path
    what = f"the receipt names the {file.role} {file.path!r} (SHA-256 {file.digest[:16]}…), which "
    if changed is not None:
        raise InputError(f"{what}has changed: {str(changed)!r} holds something else; put the old file there")
    raise InputError(f"{what}is missing; put {name} there, or beside the image")


# --- the class that takes them -----------------------------------------------------------------------------------


def check_roles(files: Iterable[InputFile], strength: float | None = None) -> None:
    """Reject files that cannot be combined, with an `InputError` that names the options."""
    roles = [file.role for file in files]
    if strength is not None and not {"image", "video"} & set(roles):
        raise FieldError("strength", "{strength} needs {image} as well, or {video}")
    if {"image", "video"} <= set(roles):
        raise FieldError("video", "{image} and {video} are both to begin with; leave one out")
    for role, needed in NEEDED.items():
        if role in roles and needed not in roles:
            raise FieldError(role, "{" + role + "} needs {" + needed + "} as well")


# Files that need another file.
NEEDED = {"mask": "image", "ip-image": "ip-adapter", "ip-adapter": "ip-image", "controlnet": "control"}


def controlnet_class(folder: Path) -> type[Any]:
    """The class of a saved ControlNet; an `InputError` if the folder holds none, or no safetensors file."""
    import diffusers

    what, way = f"--controlnet {str(folder)!r}", "give the folder that controlnet.save_pretrained(...) wrote"
    try:
        config = json.loads((folder / CONTROLNET_FILES[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{what}: cannot read its {CONTROLNET_FILES[0]} ({reason_of(error)}); {way}") from None
    name = str(config.get("_class_name") if isinstance(config, dict) else None)
    kind = getattr(diffusers, name, None) if "ControlNet" in name else None
    if not isinstance(kind, type):
        raise InputError(f"{what} is no ControlNet of diffusers (its class is {name[:80]}); {way}")
    if not any(folder.glob(CONTROLNET_FILES[1])):
        raise InputError(f"{what} holds no safetensors file; {way}")
    return kind


def encoder_folder(file: InputFile) -> Path | None:
    """The encoder of an IP-Adapter's image: the folder ``image_encoder`` beside its file; None: there is none."""
    folder = Path(file.path).parent / "image_encoder"
    return folder if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) else None


def check_encoder(files: Iterable[InputFile], index: Mapping[str, Any]) -> None:
    """Reject an IP-Adapter without an encoder for its image; ``index``: the pipeline's ``model_index.json``."""
    for file in files:
        if file.role == "ip-adapter" and not any(index.get("image_encoder") or ()) and encoder_folder(file) is None:
            raise InputError(
                f"--ip-adapter {file.path!r}: neither the model nor the file's folder has an image encoder; put "
                "the encoder's config.json and safetensors file into a folder image_encoder there"
            )


def pipeline_for(name: str, files: Iterable[InputFile], strength: float | None = None) -> str:
    """The name of the pipeline class for input images: the model's own, or diffusers' image-to-image class for it."""
    import diffusers

    files = list(files)
    if not files and strength is None:
        return name
    base = getattr(diffusers, name, None)
    if not isinstance(base, type):
        options = ", ".join(f"--{file.role}" for file in files) or "--strength"
        raise InputError(f"{options}: {name} is no class of diffusers; call the pipeline from Python")
    wanted = {IMAGE_ARGUMENTS[file.role]: file.role for file in files if file.role in IMAGE_ARGUMENTS}
    if strength is not None:
        wanted["strength"] = "strength"
    kinds = [base, *_beside(base, "mask_image" in wanted)]
    networks = [controlnet_class(Path(file.path)) for file in files if file.role == "controlnet"]
    if networks:
        kinds = _with_controlnet(kinds, networks[0])
    takes = {kind: call_parameters(kind) for kind in kinds}
    fitting = next((kind for kind in kinds if wanted.keys() <= takes[kind].keys()), None)
    if fitting is None:
        raise _takes_no(kinds[-1].__name__, takes[kinds[-1]], wanted)
    for role in {file.role for file in files} & ADAPTER_LOADERS.keys():
        method = ADAPTER_LOADERS[role][0]
        if not (takes_loras(fitting) if role == "lora" else hasattr(fitting, method)):
            raise InputError(f"--{role}: {fitting.__name__} has no {method}; leave it out")
    return fitting.__name__


def _takes_no(pipeline: str, parameters: Mapping[str, Any], wanted: Mapping[str, str]) -> InputError:
    """The error of a pipeline that lacks one of the ``wanted`` arguments, given with their options."""
    missing = next(argument for argument in wanted if argument not in parameters)
    takes = [p for p in parameters if p in (*IMAGE_ARGUMENTS.values(), "prompt", "class_labels", "strength")]
    return InputError(
        f"--{wanted[missing]}: {pipeline} takes no {missing} (it takes {', '.join(takes)}, and "
        f"{len(parameters) - 1 - len(takes)} others); leave --{wanted[missing]} out, or give "
        f"{'a ControlNet with --controlnet' if missing == IMAGE_ARGUMENTS['control'] else 'a model that does'}"
    )


def check_mask_support(pipeline: str, files: Iterable[InputFile], channels: Any) -> None:
    """Reject a mask that the pipeline class takes, but not a transformer of so many input channels."""
    fitting = MASK_CHANNELS.get(pipeline)
    if fitting and isinstance(channels, int) and channels not in fitting and any(one.role == "mask" for one in files):
        raise FieldError(
            "mask",
            "{mask}: {} inpaints with a transformer of {} input channels, and this model's has {}; leave {mask} out, "
            "or give another model",
            *(pipeline, " or ".join(map(str, fitting)), channels),
        )


def _beside(base: type[Any], masked: bool) -> list[type[Any]]:
    """diffusers' variants of a pipeline class for an image, a video, or an image and a mask."""
    import diffusers
    from diffusers.pipelines import auto_pipeline

    maps: list[Any] = [
        auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING,
        auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
        auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING,
    ]
    model = next((key for mapping in maps for key, kind in mapping.items() if kind.__name__ == base.__name__), None)
    found = maps[2 if masked else 1].get(model or "")
    others = (getattr(diffusers, name, None) for name in VIDEO_PIPELINES.get(base.__name__, ()))
    return [kind for kind in (found, *others) if isinstance(kind, type) and kind is not base]


def _with_controlnet(kinds: list[type[Any]], network: type[Any]) -> list[type[Any]]:
    """diffusers' ControlNet variants of pipeline classes."""
    import diffusers

    names = [kind.__name__ for kind in kinds]
    for name in () if "ControlNet" in names[0] else tuple(names):
        names += [
            re.sub("((Img2Img|Inpaint)?)Pipeline$", rf"ControlNet\g<1>{end}", name)
            for end in ("Pipeline", "ingPipeline")
        ]
    variants = [
        kind for name in names if "ControlNet" in name and isinstance(kind := getattr(diffusers, name, None), type)
    ]
    if not variants:
        raise InputError(f"--controlnet: diffusers has no {names[len(kinds)]}; leave it out, or give another model")
    takes = {kind: get_type_hints(kind.__init__).get("controlnet") for kind in variants}
    fitting = [kind for kind, of in takes.items() if network in (of, *get_args(of))]
    if not fitting:
        of = takes[variants[0]]
        names = [option.__name__ for option in (of, *get_args(of)) if isinstance(option, type)]
        raise InputError(
            f"--controlnet: {variants[0].__name__} takes {' or '.join(names)}, not {network.__name__}; give another one"
        )
    return fitting


# --- on ranks ----------------------------------------------------------------------------------------------------


def pictures_of(files: Iterable[InputFile], frames: int | None = None) -> dict[str, Any]:
    """The input images, and of a video the first ``frames``, by the argument of the call that takes each."""
    return {
        IMAGE_ARGUMENTS[file.role]: open_video(file, frames) if file.role == "video" else open_picture(file)
        for file in files
        if file.role in IMAGE_ARGUMENTS
    }


@contextmanager
def _loading(file: InputFile) -> Iterator[None]:
    """Check that a file is the one it was, and let errors of its loading name it."""
    what = f"--{file.role} {file.path!r}"
    _check_same(file, file_digest(file.path))
    try:
        yield
    except MemoryError:
        raise
    except InputError as error:
        raise InputError(f"{what} {error}") from error
    except Exception as error:
        # An untrusted file can raise any exception.
        raise InputError(f"{what} cannot be loaded ({shortened(error, 300)})") from error


def load_controlnet(files: Iterable[InputFile], options: Mapping[str, Any]) -> dict[str, Any]:
    """The job's ControlNet as a pipeline's component, by name, if it has one; ``options``: of ``from_pretrained``."""
    networks: dict[str, Any] = {}
    for file in files:
        if file.role == "controlnet":
            kind = controlnet_class(Path(file.path))
            with _loading(file), missing_weights_refused():
                networks["controlnet"] = kind.from_pretrained(file.path, use_safetensors=True, **options)
    return networks


def load_adapters(pipe: Any, files: Iterable[InputFile]) -> dict[str, str]:
    """Load LoRA and IP-Adapters with their scales; returns notes on files that are left out in part, by path."""
    names: dict[str, float] = {}
    notes: dict[str, str] = {}
    for file in files:
        if file.role == "lora":
            name = f"lora{len(names)}"
            with _loading(file):
                note = load_lora(pipe, Path(file.path), name)
            names[name] = file.scale
            notes |= {} if note is None else {file.path: note}
        elif file.role == "ip-adapter":
            encoder = None if getattr(pipe, "image_encoder", None) is not None else encoder_folder(file)
            path = None if encoder is None else str(encoder)
            # Each class takes the encoder's folder in another way.
            options: dict[str, Any] = {"image_encoder_folder": path}
            if "image_encoder_folder" not in inspect.signature(pipe.load_ip_adapter).parameters:
                dtype = pipe.transformer.dtype
                options = {"image_encoder_pretrained_model_name_or_path": path, "image_encoder_dtype": dtype}
            with _loading(file), missing_weights_refused():
                pipe.load_ip_adapter(str(Path(file.path).parent), weight_name=Path(file.path).name, **options)
                pipe.set_ip_adapter_scale(file.scale)
    if names:
        set_loras(pipe, names)
    return notes


def input_size(model: ModelInfo, files: Sequence[InputFile], strength: float | None = None) -> tuple[int, int] | None:
    """The output's width and height for a job's input files (see `ModelInfo.size_like`); None: the model's own size."""
    inputs = {file.role: file for file in files if file.role in (*SHAPING, "mask")}
    role = next((role for role in SHAPING if role in inputs), None)
    if role is None or model.labels:
        return None
    file = inputs[role]
    size = (open_video(file, 1)[0] if role == "video" else open_picture(file)).size
    if role == "image" and "mask" in inputs:
        check_mask_shape(size, open_picture(inputs["mask"]).size)
    if model.default_size is not None:
        return model.size_like(*size, model.default_size[0] * model.default_size[1])
    parameters = parameters_of(pipeline_for(model.pipeline_class, files, strength))
    width, height = (getattr(parameters.get(name), "default", None) for name in ("width", "height"))
    pixels = width * height if isinstance(width, int) and isinstance(height, int) else USUAL_PIXELS
    return model.size_like(*size, pixels)


def check_mask_shape(image: tuple[int, int], mask: tuple[int, int]) -> None:
    """Reject a mask of another shape than its image; one of the same shape and another size is scaled."""
    small, large = sorted((mask, image))
    if abs(small[0] * large[1] / large[0] - small[1]) > 1:
        raise InputError(
            f"the mask has {mask[0]}x{mask[1]} pixels and the image {image[0]}x{image[1]}, which is another shape; "
            "give a mask of the image's size"
        )


def stretched(pictures: Mapping[str, Any], size: tuple[int, int], step: int) -> str | None:
    """A sentence about input images of another shape than the output, of sides in multiples of ``step``; or None."""
    for role in SHAPING:
        picture = pictures.get(IMAGE_ARGUMENTS[role])
        picture = picture[0] if isinstance(picture, Sequence) and picture else picture
        found = getattr(picture, "size", None)
        if found is not None and abs(found[0] * size[1] / found[1] - size[0]) > step:
            return (
                f"--{role} has {found[0]}x{found[1]} pixels, and the size {size[0]}x{size[1]} has another shape: most "
                "pipelines stretch it; leave --size out to keep its shape"
            )
    return None
