"""The samples of a step on one image: as they are cut, mirrored, masked and worded for the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ...errors import InputError, reason_of

# Sides in pixels, lines of a caption, and samples of a sheet.
_CELL, _MARGIN, _LINE, _LINES, MOST_CELLS = 256, 12, 15, 6, 48


@dataclass(frozen=True)
class SeenSample:
    """A sample as the model sees it.

    Attributes:
        caption: it is trained with; empty for none.
        size: (height, width) of its bucket, in pixels.
        file_size: (height, width) of its file.
        mirrored: whether it is mirrored.
        kind: ``"sample"`` or ``"class image"``.
        picture: RGB; None: it cannot be decoded, and ``problem`` says why.
        mask: L, white where the loss counts.
        reference: RGB.
        problem: why there is no image.
    """

    name: str
    caption: str
    size: tuple[int, int]
    file_size: tuple[int, int]
    mirrored: bool
    kind: str = "sample"
    picture: Image.Image | None = None
    mask: Image.Image | None = None
    reference: Image.Image | None = None
    problem: str = ""


def write_sheet(samples: Sequence[SeenSample], path: str | Path) -> int:
    """Write a PNG with samples and their captions.

    Args:
        samples: of a step, `MOST_CELLS` of which are shown.

    Returns:
        The number of samples on it.

    Raises:
        InputError: it cannot be written.
    """
    shown = samples[:MOST_CELLS]
    wide = any(one.reference is not None for one in shown)
    columns = max(1, min(len(shown), 3 if wide else 6, math.ceil(math.sqrt(len(shown) * (1 if wide else 1.6)))))
    step = (_CELL * (1 + wide) + _MARGIN, _CELL + _LINE * (_LINES + 2) + _MARGIN)
    rows = math.ceil(len(shown) / columns)
    sheet = Image.new("RGB", (columns * step[0] + _MARGIN, rows * step[1] + _MARGIN), "white")
    for number, sample in enumerate(shown):
        row, column = divmod(number, columns)
        _cell(sheet, sample, (column * step[0] + _MARGIN, row * step[1] + _MARGIN), step[0] - _MARGIN)
    try:
        sheet.save(path, "PNG")
    except OSError as error:
        raise InputError(f"--samples {str(path)!r} cannot be written ({reason_of(error)})") from None
    return len(shown)


def _cell(sheet: Image.Image, sample: SeenSample, place: tuple[int, int], width: int) -> None:
    draw, font = ImageDraw.Draw(sheet), _font()
    x, y = place
    if sample.picture is None:
        draw.rectangle((x, y, x + _CELL - 1, y + _CELL - 1), outline="#b00020", width=2)
        _write(draw, sample.problem, (x + 8, y + 8), _CELL - 16, 12, "#b00020", font)
    else:
        seen = sample.picture if sample.mask is None else _masked(sample.picture, sample.mask)
        _paste(sheet, seen, (x, y))
    if sample.reference is not None:
        _paste(sheet, sample.reference, (x + _CELL, y))
    (height, wide), (file_height, file_width) = sample.size, sample.file_size
    about = [f"{file_width} x {file_height} as {wide} x {height}"]
    about += [sample.kind] if sample.kind != "sample" else []
    about += ["mirrored"] if sample.mirrored else []
    about += ["masked"] if sample.mask is not None else []
    about += ["reference on the right"] if sample.reference is not None else []
    y += _CELL + 2
    _write(draw, sample.name, (x, y), width, 1, "#666666", font)
    _write(draw, ", ".join(about), (x, y + _LINE), width, 1, "#666666", font)
    words, colour = (sample.caption, "black") if sample.caption.strip() else ("(no caption)", "#b06000")
    _write(draw, words, (x, y + 2 * _LINE), width, _LINES, colour, font)


def _paste(sheet: Image.Image, picture: Image.Image, place: tuple[int, int]) -> None:
    """An image as large as a cell allows; small ones by whole factors, so that their pixels are seen."""
    factor = _CELL / max(picture.size)
    factor = math.floor(factor) if factor > 1 else factor
    size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
    way = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    sheet.paste(picture.resize(size, way), (place[0] + (_CELL - size[0]) // 2, place[1] + (_CELL - size[1]) // 2))


def _masked(picture: Image.Image, mask: Image.Image) -> Image.Image:
    faint = Image.blend(picture, Image.new("RGB", picture.size, "#d00000"), 0.6)
    return Image.composite(picture, faint, mask)


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    # One with the letters of most captions, where a system has it.
    for name in ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf"):
        try:
            return ImageFont.truetype(name, 12)
        except OSError:
            continue
    return ImageFont.load_default(12)


def _write(
    draw: ImageDraw.ImageDraw,
    text: str,
    place: tuple[int, int],
    width: int,
    lines: int,
    colour: str,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """Text in a column; what finds no room ends in dots."""
    found, line = [], ""
    # No script is written with words of hundreds of letters; text without spaces is broken anywhere.
    for word in (part for one in text.split() for part in _pieces(one, draw, width, font)):
        longer = f"{line} {word}".strip()
        if line and draw.textlength(longer, font) > width:
            found.append(line)
            longer = word
        line = longer
    found += [line] if line else []
    if len(found) > lines:
        found = [*found[: lines - 1], f"{found[lines - 1]} ..."]
        while len(found[-1]) > 4 and draw.textlength(found[-1], font) > width:
            found[-1] = f"{found[-1][:-5]} ..."
    for number, one in enumerate(found):
        draw.text((place[0], place[1] + number * _LINE), one, colour, font)


def _pieces(
    word: str, draw: ImageDraw.ImageDraw, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> list[str]:
    found = []
    while word and draw.textlength(word, font) > width:
        count = next(n for n in range(len(word), 0, -1) if n == 1 or draw.textlength(word[:n], font) <= width)
        found.append(word[:count])
        word = word[count:]
    return [*found, word] if word else found
