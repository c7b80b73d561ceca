"""Receipts: the metadata inside a PNG or MP4, everything that is needed to generate it again.

A receipt may come from a stranger: all of it is checked, and bounded, before anything is done with it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from ..core.files import free_names, written_whole
from ..errors import InputError, reason_of
from ..media.images import MOST_PIXELS
from ..media.videos import MOST_VIDEO_PIXELS
from ..request import LONGEST_PROMPT, MOST_STEPS, MOST_TOGETHER, Count, Offload
from .files import InputFile
from .outputs import PipelineOutput, VideoFrames
from .video import FPS, is_video, metadata_of, write_mp4

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.PngImagePlugin import PngInfo

# The keyword of the PNG text chunk.
PNG_KEYWORD = "ditmesh"
# Bytes of a receipt.
MAX_RECEIPT_BYTES = 2**22
# A part of file names.
VARIANT = r"^[A-Za-z0-9_-]{1,64}$"

Dtype = Literal["float32", "bfloat16", "float16"]


class Receipt(BaseModel):
    """The record of how one image or video was generated.

    Attributes:
        seed: of this image's own `torch.Generator` on the CPU.
        index: number of the image in its run, from 0.
        config: the parallel configuration, as given to `ParallelConfig`.
        seconds: that the pipeline's call took (shared by the images of one call).
        label: number of the class, for class-conditional models.
        together, place: images of one call of the pipeline, and the number of this one among them, from 0: matrix
            kernels may round a row otherwise in a batch of another size.
        weights_digest: of all weights, adapters included (`digests.weights_fingerprint`); None: unknown.
        environment: what else decides the last bits, by name (`hardware.environment`).
        frames_digest: of a video's frames before they were compressed (`video.frames_digest`).
        cut: tokens of a prompt that a tokenizer left out, a sentence; None: there are none.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt: str = Field(max_length=LONGEST_PROMPT)
    negative_prompt: str | None = Field(default=None, max_length=LONGEST_PROMPT)
    seed: int = Field(ge=-(2**63), lt=2**64)
    index: int = Field(ge=0, lt=2**63)
    steps: int = Field(ge=1, le=MOST_STEPS)
    guidance: FiniteFloat
    max_sequence_length: Count | None = None
    width: Count
    height: Count
    model: str = Field(max_length=4096)
    pipeline: str
    dtype: Dtype
    device: str = Field(max_length=32)
    devices: Count
    config: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    seconds: FiniteFloat = Field(ge=0)
    label: int | None = Field(default=None, ge=0, lt=2**31)
    together: int = Field(default=1, ge=1, le=MOST_TOGETHER)
    place: int = Field(default=0, ge=0)
    files: list[InputFile] = Field(default_factory=list, max_length=64)
    strength: FiniteFloat | None = Field(default=None, gt=0, le=1)
    variant: str | None = Field(default=None, pattern=VARIANT)
    offload: Offload = "none"
    scheduler: str | None = Field(default=None, pattern=r"^[A-Za-z0-9]{1,64}$")
    weights_digest: str | None = None
    environment: dict[str, str] | None = None
    frames: Count | None = None
    fps: float | None = Field(default=None, gt=0, le=1000)
    frames_digest: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    cut: str | None = Field(default=None, max_length=1000)

    @model_validator(mode="after")
    def _fits_together(self) -> Receipt:
        if self.place >= self.together:
            raise ValueError(f"place {self.place} is none of {self.together} images")
        if self.frames is not None:
            if self.width * self.height * self.frames * self.together > MOST_VIDEO_PIXELS:
                raise ValueError(f"{self.together} videos of {self.width}x{self.height}x{self.frames} are too much")
        elif self.width * self.height * self.together > MOST_PIXELS:
            raise ValueError(f"{self.together} images of {self.width}x{self.height} are too much for one call")
        return self


def write_png(image: Image, path: str | Path, receipt: Receipt, replace: bool = True) -> Path:
    """Write an image with its receipt inside; the file appears whole or not at all.

    `FileExistsError`: there is a file of that name, and ``replace`` is False; `InputError`: the file cannot be written.
    """
    with _written(path, replace) as temporary:
        image.save(temporary, format="PNG", pnginfo=text_chunk(receipt))
    return Path(path)


