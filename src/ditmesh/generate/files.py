"""Files that a job takes beside its model: input pictures, adapters, and the class that takes them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..core.files import digest_of_file
from ..errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

Role = Literal["image", "mask", "control", "ip-image", "lora", "ip-adapter"]
ROLES: tuple[str, ...] = get_args(Role)

# Input pictures, and the argument of a pipeline's call that takes each.
PICTURES = {"image": "image", "mask": "mask_image", "control": "control_image", "ip-image": "ip_adapter_image"}
# Adapters, the method of a pipeline that loads each, and the file's name in a folder or a hub repository.
ADAPTERS = {
    "lora": ("load_lora_weights", "pytorch_lora_weights.safetensors"),
    "ip-adapter": ("load_ip_adapter", "ip-adapter.safetensors"),
}

# Pixels and bytes of an input picture, at most.
MOST_PIXELS = 2**27
MOST_BYTES = 2**30


@dataclass(frozen=True)
class InputFile:
    """A file of a job.

    Attributes:
        role: what it is for.
        path: where it is, absolute.
        digest: SHA-256 of its bytes, in hexadecimal.
        scale: of an adapter.
    """

    role: Role
    path: str
    digest: str
    scale: float = 1.0


def input_picture(role: Role, path: str | Path) -> InputFile:
    """An input picture.

    Raises:
        InputError: it cannot be read, or is no picture of a possible size.
    """
    path = _file(role, Path(path))
    found = InputFile(role, str(path), file_digest(path))
    open_picture(found)
    return found


def adapter(role: Role, text: str) -> InputFile:
    """An adapter from ``NAME[:scale]``: a safetensors file, a folder that holds one, or a repository of a hub.

    Raises:
        InputError: it is not there, it holds no adapter, or the scale is not a number.
    """
    name, colon, last = text.rpartition(":")
    scale = 1.0
    if colon and not Path(text).exists():
        try:
            scale = float(last)
        except ValueError:
            raise InputError(f"--{role} {text!r}: the scale {last!r} is not a number; write it as NAME:0.8") from None
        if not isfinite(scale):
            raise InputError(f"--{role} {text!r}: the scale {last!r} is not a number; write it as NAME:0.8")
    else:
        name = text
    path = _adapter_file(role, name)
    _check_adapter(role, path)
    return InputFile(role, str(path), file_digest(path), scale)


def _adapter_file(role: Role, name: str) -> Path:
    from .model_info import is_hub_id

    usual, path = ADAPTERS[role][1], Path(name).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if path / usual not in files and len(files) != 1:
            raise InputError(
                f"--{role} {name!r}: the folder holds no {usual} and {len(files)} other safetensors files; name one"
            )
        return (path / usual if path / usual in files else files[0]).resolve()
    if not path.exists() and is_hub_id(name):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(name, usual))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(f"--{role} {name!r} is no file or folder here, and the hub says: {reason}") from None
    return _file(role, path)


def _file(role: str, path: Path) -> Path:
    path = path.expanduser()
    try:
        if path.is_file():
            return path.resolve()
        reason = "is a folder" if path.is_dir() else "is not there"
    except (OSError, ValueError) as error:
        reason = f"cannot be a file ({getattr(error, 'strerror', None) or error})"
    raise InputError(f"--{role} {str(path)[:200]!r} {reason}; give the name of a file")


def _check_adapter(role: str, path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as tensors:
            names = list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise InputError(f"--{role} {str(path)!r} is not a safetensors file ({error}); save it as one") from None
    if role == "lora":
        fits = any(mark in name.lower() for name in names for mark in ("lora", "lokr"))
    else:
        fits = any(name.startswith(("ip_adapter.", "image_proj.")) for name in names)
    if not fits:
        some = ", ".join(names[:3]) or "nothing"
        what = "LoRA" if role == "lora" else "IP-Adapter"
        raise InputError(f"--{role} {str(path)!r} holds no {what} (it has {some}); give the adapter's file")


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal, or a sentence why it cannot be read."""
    try:
        return digest_of_file(path)
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r} ({error.strerror or error})") from None


def open_picture(file: InputFile) -> Image:
    """An input picture, RGB (a mask: grey), as it was when the job was made.

    Raises:
        InputError: it cannot be read, is no picture of a possible size, or has changed since.
    """
    import warnings

    from PIL import Image, ImageOps, UnidentifiedImageError

    what = f"--{file.role} {file.path!r}"
    try:
        if Path(file.path).stat().st_size > MOST_BYTES:
            raise InputError(f"{what} has more than {MOST_BYTES} bytes; give a smaller picture")
        content = Path(file.path).read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(content))
            if image.width * image.height > MOST_PIXELS:
                raise Image.DecompressionBombError
            # As diffusers' load_image has it: turned as the camera was.
            image = ImageOps.exif_transpose(image).convert("L" if file.role == "mask" else "RGB")
    except Image.DecompressionBombError:
        raise InputError(f"{what} has more than {MOST_PIXELS} pixels; give a smaller picture") from None
    except UnidentifiedImageError:
        raise InputError(f"{what} is not a picture; give a PNG or JPEG") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(f"cannot read {what} ({getattr(error, 'strerror', None) or error})") from None
    _check_same(file, hashlib.sha256(content).hexdigest())
    return image


def _check_same(file: InputFile, digest: str) -> None:
    if digest != file.digest:
        raise InputError(f"--{file.role} {file.path!r} is not the file it was; leave it as it is while ranks run")


