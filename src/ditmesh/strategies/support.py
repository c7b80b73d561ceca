"""What has been tested: class x combination of strategies, as the parity matrix left it.

The table (`support.json`) is written by the tests, never by hand: ``pytest tests/test_matrix.py
--write-support``. `parallelize` reads it: a combination known to be wrong is refused, one that nobody has
tested gives a warning by name.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..config import AXES, ParallelConfig
from ..errors import ConfigError, UntestedWarning

TABLE = Path(__file__).with_name("support.json")


def combination(config: ParallelConfig) -> str:
    """The strategies of a configuration, such as ``"cfg+ulysses"`` or ``"cfg+displaced"``; empty for one device."""
    names = {"ring": "ring" if config.exchange == "exact" else config.exchange}
    return "+".join(names.get(axis, axis) for axis in AXES if config.degrees[axis] > 1)


@cache
def table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Class -> combination -> outcome: ``{"error": 3e-7}``, ``{"refused": why}`` or ``{"wrong": error}``."""
    if not TABLE.exists():
        return {}
    return json.loads(TABLE.read_text(encoding="utf-8"))["classes"]


def check(model: str, config: ParallelConfig) -> None:
    """Refuse what is known to be wrong, warn about what is untested.

    Raises:
        ConfigError: the parity matrix found a wrong result, or a refusal, for this class and combination.
    """
    key = combination(config)
    if not key:
        return
    outcome = table().get(model, {}).get(key)
    if outcome is None:
        tested = ", ".join(table().get(model, {})) or "none"
        warnings.warn(
            f"{model} with {config.describe()} has not been tested (tested combinations: {tested}); "
            "compare a picture with one device before you rely on it",
            UntestedWarning,
            stacklevel=3,
        )
    elif "wrong" in outcome:
        raise ConfigError(
            f"{model} with {config.describe()} is known to draw a wrong picture (relative error "
            f"{outcome['wrong']:.1g}); use one of: {', '.join(k for k, o in table()[model].items() if 'error' in o)}"
        )


def as_markdown() -> str:
    """The table as a page."""
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    combinations = list(dict.fromkeys(key for row in data["classes"].values() for key in row))
    lines = [
        "# What works",
        "",
        "Written by the parity matrix (`pytest tests/test_matrix.py --write-support`), never by hand: every cell is",
        "one forward of a tiny float32 model of the class on gloo ranks, against the unmodified model on one device.",
        f"diffusers {data['diffusers']}, torch {data['torch']}.",
        "",
        'The figure is the largest relative error; 0 means equal to the bit. "refused" comes with a message that',
        "says why. For `displaced` and `pipe` it is the larger of that of a synchronous step and that of a stale one",
        "after which nothing has moved (with `cfg + pipe`: of synchronous steps); `naive` is lossy in all steps but",
        "the synchronous ones, of which the figure is.",
        "",
        "| transformer | " + " | ".join(key.replace("+", " + ") for key in combinations) + " |",
        "|---|" + "---|" * len(combinations),
    ]
    reasons: list[tuple[str, str]] = []
    for name, row in sorted(data["classes"].items()):
        cells = []
        for key in combinations:
            outcome = row.get(key, {})
            cell = ""
            if "refused" in outcome:
                reasons.append((f"{name}, {key}", outcome["refused"]))
                cell = "refused"
            elif "wrong" in outcome:
                cell = f"**wrong** ({outcome['wrong']:.0e})"
            elif "error" in outcome:
                cell = f"{outcome['error']:.0e}" if outcome["error"] else "0"
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if reasons:
        lines += ["", "## Refusals", "", *(f"* {where}: {why}" for where, why in sorted(reasons))]
    return "\n".join(lines) + "\n"
