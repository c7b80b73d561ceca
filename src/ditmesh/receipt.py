"""What a PNG says about itself: everything that is needed to draw it again."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

# The keyword of the PNG text chunk.
CHUNK = "ditmesh"


class Receipt(BaseModel):
    """How one picture was drawn.

    Attributes:
        prompt: what was asked for (for class-conditional models: the class).
        negative_prompt: what was to be avoided, if anything.
        seed: seed of this picture's own `torch.Generator` on the CPU.
        index: number of the picture in its run, from 0.
        steps: denoising steps.
        guidance: guidance scale.
        max_sequence_length: longest prompt in tokens, when it was given.
        width, height: in pixels.
        model: folder or hub id of the pipeline.
        pipeline: class of the pipeline.
        dtype: of the weights, such as ``"float32"``.
        device: ``"cpu"`` or ``"cuda"``.
        devices: number of ranks.
        config: the parallel configuration, as given to `ParallelConfig`.
        versions: of Python and of the libraries that compute.
        seconds: time that the pipeline's call took (shared by the pictures of one call), in seconds. After a restart:
            that of the call that finished the picture.
        restarts: what happened while the picture was drawn: ``{"step": 5, "from": 4, "to": 3}`` for every time that
            ranks were lost and the others went on from a step (counted from 0).
        label: number of the class, for class-conditional models.
        together: pictures that one call of the pipeline drew; place: number of this one among them, from 0. Matrix
            kernels may round a row otherwise in a batch of another size.
        weights: fingerprint of all weights, adapters included (`digests.weights_fingerprint`); None in receipts of
            earlier versions, as is the environment.
        environment: what else decides the last bits, by name (`hardware.environment`).
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt: str
    negative_prompt: str | None = None
    seed: int
    index: int
    steps: int
    guidance: float
    max_sequence_length: int | None = None
    width: int
    height: int
    model: str
    pipeline: str
    dtype: str
    device: str
    devices: int
    config: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    seconds: float
    restarts: list[dict[str, int]] = Field(default_factory=list)
    label: int | None = None
    together: int = 1
    place: int = 0
    weights: str | None = None
    environment: dict[str, str] | None = None


def library_versions(names: tuple[str, ...] = ("torch", "diffusers", "transformers")) -> dict[str, str]:
    """Versions of Python, ditmesh, and those of ``names`` that are installed."""
    from . import __version__

    versions = {"python": platform.python_version(), "ditmesh": __version__}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def write_png(image: Image, path: str | Path, receipt: Receipt) -> Path:
    """Write a picture with its receipt inside; the file appears whole or not at all.

    Args:
        image: the picture.
        path: where it goes; a file of that name is replaced.
        receipt: how the picture was drawn.

    Returns:
        The path.

    Raises:
        InputError: the file cannot be written.
    """
    from PIL.PngImagePlugin import PngInfo

    path = Path(path)
    info = PngInfo()
    # International text: prompts are written in every script there is.
    info.add_itxt(CHUNK, receipt.model_dump_json())
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        image.save(temporary, format="PNG", pnginfo=info)
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r} ({error.strerror or error}); choose another folder") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return path


def read_receipt(path: str | Path) -> Receipt:
    """The receipt inside a PNG.

    Raises:
        InputError: the file cannot be read, is not a picture, or holds no (valid) receipt.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            # Text chunks may stand after the picture's data.
            image.load()
            texts: Mapping[str, str] = getattr(image, "text", {})
    except UnidentifiedImageError:
        raise InputError(f"{str(path)!r} is not a picture; give a PNG that ditmesh wrote") from None
    except OSError as error:
        raise InputError(
            f"cannot read {str(path)!r} ({error.strerror or error}); give a PNG that ditmesh wrote"
        ) from None
    if CHUNK not in texts:
        raise InputError(
            f"{str(path)!r} holds no receipt; only PNGs that ditmesh wrote and no other program has saved again do"
        )
    try:
        return Receipt.model_validate_json(texts[CHUNK])
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, problem["loc"])) or "JSON" for problem in error.errors())
        raise InputError(
            f"the receipt in {str(path)!r} cannot be read (wrong: {fields}); draw the picture again"
        ) from None
