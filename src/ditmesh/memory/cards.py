"""Devices that are known by name, with their memory: `parts.yaml` has the source of every figure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError, did_you_mean

PARTS = Path(__file__).with_name("parts.yaml")


@dataclass(frozen=True)
class Card:
    """A device of the table: bytes of memory, and of these what a process takes without a model."""

    name: str
    memory: float
    runtime: float


@cache
def parts() -> dict[str, Any]:
    """The table: devices, links, and what they share."""
    return yaml.safe_load(PARTS.read_text(encoding="utf-8"))


def card(name: str) -> Card:
    """A device of the table; `InputError` names those that are there, if it is none of them."""
    entry = device_entry(name)
    runtime = entry.get("runtime", parts()["shares"]["runtime"])
    return Card(key_of(name), float(entry["memory"]), float(runtime))


def device_entry(name: str) -> dict[str, Any]:
    """The table's figures of a device; raises as `card`."""
    table, key = parts()["devices"], key_of(name)
    if key not in table:
        raise InputError(
            f"device {name!r} is not in the table; use one of {', '.join(table)}{did_you_mean(key, table)}"
        )
    return table[key]


def key_of(name: str) -> str:
    """The table's form of a name such as ``NVIDIA GeForce RTX 4090``."""
    key = name.strip().lower().replace(" ", "-")
    for brand in ("nvidia-", "geforce-", "rtx-"):
        key = key.removeprefix(brand)
    return key
