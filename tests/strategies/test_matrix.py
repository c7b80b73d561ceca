"""The composition matrix: every class under every strategy, and under pairs and triples of them.

``make test`` runs a slice of it that touches every class and every combination; ``make test-all`` runs the
whole, and ``--write-support`` writes the outcome to ``src/ditmesh/support.json`` and ``docs/support.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ditmesh
from ditmesh.config import ParallelConfig
from ditmesh.parts.part import whole_of
from ditmesh.recipe import RECIPE
from ditmesh.strategies import support
from support.models import MAKERS, RAGGED, inputs, relative_error, run, tiny

TOLERANCE = 1e-5

COMBINATIONS: list[dict[str, Any]] = [
    {"ulysses": 2},
    {"ring": 2},
    {"tensor": 2},
    {"data": 2},
    {"cfg": 2},
    {"ulysses": 2, "ring": 2},
    {"tensor": 2, "ulysses": 2},
    {"tensor": 2, "ring": 2},
    {"data": 2, "ulysses": 2},
    {"data": 2, "ring": 2},
    {"data": 2, "tensor": 2},
    {"cfg": 2, "ulysses": 2},
    {"cfg": 2, "ring": 2},
    {"cfg": 2, "tensor": 2},
    {"data": 2, "cfg": 2},
    {"data": 2, "cfg": 2, "ulysses": 2},
    {"cfg": 2, "tensor": 2, "ulysses": 2},
    {"ring": 2, "exchange": "gather"},
    {"ulysses": 2, "ring": 2, "exchange": "gather"},
    {"cfg": 2, "ring": 2, "exchange": "gather"},
    {"data": 2, "ring": 2, "exchange": "gather"},
    {"tensor": 2, "ring": 2, "exchange": "gather"},
    {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
    {"cfg": 2, "ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
    {"data": 2, "ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
    {"tensor": 2, "ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
    {"ring": 2, "exchange": "naive", "warmup": "fixed(1)"},
    {"pipe": 2, "patches": 3, "warmup": "fixed(1)"},
    {"cfg": 2, "pipe": 2, "patches": 3, "warmup": "fixed(1)"},
    {"data": 2, "pipe": 2, "patches": 3, "warmup": "fixed(1)"},
    {"pipe": 2, "ulysses": 2, "patches": 3, "warmup": "fixed(1)"},
    {"pipe": 2, "ring": 2, "patches": 3, "warmup": "fixed(1)"},
    {"pipe": 2, "tensor": 2, "patches": 3, "warmup": "fixed(1)"},
    {"ulysses": 2, "shard": 2},
]
# Three axes on eight ranks: pipes and sequences beside data, as several users of xDiT run them.
LARGE: list[dict[str, Any]] = [
    {"data": 2, "pipe": 2, "ulysses": 2, "patches": 3, "warmup": "fixed(1)"},
    {"data": 2, "cfg": 2, "pipe": 2, "patches": 3, "warmup": "fixed(1)"},
    {"data": 2, "ulysses": 2, "tensor": 2},
    {"data": 2, "ulysses": 2, "ring": 2},
]
CASES = [(name, combination) for name in MAKERS for combination in COMBINATIONS]
CASES += [(name, combination) for name in MAKERS for combination in LARGE]


def in_slice(case: int) -> bool:
    """Half of a diagonal of the matrix: every second class once."""
    name, combination = divmod(case, len(COMBINATIONS))
    return case < len(MAKERS) * len(COMBINATIONS) and combination == name % len(COMBINATIONS) and name % 2 == 0


def outcome(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """What `support.json` holds for one cell, seen by one rank.

    Displaced and PipeFusion: the synchronous step, and a stale one at the same inputs, which must be exact as well.
    """
    model, arguments = tiny(name), inputs(name, RAGGED)
    truth = run(model, arguments)
    try:
        with ditmesh.parallelized(model, config):
            values = [whole_of(run(model, arguments))]
            if "pipe" in config:
                values.append(whole_of(run(model, arguments)))
            if config.get("exchange") == "displaced":
                ditmesh.engine_of(model).clock.advance()
                values.append(run(model, arguments))
    except (ditmesh.InputError, ditmesh.ConfigError) as error:
        return {"refused": str(error)}
    error = max(relative_error(a, b) for value in values for a, b in zip(flat(value), flat(truth), strict=True))
    return {"error": error} if error <= TOLERANCE else {"wrong": error}


def flat(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [tensor for item in output for tensor in flat(item)]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(
            name,
            config,
            id=f"{name}-{support.combination(ParallelConfig(**config), RECIPE)}",
            marks=() if in_slice(i) else pytest.mark.matrix,
        )
        for i, (name, config) in enumerate(CASES)
    ],
)
def test_cell(ranks, record_support, name, config):
    results = ranks(ParallelConfig(**config).world_size).run(outcome, name, config)
    worst = max(results, key=lambda result: result.get("wrong", result.get("error", 0.0)))
    key = support.combination(ParallelConfig(**config), RECIPE)
    record_support(type(tiny(name)).__name__, key, worst)
    assert "wrong" not in worst
    # What is refused is refused by all ranks alike, and the shipped table says so.
    assert len({"refused" in result for result in results}) == 1


def test_the_page_is_the_table():
    """docs/support.md is what the table says, and no class or combination is in it that the matrix does not run."""
    page = Path(__file__).parents[2] / "docs" / "support.md"
    assert page.read_text(encoding="utf-8") == support.as_markdown()
    # Narrow enough to be read, and every reason stands once.
    assert all(line.count("|") <= 11 for line in support.as_markdown().splitlines())
    refusals = {
        outcome["refused"]
        for row in support.support_table().values()
        for outcome in row.values()
        if "refused" in outcome
    }
    assert all(support.as_markdown().count(sentence) == 1 for sentence in refusals)
    classes = {type(tiny(name)).__name__ for name in MAKERS}
    combinations = {support.combination(ParallelConfig(**config), RECIPE) for config in COMBINATIONS + LARGE}
    assert set(support.support_table()) <= classes
    assert all(set(row) <= combinations for row in support.support_table().values())


def test_untested_combinations_warn_by_name(monkeypatch):
    monkeypatch.setattr(support, "support_table", lambda: {"M": {"ulysses": {"error": 0.0}, "ring": {"wrong": 0.5}}})
    with pytest.warns(ditmesh.errors.UntestedWarning, match=r"M with ulysses=2 ring=2 has not been tested.*ulysses"):
        support.check_tested("M", ParallelConfig(ulysses=2, ring=2), RECIPE)
    with pytest.raises(ditmesh.ConfigError, match="M with ring=2 is known to give a wrong image"):
        support.check_tested("M", ParallelConfig(ring=2), RECIPE)
    support.check_tested("M", ParallelConfig(ulysses=4), RECIPE)
