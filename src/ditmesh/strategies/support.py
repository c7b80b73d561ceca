"""The test results of the parity matrix: class x combination of strategies.

The table (`support.json`) is written by the tests, never by hand: ``pytest tests/strategies/test_matrix.py
--write-support``. `parallelize` reads it: a combination known to be wrong is refused, one that no test has
tested gives a warning by name.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import AXES, ParallelConfig
from ..errors import ConfigError, UntestedWarning

if TYPE_CHECKING:
    from .base import Recipe

TABLE = Path(__file__).with_name("support.json")

# Combination -> outcome, of one class.
Row = Mapping[str, Mapping[str, Any]]
# Cells (class, combination) by the sentence that refuses them.
Reasons = Mapping[str, list[tuple[str, str]]]


def combination(config: ParallelConfig, recipe: Recipe) -> str:
    """A configuration's key in the table, such as ``"cfg+ulysses"`` or ``"cfg+displaced"``; empty for one device."""
    from .base import wanted

    named = [strategy for strategy in wanted(recipe, config) if strategy.key]
    in_place = {strategy.key_of_axis: strategy.key for strategy in named}
    axes = [in_place.get(axis, axis) for axis in AXES if config.degrees[axis] > 1]
    return "+".join([*axes, *(strategy.key for strategy in named if not strategy.key_of_axis)])


@cache
def support_table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Class -> combination -> outcome: ``{"error": 3e-7}``, ``{"refused": why}`` or ``{"wrong": error}``."""
    if not TABLE.exists():
        return {}
    return json.loads(TABLE.read_text(encoding="utf-8"))["classes"]


def check_tested(model: str, config: ParallelConfig, recipe: Recipe, published: bool = True) -> None:
    """Reject combinations that are known to be wrong, and warn about untested ones.

    Args:
        model: name of the transformer's class.
        recipe: strategies to choose from.
        published: whether it is diffusers' class, as it was tested; another class may have the name.

    Raises:
        ConfigError: the parity matrix found a wrong result for this class and combination.
    """
    key = combination(config, recipe)
    if not key:
        return
    row = support_table().get(model, {}) if published else {}
    # Weights in pieces are the same numbers.
    outcome = row.get(key, row.get(key.removesuffix("+shard")))
    if outcome is None:
        tested = ", ".join(row) or "none"
        warnings.warn(
            f"{model} with {config.describe()} has not been tested (tested combinations: {tested}); "
            "compare an image with one device before you rely on it",
            UntestedWarning,
            stacklevel=3,
        )
    elif "wrong" in outcome:
        raise ConfigError(
            f"{model} with {config.describe()} is known to give a wrong image (relative error "
            f"{outcome['wrong']:.1g}); use one of: {', '.join(k for k, o in row.items() if 'error' in o)}"
        )


def as_markdown() -> str:
    """The table as a page: single strategies by class, combinations in short, refusals by their sentence."""
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    classes: dict[str, dict[str, dict[str, Any]]] = dict(sorted(data["classes"].items()))
    keys = list(dict.fromkeys(key for row in classes.values() for key in row))
    lines = [
        "# Supported classes and combinations",
        "",
        "This page lists the transformer classes with a reviewed layout, and the strategies that work with each.",
        "`ditmesh verify` checks a combination with your own model:",
        "",
        "```text",
        'ditmesh verify "ulysses=2" --model MODEL',
        "```",
        "",
        "Every cell is one forward of a tiny float32 model of the class on gloo ranks, compared with the unmodified",
        f"model on one device (diffusers {data['diffusers']}, torch {data['torch']}). The figure is the largest",
        "relative error; 0 means bit-identical. For `displaced` and `pipe` it is the larger error of a synchronous",
        "step and of a stale step with unchanged keys (for `cfg + pipe`, of synchronous steps only). For `naive` it",
        "is the error of synchronous steps; the other steps are lossy. *refused* means that `parallelize` raises an",
        "error; the number leads to its message.",
        "`pytest tests/strategies/test_matrix.py --write-support` generates this page.",
        "",
        "## Single strategies",
        "",
    ]
    reasons = _reasons(classes)
    marks = {where: str(number) for number, cells in enumerate(reasons.values(), 1) for where in cells}
    lines += _by_class(classes, [key for key in keys if "+" not in key], marks)
    lines += ["", "## Combinations", "", *_by_combination(classes, [key for key in keys if "+" in key], marks)]
    if reasons:
        lines += ["", "## Error messages", "", *_sentences(reasons, keys)]
    return "\n".join(lines) + "\n"


def _reasons(classes: Mapping[str, Row]) -> Reasons:
    found: dict[str, list[tuple[str, str]]] = {}
    for name, row in classes.items():
        for key, outcome in row.items():
            if "refused" in outcome:
                found.setdefault(outcome["refused"], []).append((name, key))
    return found


def _cell(outcome: Mapping[str, Any], mark: str) -> str:
    if "refused" in outcome:
        return f"refused <sup>{mark}</sup>"
    if "wrong" in outcome:
        return f"**wrong** ({_figure(outcome['wrong'])})"
    return _figure(outcome["error"]) if "error" in outcome else ""


def _figure(error: float) -> str:
    """One digit and the exponent, which no browser parts from it."""
    return f"{error:.0e}".replace("e-0", "e-").replace("-", "\u2011") if error else "0"


def _by_class(classes: Mapping[str, Row], keys: list[str], marks: Mapping[tuple[str, str], str]) -> list[str]:
    lines = ["| transformer | " + " | ".join(keys) + " |", "|---|" + "---|" * len(keys)]
    for name, row in classes.items():
        cells = (_cell(row.get(key, {}), marks.get((name, key), "")) for key in keys)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _by_combination(classes: Mapping[str, Row], keys: list[str], marks: Mapping[tuple[str, str], str]) -> list[str]:
    lines = ["| combination | supported classes | largest error | bit-identical | not |", "|---|---|---|---|---|"]
    for key in keys:
        errors = [row[key]["error"] for row in classes.values() if "error" in row.get(key, {})]
        others = [
            f"{name}: {_cell(row[key], marks.get((name, key), ''))}"
            for name, row in classes.items()
            if key in row and "error" not in row[key]
        ]
        tested = [name for name, row in classes.items() if key in row]
        if len(tested) < len(classes):
            others.append(f"only {', '.join(tested)} tested")
        exact = sum(not error for error in errors)
        figures = [f"{len(errors)} of {len(classes)}", _figure(max(errors, default=0.0)), str(exact)]
        lines.append(f"| {' + '.join(key.split('+'))} | {' | '.join(figures)} | {', '.join(others)} |")
    return lines


def _sentences(reasons: Reasons, keys: list[str]) -> list[str]:
    """A line for each error message, with its classes and combinations."""
    lines = []
    for number, (sentence, cells) in enumerate(reasons.items(), 1):
        refused = {key for _, key in cells}
        names = ", ".join(dict.fromkeys(name for name, _ in cells))
        what = ", ".join(" + ".join(key.split("+")) for key in keys if key in refused)
        lines.append(f"* <sup>{number}</sup> **{names}** with {what}: {sentence}")
    return lines