@contextmanager
def _written(path: str | Path, replace: bool) -> Iterator[Path]:
    """`written_whole`, with an `InputError` for a file that cannot be written."""
    try:
        with written_whole(path, replace) as temporary:
            yield temporary
    except OSError as error:
        if isinstance(error, FileExistsError):
            raise
        raise InputError(f"cannot write {str(path)!r} ({reason_of(error)}); choose another folder") from error


def text_chunk(receipt: Receipt) -> PngInfo:
    """The text of a PNG that holds a receipt."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    # International text: prompts are written in every script there is.
    info.add_itxt(PNG_KEYWORD, receipt.model_dump_json())
    return info


def write_free(made: PipelineOutput, path: str | Path, receipt: Receipt, overwrite: bool = False) -> Path:
    """Write an image or video, of PIL images, under the first of its names that is free; returns the path.

    ``overwrite``: a file of such a name that ditmesh has written is replaced.
    """
    for free in free_names(path):
        with suppress(FileExistsError):
            replace = overwrite and holds_receipt(free)
            if not isinstance(made, VideoFrames):
                return write_png(made.image, free, receipt, replace)
            with _written(free, replace) as temporary:
                write_mp4(made.frames, temporary, receipt.fps or FPS, {PNG_KEYWORD: receipt.model_dump_json()})
            return free
    raise AssertionError("names do not end")


def copy_to_free_name(source: str | Path, path: str | Path, overwrite: bool = False) -> Path:
    """Copy an image or video to the first of its names that is free; arguments and errors as for `write_free`."""
    for free in free_names(path):
        with suppress(FileExistsError):
            with _written(free, overwrite and holds_receipt(free)) as temporary:
                shutil.copyfile(source, temporary)
            return free
    raise AssertionError("names do not end")


def holds_receipt(path: str | Path) -> bool:
    """True if a file is an image or video that ditmesh has written."""
    try:
        return PNG_KEYWORD in _texts(Path(path))
    except InputError:
        return False


def read_receipt(path: str | Path) -> Receipt:
    """The receipt inside a PNG or MP4; `InputError`: the file cannot be read, is neither, or has no valid one."""
    texts = _texts(Path(path))
    if PNG_KEYWORD not in texts:
        raise InputError(
            f"{str(path)!r} holds no receipt; only files that ditmesh wrote and no other program has saved again do"
        )
    if len(texts[PNG_KEYWORD]) > MAX_RECEIPT_BYTES:
        raise InputError(
            f"the receipt in {str(path)!r} has {len(texts[PNG_KEYWORD])} characters; ditmesh wrote none so long"
        )
    try:
        return Receipt.model_validate_json(texts[PNG_KEYWORD])
    except (ValidationError, RecursionError) as error:
        problems = error.errors(include_url=False, include_input=False) if isinstance(error, ValidationError) else []
        fields = ", ".join(_named(problem) for problem in problems[:5]) or "JSON"
        raise InputError(
            f"the receipt in {str(path)!r} cannot be read (wrong: {fields}); generate the image again"
        ) from None


def _named(problem: Any) -> str:
    """The field that is wrong, or what is wrong with several together."""
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return ".".join(map(str, problem["loc"])) or "JSON"


def _texts(path: Path) -> Mapping[str, str]:
    """The text chunks of a PNG, the metadata of an MP4."""
    if is_video(path):
        return metadata_of(path)
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            # Of an image that is large, but not too large: it is looked at below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise Image.DecompressionBombError
                # Text chunks may stand after the image's data.
                image.load()
                return dict(getattr(image, "text", {}))
    except Image.DecompressionBombError:
        raise InputError(f"{str(path)!r} is larger than any image that ditmesh writes; give one of these") from None
    except UnidentifiedImageError:
        raise InputError(f"{str(path)!r} is not an image; give a PNG that ditmesh wrote") from None
    except (OSError, ValueError, SyntaxError) as error:
        # The last two are what PIL says of a broken PNG, or of text that would fill the memory.
        raise InputError(f"cannot read {str(path)!r} ({reason_of(error)}); give a PNG that ditmesh wrote") from None
