"""Captions and labels of images and videos, from listings (``metadata.jsonl`` and others) and files next to them.

Nothing that cannot be read becomes an empty caption: it is refused by file and line.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...media.files import read_whole
from ...report.formatting import enumerated
from ...requirements import not_installed

# ``"text"`` (captions) or ``"label"`` (classes).
By = str
# The words of a sample: a caption, several of which one is drawn, a label, or nothing.
Words = str | tuple[str, ...] | int | None

# File names of listings without suffix: imagefolder's, and those of captioning tools.
LISTINGS = ("metadata", "captions", "meta_cap", "meta_clean", "meta_lat")
# Keys of a listing that name the file, and those that hold captions, by precedence.
FILE_COLUMNS = ("file_name", "filename", "file", "image", "image_path", "video", "video_path", "path")
CAPTION_COLUMNS = ("text", "caption", "prompt")
# Suffixes of caption files next to an image, by precedence.
BESIDE = {"text": (".json", ".txt", ".caption"), "label": (".json", ".cls")}
# Maximum bytes of a listing, and of a file next to an image.
MOST_LISTING, MOST_BESIDE = 2**32, 2**24
# UTF-32's mark begins as that of UTF-16 does.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def decoded(content: bytes, name: str) -> str:
    """Text of a file in UTF-8, or in UTF-8, UTF-16 or UTF-32 with a byte order mark.

    Raises:
        InputError: it is in another encoding; names the line.
    """
    mark, encoding = next(((mark, name) for mark, name in _MARKS if content.startswith(mark)), (b"", "utf-8"))
    body = content[len(mark) :]
    try:
        return body.decode(encoding)
    except UnicodeDecodeError as error:
        line = body[: error.start].decode(encoding, "replace").count("\n") + 1
        raise InputError(
            f"{name} line {line} is not {encoding.upper()} ({error.reason}); save the file as UTF-8"
        ) from None


def parsed(text: str, name: str) -> Any:
    """Parse JSON, and reject duplicate keys.

    Raises:
        InputError: it is no JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not JSON ({error})") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return found


def caption(value: Any, where: str) -> str | tuple[str, ...] | None:
    """A caption for training: text, a number's digits, several of a list, or None if it is missing (null, NaN).

    Raises:
        InputError: it is something else, or no text that can be encoded.
    """
    if isinstance(value, (list, tuple)):
        every = [one if isinstance(one, (list, tuple)) else caption(one, where) for one in value]
        if nested := [one for one in every if isinstance(one, (list, tuple))]:
            raise InputError(f"{where} has a list of lists of captions ({json.dumps(nested[0], default=str)[:80]})")
        return captions_of_sample([one for one in every if isinstance(one, str)])
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise InputError(f"{where} has a caption that is no text but {json.dumps(value, default=str)[:80]}")
    if "\0" in value:
        raise InputError(f"{where} has a caption with NUL characters (UTF-16 without a byte order mark has them)")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} has a caption with half of a surrogate pair, which is no text") from None
    return value


def captions_of_sample(captions: Sequence[str]) -> str | tuple[str, ...] | None:
    """Captions of one sample, without blank ones: a text, several texts, or None."""
    there = tuple(dict.fromkeys(one for one in captions if one.strip()))
    return there if len(there) > 1 else next(iter(there), None)


