"""Private or undocumented names of other libraries on which ditmesh relies.

A library may rename each of them in any version. What is missing is said in one sentence when a pipeline is made
parallel, before anything has run, and on every rank; tests delete each name, and find names that are not listed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..errors import ConfigError

# Versions in which all names were seen: those of constraints.txt.
TESTED = {
    "accelerate": "1.15.0",
    "diffusers": "0.42.1",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}


class Borrowed(NamedTuple):
    """Names that belong to one object, and what ditmesh does with them.

    Attributes:
        owner: module, and behind a colon the object in it, if it is not the module itself; of an object with ``()`` its
            instances have the names. A function has the names that its code uses.
        names: of attributes.
        use: what ditmesh does with them.
    """

    owner: str
    names: tuple[str, ...]
    use: str


@cache
def borrowed_names() -> tuple[Borrowed, ...]:
    """The table of all of them."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(Borrowed(row["owner"], tuple(row["names"]), row["use"]) for row in rows)


def owner_of(row: Borrowed) -> Any:
    """The object whose names a row lists; None: its module is not loaded, so no name of this object is used yet."""
    path, _, inside = row.owner.partition(":")
    if (owner := sys.modules.get(path)) is None or not inside:
        return owner
    try:
        inner = attrgetter(inside.removesuffix("()"))(owner)
    except AttributeError:
        # Its names are missing with it.
        return object()
    return inner() if inside.endswith("()") else inner


def has(owner: Any, name: str) -> bool:
    """True if an object has a name; a function: if its code uses it."""
    if (code := getattr(owner, "__code__", None)) is not None:
        return name in code.co_names or name in code.co_consts
    return hasattr(owner, name)


def missing() -> Iterator[str]:
    """A sentence for each name that a loaded library lacks."""
    for row in borrowed_names():
        if (owner := owner_of(row)) is None:
            continue
        library = row.owner.partition(":")[0].partition(".")[0]
        for name in row.names:
            if not has(owner, name):
                yield (
                    f"{library} {metadata.version(library)} has no {name!r} in {row.owner.replace(':', '.')}, by which "
                    f"ditmesh would {row.use}; install {library}=={TESTED[library]}, with which it is tested"
                )


def check_borrowed() -> None:
    """Raises `ConfigError`: a library has renamed what ditmesh relies on."""
    if sentence := next(missing(), None):
        raise ConfigError(sentence)