def find_again(file: InputFile, beside: Path) -> InputFile:
    """The same bytes as of a receipt's file: where it was, or under its name beside the picture or in this folder.

    Raises:
        InputError: it is missing, or has changed.
    """
    name = Path(file.path).name
    changed = None
    for path in dict.fromkeys([Path(file.path), beside / name, Path(name)]):
        # What a receipt names may be anything: only files are read.
        if path.is_file():
            if file_digest(path) == file.digest:
                return InputFile(file.role, str(path.resolve()), file.digest, file.scale)
            changed = changed or path
    what = f"the receipt names the {file.role} {file.path!r} (SHA-256 {file.digest[:16]}…), which "
    if changed is not None:
        raise InputError(f"{what}has changed: {str(changed)!r} holds something else; put the old file there")
    raise InputError(f"{what}is missing; put {name} there, or beside the picture")


# --- the class that takes them -----------------------------------------------------------------------------------


def check_roles(files: Iterable[InputFile], strength: float | None = None) -> None:
    """Refuse files that make no sense together.

    Raises:
        InputError: naming the options.
    """
    roles = [file.role for file in files]
    if strength is not None and not 0 < strength <= 1:
        raise InputError(f"strength {strength:g} is not possible; use more than 0 and at most 1")
    if strength is not None and "image" not in roles:
        raise InputError("--strength needs --image as well")
    for role in ("mask", "ip-image", "ip-adapter"):
        needed = {"mask": "image", "ip-image": "ip-adapter", "ip-adapter": "ip-image"}[role]
        if role in roles and needed not in roles:
            raise InputError(f"--{role} needs --{needed} as well")


def pipeline_for(name: str, files: Iterable[InputFile], strength: float | None = None) -> str:
    """The class of pipeline that takes input pictures: the model's own, or diffusers' own for them beside it.

    Args:
        name: class of the saved pipeline.
        files: of the job.
        strength: of the job.

    Returns:
        The name of the class in diffusers.

    Raises:
        InputError: there is none, or it cannot load an adapter.
    """
    import diffusers

    files = list(files)
    own = getattr(diffusers, name, None)
    if not files and strength is None:
        return name
    if not isinstance(own, type):
        options = ", ".join(f"--{file.role}" for file in files) or "--strength"
        raise InputError(f"{options}: {name} is no class of diffusers; call the pipeline from Python")
    wanted = {PICTURES[file.role]: file.role for file in files if file.role in PICTURES}
    if strength is not None:
        wanted["strength"] = "strength"
    kinds = [own, *_beside(own, "mask_image" in wanted)]
    fitting = [kind for kind in kinds if wanted.keys() <= inspect.signature(kind.__call__).parameters.keys()]
    if not fitting:
        parameters = inspect.signature(kinds[-1].__call__).parameters
        missing = [argument for argument in wanted if argument not in parameters]
        takes = [p for p in parameters if p in (*PICTURES.values(), "prompt", "class_labels", "strength")]
        raise InputError(
            f"--{wanted[missing[0]]}: {kinds[-1].__name__} takes no {missing[0]} (it takes {', '.join(takes)}, and "
            f"{len(parameters) - 1 - len(takes)} others); leave --{wanted[missing[0]]} out, or give a model that does"
        )
    for file in files:
        if file.role in ADAPTERS and not hasattr(fitting[0], ADAPTERS[file.role][0]):
            raise InputError(f"--{file.role}: {fitting[0].__name__} has no {ADAPTERS[file.role][0]}; leave it out")
    return fitting[0].__name__


def _beside(own: type[Any], masked: bool) -> list[type[Any]]:
    """Classes that diffusers makes of one for an image, or for an image and a mask."""
    from diffusers.pipelines import auto_pipeline

    maps: list[Any] = [
        auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING,
        auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
        auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING,
    ]
    model = next((key for mapping in maps for key, kind in mapping.items() if kind.__name__ == own.__name__), None)
    found = maps[2 if masked else 1].get(model or "")
    return [found] if found is not None and found is not own else []


# --- on ranks ----------------------------------------------------------------------------------------------------


def pictures_of(files: Iterable[InputFile]) -> dict[str, Image]:
    """The input pictures by the argument of the pipeline's call that takes each."""
    return {PICTURES[file.role]: open_picture(file) for file in files if file.role in PICTURES}


def load_adapters(pipe: Any, files: Iterable[InputFile]) -> None:
    """Load the adapters into a pipeline, with their scales.

    Raises:
        InputError: one has changed, or does not fit the model.
    """
    names: dict[str, float] = {}
    for file in files:
        if file.role not in ADAPTERS:
            continue
        _check_same(file, file_digest(file.path))
        folder, weights = str(Path(file.path).parent), Path(file.path).name
        try:
            if file.role == "lora":
                name = f"lora{len(names)}"
                pipe.load_lora_weights(folder, weight_name=weights, adapter_name=name)
                names[name] = file.scale
            else:
                pipe.load_ip_adapter(folder, weight_name=weights)
                pipe.set_ip_adapter_scale(file.scale)
        except MemoryError:
            raise
        except Exception as error:
            # Somebody else's file: what is wrong with it can come out as anything.
            said = " ".join(str(error).split())[:300] or type(error).__name__
            what = f"--{file.role} {file.path!r}"
            raise InputError(f"{what} cannot be loaded into {type(pipe).__name__} ({said})") from error
    if names:
        adapted = pipe.get_list_adapters()
        if {name for component in adapted.values() for name in component} != set(names):
            raise InputError(f"--lora: {type(pipe).__name__} has no layer that the file adapts; take another")
        pipe.set_adapters(list(names), adapter_weights=list(names.values()))