def label(value: Any, where: str, column: str) -> int | None:
    """A class label: an integer from 0 on, also as text; None: it is missing.

    Raises:
        InputError: it is something else.
    """
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
        column: its key or column as it is configured; None: the first of `CAPTION_COLUMNS` that a source has.
        by_line: every line of a caption file is a caption.
    """

    by: By
    column: str | None
    by_line: bool = False

    def among(self, columns: Sequence[str]) -> str | None:
        """The column to read; None: there is none."""
        wanted = CAPTION_COLUMNS if self.column is None else (self.column,)
        return next((one for one in wanted if one in columns), None)

    def value(self, value: Any, where: str) -> Words:
        """A value for training. Raises `InputError`."""
        return caption(value, where) if self.by == "text" else label(value, where, self.column or "label")


# --- listings ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListedFile:
    """An entry of a listing.

    Attributes:
        where: for messages: the listing, and the line or key.
        file: its name, relative to the listing's folder.
        row: the columns.
    """

    where: str
    file: str
    row: Mapping[str, Any]


@dataclass
class Listing:
    """A file that lists other files with captions or labels.

    Attributes:
        name: of it, for messages.
        lines: those that name a file.
        problems: a sentence for every other one.
        columns: of all lines but for the file's name, in the order of their first use.
    """

    name: str
    lines: list[ListedFile] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)


def is_listing(name: str) -> bool:
    """True if a file of this name is read as a listing."""
    stem, dot, kind = name.lower().rpartition(".")
    return stem in LISTINGS and dot + kind in _READERS


def read_listing(path: Path, name: str) -> Listing:
    """Read JSON lines, CSV, TSV, parquet, or JSON: a list of objects, or an object by file name.

    Args:
        name: of it, for messages.

    Raises:
        InputError: it cannot be read as a whole, or no line of it can.
    """
    found = Listing(name)
    for where, row in _READERS[path.suffix.lower()](path, name):
        if isinstance(row, str):
            found.problems.append(row)
            continue
        key = next((one for one in FILE_COLUMNS if one in row), None)
        if key is None:
            names = enumerated(map(str, row), 8) or "nothing"
            found.problems.append(f"{where} names no file (it has {names}); file_name is looked for")
            continue
        file = row[key]
        if not isinstance(file, str) or not file.strip():
            held = isinstance(file, Mapping)
            found.problems.append(
                f"{where}: {key} is {'an image itself' if held else json.dumps(file, default=str)[:80]}, and the name "
                "of a file is read"
            )
            continue
        for column in row:
            if column != key and column not in found.columns:
                found.columns.append(column)
        found.lines.append(ListedFile(where, file, row))
    if not found.lines:
        raise InputError(f"no line of {name} can be read: {(found.problems or ['it has none'])[0]}")
    return found


# Results of a reader: the place, and the columns or an error.
_Rows = Iterator[tuple[str, Mapping[str, Any] | str]]


def _json_lines(path: Path, name: str) -> _Rows:
    # Other characters that Python splits lines at (U+2028, U+0085, form feeds) are part of a caption.
    for number, line in enumerate(decoded(read_whole(path, name, MOST_LISTING), name).split("\n"), 1):
        where = f"{name} line {number}"
        if not line.strip():
            continue
        try:
            row = parsed(line, where)
        except InputError as error:
            row = str(error)
        yield where, row if isinstance(row, (dict, str)) and row else f"{where} is no JSON object"


def _json(path: Path, name: str) -> _Rows:
    content = parsed(decoded(read_whole(path, name, MOST_LISTING), name), name)
    if isinstance(content, list):
        for number, row in enumerate(content, 1):
            where = f"{name} entry {number}"
            yield where, row if isinstance(row, dict) else f"{where} is no JSON object"
    elif isinstance(content, dict):
        for key, row in content.items():
            where = f"{name} entry {key!r}"
            if isinstance(row, dict):
                yield where, {"file_name": key, **{k: v for k, v in row.items() if k not in FILE_COLUMNS}}
            elif row is None or isinstance(row, str):
                yield where, {"file_name": key, "caption": row}
            else:
                yield where, f"{where} is no JSON object"
    else:
        raise InputError(f"{name} is neither a list of JSON objects nor a JSON object by file name")


def _table(delimiter: str) -> Callable[[Path, str], _Rows]:
    def rows(path: Path, name: str) -> _Rows:
        text = io.StringIO(decoded(read_whole(path, name, MOST_LISTING), name), newline="")
        # Strict: otherwise an unclosed quotation mark puts all later lines into one caption.
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            columns = [one.strip() for one in next(reader, [])]
            if len(set(columns)) < len(columns):
                raise InputError(f"{name} has a column twice ({', '.join(columns)})")
            if not set(columns) & set(FILE_COLUMNS):
                raise InputError(
                    f"{name} has no column file_name in its first line (it has {', '.join(columns)[:200]})"
                )
            for cells in reader:
                where = f"{name} line {reader.line_num}"
                if not cells:
                    continue
                if len(cells) != len(columns):
                    yield where, f"{where} has {len(cells)} cells for {len(columns)} columns; quote cells with commas"
                    continue
                yield where, {key: None if cell == "" else cell for key, cell in zip(columns, cells, strict=True)}
        except csv.Error as error:
            raise InputError(f"{name} line {reader.line_num} is no row of a table ({error})") from None

    return rows


def _parquet(path: Path, name: str) -> _Rows:
    if find_spec("pyarrow") is None:
        raise InputError(not_installed(f"reading {name}", "pyarrow", "data"))
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    try:
        # Opened here first, because opening a pipe would block.
        table = pyarrow.parquet.ParquetFile(io.BytesIO(read_whole(path, name, MOST_LISTING)))
        held = [
            one.name for one in table.schema_arrow if str(one.type).startswith(("struct", "binary", "large_binary"))
        ]
        columns = [one for one in table.schema_arrow.names if one not in held]
        if not set(columns) & set(FILE_COLUMNS):
            way = f"; {', '.join(held)} holds the images themselves: write them to files" if held else ""
            raise InputError(
                f"{name} has no column file_name (it has {', '.join(table.schema_arrow.names)[:200]}){way}"
            )
        number = 0
        for batch in table.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{name} row {number}", row
    except InputError:
        raise
    except Exception as error:
        # An untrusted file can raise any exception.
        raise InputError(f"{name} is no parquet file that can be read ({str(error)[:200]})") from None


_READERS: dict[str, Callable[[Path, str], _Rows]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _table(","),
    ".tsv": _table("\t"),
    ".parquet": _parquet,
}


# --- files beside an image --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SidecarContent:
    """The content of files beside an image that describe it.

    Attributes:
        value: caption or label; None: nothing.
        source: kind of the file that it is from.
        others: kinds of files that say something else.
        columns: keys of a JSON file in which none of the wanted ones was found.
        row: the JSON file's keys and values.
    """

    value: Words = None
    source: str = ""
    others: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict)


def read_beside(files: Mapping[str, tuple[str, Callable[[], bytes]]], wanted: CaptionColumn) -> SidecarContent:
    """Read the files beside an image that describe it.

    Args:
        files: by suffix: name, for messages, and what reads it.

    Raises:
        InputError: one of them cannot be read.
    """
    found: list[tuple[str, Words]] = []
    columns: tuple[str, ...] = ()
    row: dict[str, Any] = {}
    for kind in BESIDE[wanted.by]:
        if kind not in files:
            continue
        name, read = files[kind]
        text = decoded(read(), name)
        source = kind
        if kind == ".json":
            row = parsed(text, name)
            if not isinstance(row, dict):
                raise InputError(f"{name} is no JSON object")
            column = wanted.among(list(row))
            if column is None:
                columns = tuple(row)
                if wanted.column is not None and wanted.by == "text":
                    # A configured column is not replaced by another one.
                    return SidecarContent(columns=columns, row=row)
                continue
            value, source = wanted.value(row[column], name), f"{column} in .json"
        elif wanted.by_line and wanted.by == "text":
            value = wanted.value([line.strip() for line in text.split("\n")], name)
        else:
            value = wanted.value(text.strip(), name)
        if value is not None:
            found.append((source, value))
    if not found:
        return SidecarContent(columns=columns, row=row)
    source, value = found[0]
    others = tuple(kind for kind, other in found[1:] if str(other).strip() != str(value).strip())
    return SidecarContent(value, source, others, row=row)
