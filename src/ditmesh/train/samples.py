"""Pictures or videos and what is said of them: folders with ``metadata.jsonl``, and WebDataset tars.

A folder follows Hugging Face's imagefolder: one JSON object a line with ``file_name`` and a caption or label; without
that file, a picture's caption stands in a ``.txt`` of the same name. A tar follows WebDataset: files of one sample
share their name up to the first dot.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..errors import InputError
from ..generate.video import SUFFIXES, is_picture, read_frames
from .config import TrainConfig

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# Of a video model's data set; animated pictures are videos too.
FILES = (*PICTURES, ".gif", *SUFFIXES)


@dataclass(frozen=True)
class Sample:
    """One picture or video.

    Attributes:
        name: for messages: its file, or tar and file.
        said: caption, label, or None.
        size: (height, width) of the file, in pixels.
        file: where its bytes are.
        offset, length: of the bytes in the file; the whole file when length is -1.
    """

    name: str
    said: Any
    size: tuple[int, int]
    file: Path
    offset: int = 0
    length: int = -1

    def picture(self) -> Image.Image:
        """The decoded picture, RGB.

        Raises:
            OSError: it is corrupt; names it.
        """
        try:
            opened: Image.Image = Image.open(io.BytesIO(self._content()))
            if opened.mode in ("RGBA", "LA", "P"):
                behind = Image.new("RGBA", opened.size, "white")
                opened = Image.alpha_composite(behind, opened.convert("RGBA"))
            return opened.convert("RGB")
        except Exception as error:
            raise OSError(_no_picture(self.name, error)) from None

    def frames(self, count: int) -> list[Image.Image]:
        """The first ``count`` frames of a video, RGB.

        Raises:
            OSError: it is corrupt, or has fewer; names it.
        """
        try:
            found = read_frames(self._content(), self.name, count)
        except Exception as error:
            raise OSError(_no_picture(self.name, error)) from None
        if len(found) < count:
            raise OSError(f"{self.name} has {len(found)} frames, and num_frames={count}")
        return found

    def _content(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)


@dataclass(frozen=True)
class Samples:
    """All of a data set that can be read, in the order of their names, and why others were left out.

    Attributes:
        good: the samples.
        corrupt: a sentence for each that was skipped.
    """

    good: tuple[Sample, ...]
    corrupt: tuple[str, ...]

    @staticmethod
    def find(config: TrainConfig, by: str, advance: Callable[[int], None] | None = None) -> Samples:
        """Read the names, captions and sizes of a data set; no picture is decoded.

        Args:
            config: where it is.
            by: ``"text"`` or ``"label"``: what is said of a picture.
            advance: called with the number of samples that have been looked at so far.

        Raises:
            InputError: there is no such folder, or no picture in it.
        """
        folder = Path(config.train_data_dir)
        if not folder.is_dir():
            raise InputError(f"train_data_dir={config.train_data_dir!r} is no folder")
        column = config.caption_column if by == "text" else config.label_column
        good: list[Sample] = []
        corrupt: list[str] = []
        tars = sorted(folder.glob("*.tar"))
        kinds = PICTURES if config.num_frames is None else FILES
        for found in (*_in_tars(tars, column, kinds), *([] if tars else _in_folder(folder, column, kinds))):
            if isinstance(found, str):
                corrupt.append(found)
            else:
                good.append(found)
            if advance is not None:
                advance(len(good) + len(corrupt))
        if not good:
            raise InputError(
                f"{config.train_data_dir!r} has no picture that can be read"
                + (f" ({corrupt[0]})" if corrupt else f"; files of {', '.join(kinds)} or tars of them are looked for")
            )
        wrong = next((one for one in good if by == "label" and not isinstance(one.said, (int, type(None)))), None)
        if wrong is not None:
            raise InputError(
                f"{wrong.name}: {column} is {wrong.said!r}, and a class-conditional model wants an integer"
            )
        return Samples(tuple(good), tuple(corrupt))


def _in_folder(folder: Path, column: str, kinds: tuple[str, ...]) -> Iterator[Sample | str]:
    said: dict[str, Any] = {}
    listing = folder / "metadata.jsonl"
    if listing.exists():
        for number, line in enumerate(listing.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                said[entry["file_name"]] = entry.get(column)
            except (ValueError, KeyError, TypeError, AttributeError):
                yield f"{listing} line {number} is no JSON object with a file_name"
    names = (
        sorted(said)
        if said
        else sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix.lower() in kinds)
    )
    for name in names:
        path, text = folder / name, (folder / name).with_suffix(".txt")
        caption = said.get(name)
        if not said and text.exists():
            caption = text.read_text(encoding="utf-8").strip()
        yield _sample(name, caption, path)


def _in_tars(tars: Sequence[Path], column: str, kinds: tuple[str, ...]) -> Iterator[Sample | str]:
    for tar in tars:
        entries: dict[str, dict[str, tarfile.TarInfo]] = {}
        try:
            with tarfile.open(tar) as opened:
                for member in opened:
                    if member.isfile():
                        stem, _, kind = member.name.rpartition("/")[2].partition(".")
                        where = member.name.rpartition("/")[0]
                        entries.setdefault(f"{where}/{stem}".lstrip("/"), {})[f".{kind.lower()}"] = member
        except (tarfile.TarError, OSError, EOFError) as error:
            yield f"{tar} breaks off: {error}"
        for key, files in sorted(entries.items()):
            picture = next((files[kind] for kind in kinds if kind in files), None)
            if picture is None:
                continue
            caption: Any = None
            try:
                if ".json" in files:
                    caption = json.loads(_bytes(tar, files[".json"])).get(column)
                elif ".cls" in files:
                    caption = int(_bytes(tar, files[".cls"]))
                elif ".txt" in files:
                    caption = _bytes(tar, files[".txt"]).decode().strip()
            except (ValueError, AttributeError) as error:
                yield f"{tar}:{key}: what is said of it cannot be read ({error})"
                continue
            yield _sample(f"{tar.name}:{picture.name}", caption, tar, picture.offset_data, picture.size)


def _bytes(tar: Path, member: tarfile.TarInfo) -> bytes:
    with tar.open("rb") as file:
        file.seek(member.offset_data)
        return file.read(member.size)


def _sample(name: str, said: Any, file: Path, offset: int = 0, length: int = -1) -> Sample | str:
    try:
        with file.open("rb") as opened:
            opened.seek(offset)
            content = opened.read(length)
        # A video's first frame is decoded: containers lie about sizes.
        known = is_picture(content) or Path(name).suffix.lower() not in SUFFIXES
        shown = Image.open(io.BytesIO(content)) if known else read_frames(content, name, 1)[0]
    except Exception as error:
        return _no_picture(name, error)
    return Sample(name, said, (shown.height, shown.width), file, offset, length)


def pixels(picture: Image.Image, size: tuple[int, int], flip: bool = False) -> Tensor:
    """A picture as (3, H, W) in [-1, 1]: scaled to cover ``size`` and cut in its middle."""
    height, width = size
    factor = max(height / picture.height, width / picture.width)
    scaled = picture.resize((max(width, round(picture.width * factor)), max(height, round(picture.height * factor))))
    left, top = (scaled.width - width) // 2, (scaled.height - height) // 2
    array = np.asarray(scaled.crop((left, top, left + width, top + height)))
    values = torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 127.5 - 1
    return values.flip(2) if flip else values


def _no_picture(name: str, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"{name} is no picture that can be read"
    return f"{name} is no picture: {str(error).splitlines()[0] if str(error) else repr(error)}"
