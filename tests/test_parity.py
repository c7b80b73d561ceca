"""The parity matrix: class x strategy x degree x batch, against the unmodified model in float32."""

from __future__ import annotations

import pytest

from support.models import ODD, RAGGED
from support.parity import parity, without_exchange

TOLERANCE = 1e-5  # relative, float32; measured errors are below 1e-6
MODELS = ["DiT", "PixArt", "SD3", "Flux"]
CONFIGS = [{"ulysses": 2}, {"ring": 2}, {"ulysses": 2, "ring": 2}, {"ulysses": 3}]
SIZES = {"B=1": ODD, "B=2 ragged": RAGGED}


def name_of(config):
    return " ".join(f"{axis}={degree}" for axis, degree in config.items())


def ranks_of(config):
    size = 1
    for axis in ("ulysses", "ring"):
        size *= config.get(axis, 1)
    return size


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("model", MODELS)
def test_equals_one_device(ranks, model, config, size):
    for text in ("shard", "replicate"):
        for result in ranks(ranks_of(config)).run(parity, model, {**config, "text": text}, size):
            assert result["error"] <= TOLERANCE
            assert result["repeats"]


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("model", MODELS)
def test_negative_control(ranks, model, config):
    """Without the exchange the same comparison fails on every rank, by orders of magnitude."""
    for error in ranks(ranks_of(config)).run(without_exchange, model, config, RAGGED):
        assert error > 100 * TOLERANCE


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("model", ["SD3", "Flux"])
def test_ulysses_is_bit_equal(ranks, model, world):
    """Keys in the order of one device: the softmax sums alike, and no bit differs."""
    for result in ranks(world).run(parity, model, {"ulysses": world}, RAGGED):
        assert result["equal"]


@pytest.mark.parametrize("text", ["shard", "replicate"])
def test_more_ranks_than_text_tokens(ranks, text):
    """With fewer text tokens than ranks some shards are empty."""
    from ditmesh.layout.conventions import Size

    size = Size(rows=8, cols=8, text=3, batch=2)
    for config in ({"ulysses": 4}, {"ring": 4}, {"ulysses": 2, "ring": 2}):
        for result in ranks(4).run(parity, "Flux", {**config, "text": text}, size, False):
            assert result["error"] <= TOLERANCE


@pytest.mark.parametrize("model", MODELS)
def test_bytes_on_the_wire(ranks, model):
    """Counters equal the formula, from shapes alone."""
    from support.traffic import expected_bytes

    for config in ({"ulysses": 2}, {"ring": 2}, {"ulysses": 3}, {"ulysses": 2, "ring": 2}):
        for size in (ODD, RAGGED):
            results = ranks(ranks_of(config)).run(parity, model, {**config, "text": "shard"}, size, False)
            for rank, result in enumerate(results):
                assert result["sent"] == expected_bytes(model, config, size, rank)
