"""Stored measurements of a machine: the fastest configuration of a model and a size."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from .._version import library_versions
from ..config import ParallelConfig
from ..errors import InputError
from .costs.work import Work, Workload, as_data

TIMED_LIBRARIES = ("torch", "diffusers")


def folder() -> Path:
    """The folder of the measurements."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ditmesh" / "plans"


def key_of(work: Work, workload: Workload, device: str, devices: int) -> str:
    """Key of model shapes, request size, hardware and library versions; the step count is left out on purpose.

    Where only the number of image tokens is known, as before the first call, it has the key of any grid of so many.
    """
    sizes = (workload.image, workload.text, workload.pictures, workload.branches, workload.element)
    together = workload.batched or workload.branches == 1
    parts: list[Any] = [as_data(work), sizes, together, device, devices]
    parts.append(dict(sorted(library_versions(TIMED_LIBRARIES).items())))
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def write_entry(key: str, entry: dict[str, Any]) -> Path:
    """Write an entry: ``config``, ``seconds``, and further facts.

    Raises:
        InputError: the folder cannot be written.
    """
    path = folder() / f"{key}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot keep the plan in {folder()}: {error.strerror}; set XDG_CACHE_HOME") from None
    return path


def entries() -> dict[str, dict[str, Any]]:
    """All stored entries by key, without unreadable ones."""
    found = {}
    for path in sorted(folder().glob("*.json")):
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            found[path.stem] = {**entry, "config": ParallelConfig.read(entry["config"])}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def forget() -> int:
    """Delete all of it; returns how many entries there were."""
    paths = [*folder().glob("*.json")]
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)
