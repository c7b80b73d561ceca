"""examples/own_strategy.py: what a strategy from outside says of itself is read as what the package's own ones say."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from ditmesh.config import ParallelConfig
from ditmesh.errors import UntestedWarning
from ditmesh.strategies import support


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "own_strategy.py"))


def test_its_key_names_it_in_the_support_table(example: dict[str, Any]) -> None:
    config = example["GatherConfig"](cfg=2, ring=2, gathered=True)
    assert support.combination(config, example["recipe"]) == "cfg+gathered"
    assert support.combination(ParallelConfig(cfg=2, ring=2), example["recipe"]) == "cfg+ring"
    # Ring attention was tested with this class, the example was not.
    with pytest.warns(UntestedWarning, match="has not been tested"):
        support.check_tested("FluxTransformer2DModel", config, example["recipe"])
