"""The output of a command in blocks, which writers tell apart by class: `text` prints them, `lab.pages` adds charts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.files import finite
from .formatting import flattened_pairs


class StyledText(str):
    """Text with a meaning, in a table or a paragraph.

    ``"good"``, ``"bad"`` and ``"unsure"`` are coloured, ``"strong"`` is bold; ``"words"`` sets a cell as running text,
    ``"name"`` to the left.
    """

    kind: str

    def __new__(cls, text: str, kind: str = "") -> StyledText:
        """See the class."""
        styled = super().__new__(cls, text)
        styled.kind = kind
        return styled


def styled(text: str) -> StyledText:
    """The text; without a meaning if it has none."""
    return text if isinstance(text, StyledText) else StyledText(text)


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; a note is set lighter."""

    parts: tuple[StyledText, ...]
    note: bool = False


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class ReportTable:
    """A table.

    Attributes:
        header, rows: names of the columns, and cells; the first ``keys`` cells name their row.
        caption: a title; may be empty in a terminal.
        look: ``"facts"``: names and values; ``"cards"``: rows may become cards where there is no room; or empty.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[StyledText, ...], ...]
    caption: str
    look: str = ""
    keys: int = 1


@dataclass
class Report:
    """A report that grows from top to bottom."""

    blocks: list[Any] = field(default_factory=list)

    def text(self, *parts: str, note: bool = False) -> None:
        """A paragraph; a note is set lighter."""
        self.blocks.append(Paragraph(tuple(map(styled, parts)), note))

    def points(self, texts: Sequence[str]) -> None:
        """A list of sentences."""
        self.blocks.append(Points(tuple(texts)))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", keys: int = 1) -> None:
        """A table; the first ``keys`` cells of a row name it. A column without a single entry is left out."""
        self.blocks.append(filled_table(header, rows, caption, "cards", keys))

    def facts(self, facts: Mapping[str, Any], caption: str = "") -> None:
        """Names and values, settings inside of settings spelled out line by line."""
        rows = [(name, StyledText(value, "words")) for name, value in flattened_pairs(facts)]
        self.blocks.append(filled_table(("what", "value"), rows, caption, "facts"))


def filled_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], caption: str, look: str = "", keys: int = 1
) -> ReportTable:
    """A table without the columns in which no row has anything; the columns that name a row stay."""
    kept = [n for n in range(len(header)) if n < keys or any(row[n] for row in rows)]
    return ReportTable(
        tuple(header[n] for n in kept), tuple(tuple(styled(row[n]) for n in kept) for row in rows), caption, look, keys
    )


def as_json(data: Mapping[str, Any]) -> str:
    """Data as JSON; infinite numbers are null."""
    return json.dumps(finite(data), indent=1, allow_nan=False)
