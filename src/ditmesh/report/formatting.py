"""Numbers, names and settings for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def count(number: int, noun: str) -> str:
    """Such as ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def enumerated(names: Iterable[str], most: int, rest: str = "others") -> str:
    """The first names, and how many more there are: ``a, b and 4 others``."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} {rest}" if len(every) > most else "")


def flattened_pairs(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Pairs of name and text; of a mapping inside one pair for each entry, ``name: entry``. None is left out."""
    for name, value in facts.items():
        full = f"{above}: {name}" if above else str(name)
        if isinstance(value, Mapping):
            yield from flattened_pairs(value, full)
        elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value, 1):
                yield from flattened_pairs({str(number): item}, full)
        elif value is not None:
            yield full, setting_text(value)


def setting_text(value: Any) -> str:
    """A setting for people: yes and no, numbers, what a list holds; none for None."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(setting_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
