"""Captions and labels of images and videos, from listings (``metadata.jsonl``, ``.csv``) and files next to them.

Nothing that cannot be read becomes an empty caption: it is refused by file and line.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...generate.modular import call_parameters
from ...media.files import read_whole
from ...report.formatting import enumerated
from ..settings import DataConfig

# ``"text"`` (captions) or ``"label"`` (classes).
By = str
# The words of a sample: a caption, several of which one is drawn, a label, or nothing.
Words = str | tuple[str, ...] | int | None

# Columns of a listing that name the file, and those that hold captions, by precedence.
FILE_COLUMNS = ("file_name", "filename", "file", "image", "image_path", "video", "video_path", "path")
CAPTION_COLUMNS = ("text", "caption", "prompt")
# Suffixes of files with captions next to an image, by precedence.
BESIDE = (".txt", ".caption")
# Maximum bytes of a listing, and of a file next to an image.
MOST_LISTING, MOST_BESIDE = 2**32, 2**24


def decoded(content: bytes, name: str) -> str:
    """Text of a file in UTF-8, with or without its mark. Raises `InputError` with the line of another encoding."""
    body = content.removeprefix(codecs.BOM_UTF8)
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        number = body[: error.start].count(b"\n") + 1
        raise InputError(f"{name} line {number} is not UTF-8 ({error.reason}); save the file as UTF-8") from None


def caption(value: Any, where: str) -> str | tuple[str, ...] | None:
    """A caption for training: text, a number's digits, several of a list, or None if it is missing (null, NaN).

    Raises `InputError`: it is something else, or no text that can be encoded.
    """
    if isinstance(value, (list, tuple)):
        if nested := [entry for entry in value if isinstance(entry, (list, tuple))]:
            raise InputError(f"{where} has a list of lists of captions ({json.dumps(nested[0], default=str)[:80]})")
        captions = [caption(entry, where) for entry in value]
        texts = tuple(dict.fromkeys(text for text in captions if isinstance(text, str) and text.strip()))
        return texts if len(texts) > 1 else next(iter(texts), None)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise InputError(f"{where} has a caption that is no text but {json.dumps(value, default=str)[:80]}")
    if "\0" in value:
        raise InputError(f"{where} has a caption with NUL characters (UTF-16 has them; save the file as UTF-8)")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} has a caption with half of a surrogate pair, which is no text") from None
    return value


def label(value: Any, where: str, column: str) -> int | None:
    """A class label: an integer from 0 on, also as text; None: it is missing. Raises `InputError`."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str) and re.fullmatch(r"\s*\d+\s*", value, re.ASCII):
        value = int(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        shown = json.dumps(value, default=str) if not isinstance(value, str) else repr(value)
        raise InputError(f"{where}: {column} is {shown[:80]}, and a class-conditional model wants an integer")
    return value


@dataclass(frozen=True)
class CaptionColumn:
    """The words to read: captions or labels.

    Attributes:
        by: a caption, or a label.
        column: its column as it is configured; None: the first of `CAPTION_COLUMNS` that a source has, or ``label``.
    """

    by: By
    column: str | None

    def among(self, columns: Sequence[str]) -> str | None:
        """The column to read; None: there is none."""
        usual = CAPTION_COLUMNS if self.by == "text" else ("label",)
        wanted = usual if self.column is None else (self.column,)
        return next((column for column in wanted if column in columns), None)

    def value(self, value: Any, where: str) -> Words:
        """A value for training. Raises `InputError`."""
        return caption(value, where) if self.by == "text" else label(value, where, self.column or "label")


@dataclass(frozen=True)
class SampleWords:
    """The caption or label of a sample (None: nothing), and where it stands: column and file, or a suffix."""

    words: Words = None
    source: str = ""

    def check_against(self, other: SampleWords) -> None:
        """Reject words that are others in another place. Raises `InputError`."""
        if None not in (self.words, other.words) and str(self.words).strip() != str(other.words).strip():
            raise InputError(f"{self.source} and {other.source} say different things; leave one there")


def read_beside(files: Mapping[str, str], folder: Path) -> SampleWords:
    """Read the files beside an image that have its caption; their names by suffix are relative to the folder.

    Raises `InputError`: one of them cannot be read, or they contradict one another.
    """
    first = SampleWords()
    for kind, name in sorted(files.items(), key=lambda file: BESIDE.index(file[0])):
        path = folder / name
        # An empty file is an empty caption.
        is_empty = path.is_file() and not path.stat().st_size
        content = b"" if is_empty else read_whole(path, name, MOST_BESIDE)
        words = SampleWords(caption(decoded(content, name).strip(), name), kind)
        first.check_against(words)
        first = words if first.words is None else first
    return first


# --- listings ---------------------------------------------------------------------------------------------------


@dataclass
class Listing:
    """A file that lists other files with captions or labels.

    Attributes:
        lines: those that name a file: the place for messages, the name relative to the listing, and the columns.
        problems: a sentence for every other one.
        columns: of all lines but for the file's name, in the order of their first use.
    """

    lines: list[tuple[str, str, Mapping[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)


def read_listing(path: Path, name: str) -> Listing:
    """Read JSON lines or CSV. Raises `InputError`: it cannot be read as a whole, or no line of it can."""
    listing = Listing()
    for where, row in LISTINGS[path.name.lower()](decoded(read_whole(path, name, MOST_LISTING), name), name):
        if isinstance(row, str):
            listing.problems.append(row)
            continue
        key = next((column for column in FILE_COLUMNS if column in row), None)
        if key is None:
            names = enumerated(map(str, row), 8) or "nothing"
            listing.problems.append(f"{where} names no file (it has {names}); file_name is looked for")
            continue
        file = row[key]
        if not isinstance(file, str) or not file.strip():
            listing.problems.append(
                f"{where}: {key} is {json.dumps(file, default=str)[:80]}, and the name of a file is read"
            )
            continue
        listing.columns += [column for column in row if column != key and column not in listing.columns]
        listing.lines.append((where, file, row))
    if not listing.lines:
        raise InputError(f"no line of {name} can be read: {(listing.problems or ['it has none'])[0]}")
    return listing


# Results of a reader: the place, and the columns or an error.
_Rows = Iterator[tuple[str, Mapping[str, Any] | str]]


def _json_lines(text: str, name: str) -> _Rows:
    # Other characters that Python splits lines at (U+2028, U+0085, form feeds) are part of a caption.
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{name} line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            row = f"{where} is not JSON ({error})"
        yield where, row if isinstance(row, (dict, str)) and row else f"{where} is no JSON object"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return dict(pairs)


def _csv(text: str, name: str) -> _Rows:
    # Strict: otherwise an unclosed quotation mark puts all later lines into one caption.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = [cell.strip() for cell in next(reader, [])]
        if len(set(columns)) < len(columns):
            raise InputError(f"{name} has a column twice ({', '.join(columns)})")
        if not set(columns) & set(FILE_COLUMNS):
            raise InputError(f"{name} has no column file_name (it has {', '.join(columns)[:200]})")
        for cells in reader:
            where = f"{name} line {reader.line_num}"
            if cells and len(cells) != len(columns):
                yield where, f"{where} has {len(cells)} cells for {len(columns)} columns; quote cells with commas"
            elif cells:
                yield where, {key: cell or None for key, cell in zip(columns, cells, strict=True)}
    except csv.Error as error:
        raise InputError(f"{name} line {reader.line_num} is no row of a table ({error})") from None


# The names of listings, as imagefolder has them, and their readers.
LISTINGS: dict[str, Callable[[str, str], _Rows]] = {"metadata.jsonl": _json_lines, "metadata.csv": _csv}


# --- the caption that a sample is trained with: one of several, with a trigger word -------------------------------

# As ai-toolkit's captions have it.
TRIGGER = "[trigger]"


def triggered(words: Words, trigger: str | None) -> Words:
    """Captions with a trigger word; labels and missing captions as they are."""
    if isinstance(words, tuple):
        return tuple(str(triggered(text, trigger)) for text in words)
    if trigger is None or not isinstance(words, str) or not words.strip():
        return words
    if TRIGGER in words:
        return words.replace(TRIGGER, trigger)
    return words if trigger in words else f"{trigger}, {words}"


def chosen(words: Words, seed: int) -> int:
    """The number of the caption that is drawn among several; 0 for one."""
    return int(random.Random(seed).random() * len(words)) if isinstance(words, tuple) else 0


def captions_of(words: Words) -> tuple[Any, ...]:
    """All captions that a sample can have; of labels and missing captions the one, as it is."""
    return words if isinstance(words, tuple) else (words,)


def long_captions(pipe: Any, config: DataConfig, captions: Sequence[tuple[str, str]]) -> list[str]:
    """A sentence for every tokenizer that captions, each with the name of its sample, are too long for."""
    length = config.max_sequence_length
    if length is None:
        default = call_parameters(pipe).get("max_sequence_length")
        length = None if default is None else default.default
    longest = max(length) if isinstance(length, tuple) else length
    sentences = []
    for name, tokenizer in pipe.components.items():
        if not captions or not hasattr(tokenizer, "model_max_length"):
            continue
        limit = min(tokenizer.model_max_length, longest if isinstance(longest, int) else math.inf)
        # Without its own warning about what is counted here.
        ids = tokenizer([text for _, text in captions], truncation=False, verbose=False)["input_ids"]
        counts = [(len(tokens), sample) for tokens, (sample, _) in zip(ids, captions, strict=True)]
        if cut := [pair for pair in counts if pair[0] > limit]:
            noun = "caption is" if len(cut) == 1 else "captions are"
            most, sample = max(cut)
            sentences.append(f"{len(cut)} {noun} cut by {name} at {limit} tokens (the longest has {most}: {sample})")
    return sentences
