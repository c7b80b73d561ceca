"""Walks that were made before: of this process, and in a file for every version of all that a walk runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, wraps
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from .._version import library_versions


@dataclass(frozen=True)
class Needs:
    """Bytes of a phase: the weights of the model that runs, tensors that are alive at the peak besides, what of these
    stays from step to step, and of the weights those of one block of every kind.
    """

    weights: float
    activations: float
    kept: float = 0.0
    blocks: tuple[float, ...] = ()


Found = TypeVar("Found", Needs, list[Needs])


def kept(walk: Callable[..., Found]) -> Callable[..., Found]:
    """Keep a walk's result by its arguments, which consist of plain values.

    A process that finds its walks in the file imports no models.
    """

    @wraps(walk)
    def result_of(*args: Any) -> Found:
        key, results = sha256(repr((walk.__name__, args)).encode()).hexdigest()[:32], _results()
        if key not in results:
            results[key] = walk(*args)
            with suppress(OSError):
                _file().parent.mkdir(parents=True, exist_ok=True)
                with _file().open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, results[key]], default=vars) + "\n")
        return results[key]

    return result_of


@cache
def _results() -> dict[str, Any]:
    """Those in the file, and those of this process."""
    results: dict[str, Any] = {}
    with suppress(OSError):
        for line in _file().read_text(encoding="utf-8").splitlines():
            # A line that another process is writing.
            with suppress(ValueError, TypeError):
                key, found = json.loads(line)
                results[key] = [Needs(**each) for each in found] if isinstance(found, list) else Needs(**found)
    return results


@cache
def _file() -> Path:
    """The file of this version of the package and of the libraries that a walk runs."""
    package = Path(__file__).parents[1]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(package.rglob("*.py"))]
    digest = sha256(repr([library_versions(), files]).encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ditmesh" / "memory" / f"{digest}.jsonl"
