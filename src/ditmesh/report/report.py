"""The output of a command in blocks, which writers tell apart by class: `text` prints them, `lab.pages` adds charts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.files import finite
from .formatting import flattened_pairs

# Maximum columns of a table at page width; tables with more become cards on a tablet.
ROOM = 7


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
class Section:
    """The start of a section; numbers begin at 1."""

    title: str
    number: int


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; a note is set lighter."""

    parts: tuple[StyledText, ...]
    note: bool = False


@dataclass(frozen=True)
class Points:
    """A list of sentences; with a word to unfold it by, if there is one."""

    texts: tuple[str, ...]
    folded: str = ""


@dataclass(frozen=True)
class ReportTable:
    """A table.

    Attributes:
        header, rows: names of the columns, and cells; the first ``keys`` cells name their row.
        caption: a title; may be empty in a terminal.
        look: ``"cards"`` or ``"many"`` (rows become cards where there is no room, or on a tablet already), ``"facts"``
            (names and values), or empty.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[StyledText, ...], ...]
    caption: str
    look: str = ""
    keys: int = 1

    @property
    def as_cards(self) -> bool:
        """True if rows may become cards."""
        return self.look in ("cards", "many")

    def left(self, column: int) -> str:
        """The meaning by which a column is set to the left, if it has one."""
        kinds = [row[column].kind for row in self.rows if row[column].kind in ("words", "name")]
        return kinds[-1] if kinds else ""


@dataclass
class Report:
    """A report that grows from top to bottom; title and lead are those of a page, and empty in a terminal."""

    title: str = ""
    lead: str = ""
    blocks: list[Any] = field(default_factory=list)

    @property
    def sections(self) -> list[Section]:
        """The place where its sections begin."""
        return [block for block in self.blocks if isinstance(block, Section)]

    def section(self, title: str) -> None:
        """Begin a section; a page of several has them listed at its top."""
        self.blocks.append(Section(title, len(self.sections) + 1))

    def text(self, *parts: str, note: bool = False) -> None:
        """A paragraph; a note is set lighter."""
        self.blocks.append(Paragraph(tuple(map(styled, parts)), note))

    def points(self, texts: Sequence[str], folded: str = "") -> None:
        """A list of sentences; with a word to unfold it by, if there is one."""
        self.blocks.append(Points(tuple(texts), folded))

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
    look = "many" if look == "cards" and len(kept) > ROOM else look
    return ReportTable(
        tuple(header[n] for n in kept), tuple(tuple(styled(row[n]) for n in kept) for row in rows), caption, look, keys
    )


def as_json(data: Mapping[str, Any]) -> str:
    """Data as JSON; infinite numbers are null."""
    return json.dumps(finite(data), indent=1, allow_nan=False)
