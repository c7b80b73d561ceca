"""Names of a transformer's linear layers in its authors' code, which ComfyUI and many trainers of LoRA use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from torch import nn

# Classes whose layers have their authors' names in diffusers.
_SAME_NAMES = ("QwenImageTransformer2DModel",)


@dataclass(frozen=True)
class OriginalLayer:
    """A layer in the authors' code.

    Attributes:
        parts: the layers of diffusers that are its rows, from the top.
        swapped: diffusers has the upper and the lower half of the rows the other way round.
    """

    name: str
    parts: tuple[str, ...]
    swapped: bool = False


@cache
def _tables() -> dict[str, list[dict[str, str]]]:
    """By class of a transformer its rows: an authors' name, and those of diffusers' layers; the file says how."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def original_layers(model: nn.Module) -> list[OriginalLayer]:
    """The layers of a transformer as its authors name them, where that differs; ComfyUI's names first."""
    own = {name for name, _ in model.named_modules()}
    rows = (row for part in _tables().get(_kind(model), ()) for row in part.items())
    return [layer for row in rows for layer in _expanded(row, own)]


def takes_comfyui_names(model: nn.Module) -> bool:
    """True if ComfyUI's names for a transformer's layers are known here."""
    return _kind(model) in (*_tables(), *_SAME_NAMES)


def _kind(model: nn.Module) -> str:
    """The class of a transformer in diffusers, of which sharded ones have a subclass."""
    own = [kind.__name__ for kind in type(model).__mro__]
    return next((name for name in own if name in _tables() or name in _SAME_NAMES), own[0])


def _expanded(row: tuple[str, str], paths: set[str]) -> Iterator[OriginalLayer]:
    theirs, ours = row
    mark, ours = (ours[0], ours[1:]) if ours[0] in "~?" else ("", ours)
    first, *others = ours.split()
    parts = tuple(f"{first}{other}" for other in others) or (first,)
    blocks = _blocks(paths, parts[0].split("*")[0]) if "*" in parts[0] else [""]
    for block in blocks:
        names = tuple(part.replace("*", block) for part in parts)
        if paths.issuperset(names):
            swapped = mark == "~" or (mark == "?" and block == blocks[-1])
            yield OriginalLayer(theirs.replace("*", block), names, swapped)


def _blocks(own: set[str], before: str) -> list[str]:
    numbers = {name.removeprefix(before).split(".")[0] for name in own if name.startswith(before)}
    return sorted((number for number in numbers if number.isdecimal()), key=int)
