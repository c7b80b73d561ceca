"""Data between the nodes: requests and their images."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ditmesh.extend import PictureRequest, Receipt


@dataclass(frozen=True)
class Lora:
    """An adapter: its name as the user wrote it, and its scale."""

    name: str
    scale: float


@dataclass(frozen=True)
class InputPicture:
    """An input image, or a mask of the part to generate again, as PNG bytes."""

    png: bytes
    image: Image

    @property
    def digest(self) -> str:
        """SHA-256 of the PNG, in hexadecimal."""
        return hashlib.sha256(self.png).hexdigest()

    @property
    def name(self) -> str:
        """Name of the file in which it is kept."""
        return f"ditmesh-input-{self.digest[:16]}.png"


@dataclass(frozen=True)
class Wanted:
    """Everything except the pipeline that determines the images.

    Attributes:
        request: what is asked for; its size is not given where the image's is to be taken.
        scheduler: class of the scheduler; None: the model's own.
    """

    request: PictureRequest
    scheduler: str | None = None
    loras: tuple[Lora, ...] = ()
    image: InputPicture | None = None
    mask: InputPicture | None = None


class Watch(Protocol):
    """The watcher of a request; an exception in its methods stops the request at the end of a step."""

    previews: bool

    def check(self) -> None: ...

    def step(self, done: int, total: int, picture: Any = None) -> None: ...


class Pipeline(Protocol):
    """A pipeline for the nodes: ranks of this machine, or a server."""

    def generate(self, wanted: Wanted, watch: Watch) -> list[Made]: ...


@dataclass(frozen=True)
class Made:
    """An image, or the frames of a video, and the receipt."""

    images: tuple[Image, ...]
    receipt: Receipt


@dataclass(frozen=True)
class Receipts:
    """Receipts of a batch of images, with digests that show whether the images are unchanged.

    Attributes:
        receipts: one for each picture or video.
        digests: of the pictures' pixels, or those of the frames.
        inputs: the input pictures that the receipts name.
    """

    receipts: tuple[Receipt, ...]
    digests: tuple[str, ...]
    inputs: tuple[InputPicture, ...] = ()


def as_tensor(images: list[Image]) -> torch.Tensor:
    """Images of one size as ComfyUI's IMAGE: (batch, height, width, 3) float32 from 0 to 1, on the CPU."""
    import numpy
    import torch

    # Exactly n / 255, from which SaveImage gets n again.
    return torch.from_numpy(numpy.stack([numpy.asarray(image.convert("RGB")) for image in images])).float() / 255


def as_picture(image: torch.Tensor) -> Image:
    """One image of an IMAGE, (height, width, 3), or of a MASK, (height, width), rounded to 8 bits."""
    import torch
    from PIL import Image

    return Image.fromarray((image.detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8).numpy())


def input_picture(image: torch.Tensor | None, what: str) -> InputPicture | None:
    """The only image of an IMAGE or MASK; None stays None.

    Raises:
        InputError: there are several.
    """
    from ditmesh import InputError
    from ditmesh.extend import as_seen

    if image is None:
        return None
    if image.shape[0] != 1:
        raise InputError(f"{what} holds {image.shape[0]} pictures; give one, such as by ImageFromBatch")
    picture, file = as_picture(image[0]), io.BytesIO()
    picture = picture.convert("L") if image.ndim == 3 else as_seen(picture, what)
    picture.save(file, "PNG")
    return InputPicture(file.getvalue(), picture)


def pixels_digest(image: Image) -> str:
    """SHA-256 of an image's size and pixels, in hexadecimal."""
    image = image.convert("RGB")
    return hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()


def stamp(path: str) -> str:
    """A stamp that changes when a file, or a file in a folder, is rewritten; empty for missing files."""
    place = Path(path)
    inside = (f"{below}*{ending}" for below in ("", "*/") for ending in (".json", ".safetensors", ".bin"))
    files = [place] if place.is_file() else sorted(file for pattern in inside for file in place.glob(pattern))
    facts = [(str(file), found.st_size, found.st_mtime_ns) for file in files if (found := file.stat())]
    return hashlib.sha256(repr(facts).encode()).hexdigest() if facts else ""
