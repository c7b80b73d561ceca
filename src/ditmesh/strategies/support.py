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
    """Reject combinations that the parity matrix found wrong for a class (`ConfigError`), and warn of untested ones.

    ``published``: whether it is diffusers' class, as it was tested.
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
