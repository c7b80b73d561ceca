"""Weights in pieces: the same bits, less memory, exactly undone."""

from __future__ import annotations

from typing import Any

import pytest

from ditmesh.config import ParallelConfig
from support.models import MAKERS
from support.sharded import compared

WARM: dict[str, Any] = {"warmup": "fixed(1)"}
CONFIGS: list[tuple[dict[str, Any], int]] = [
    ({"ulysses": 2}, 2),
    ({"ring": 2, "shared_memory": False}, 2),
    ({"data": 2}, 2),
    ({"cfg": 2}, 2),
    ({"ring": 2, "exchange": "displaced", **WARM}, 2),
    ({"ulysses": 2, "reproducible": True}, 2),
    ({"ulysses": 2, "compile": "eager"}, 2),
]


@pytest.mark.parametrize("model", ["Flux", "SD3"])
@pytest.mark.parametrize(("config", "shard"), CONFIGS, ids=str)
def test_same_bits(ranks, model, config, shard):
    for result in ranks(ParallelConfig(**config).world_size).run(compared, model, config, shard):
        assert result["equal"], result
        assert result["restored"], result
        assert result["held"] < 0.55 * result["whole"], result


@pytest.mark.matrix
@pytest.mark.parametrize("model", sorted(MAKERS))
def test_every_class(ranks, model):
    for result in ranks(2).run(compared, model, {"ulysses": 2}, 2):
        assert result["equal"], result
        assert result["restored"], result
