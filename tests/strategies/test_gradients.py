"""Gradients through parallel transformers: equal to one device's, in every exact strategy."""

from __future__ import annotations

import pytest
from test_parity import name_of

from ditmesh.config import ParallelConfig
from support.gradients import (
    STALE,
    bytes_of_a_step,
    mixed_precision,
    ordered_data,
    ordered_step,
    refusals,
    trained,
    training_step,
)
from support.models import MAKERS
from support.parity import without_exchange

MODELS = ["DiT", "PixArt", "SD3", "Flux", "Wan", "CogVideoX", "HunyuanVideo"]
# Every strategy and every model; the rest of the product is the matrix.
CELLS = [
    ("HunyuanVideo", {"ulysses": 2}),
    ("SD3", {"ulysses": 2, "text": "replicate"}),
    ("CogVideoX", {"ring": 2}),
    ("SD3", {"ring": 2, "text": "replicate"}),
    ("Wan", {"tensor": 2}),
    ("PixArt", {"ulysses": 3, "speeds": (3, 2, 1)}),
    ("Flux", {"ring": 3, "speeds": (3, 2, 1), "shared_memory": False}),
    ("DiT", {"ulysses": 2, "ring": 2}),
    ("Flux", {"tensor": 2, "ulysses": 2}),
    ("PixArt", {"data": 2, "ulysses": 2, "inputs": "per-data-rank"}),
    ("MiniMaxH3", {"tensor": 2, "ulysses": 2}),
]
EXACT = {"float64": 1e-9, "float32": 1e-4}


def check(ranks, model, config, dtype, size="B=2 ragged"):
    for found in ranks(ParallelConfig(**config).world_size).run(training_step, model, config, dtype, size):
        for step, (error, name) in found.items():
            assert error <= EXACT[dtype], (step, error, name)


@pytest.mark.parametrize(
    ("model", "config"),
    # Each axis alone, and two of them together; the others are beside them in the matrix.
    [pytest.param(*cell, marks=() if number % 2 else pytest.mark.matrix) for number, cell in enumerate(CELLS)],
    ids=[f"{model} {name_of(config)}" for model, config in CELLS],
)
def test_equal_one_device(ranks, model, config):
    """Of parameters and inputs; with checkpointing, after a forward without gradients, with two calls under way."""
    check(ranks, model, config, "float64")


@pytest.mark.parametrize(
    "config",
    [{"ring": 2}, {"tensor": 2}, pytest.param({"tensor": 2, "ulysses": 2}, marks=pytest.mark.matrix)],
    ids=name_of,
)
def test_adapters(ranks, config):
    """LoRA: the base model is frozen, adapters are trained."""
    for found in ranks(ParallelConfig(**config).world_size).run(
        training_step, "SD3", config, "float64", "B=2 ragged", True
    ):
        for step, (error, name) in found.items():
            assert error <= EXACT["float64"], (step, error, name)


def test_bytes_of_a_training_step(ranks):
    """Forward and backward send what shapes say, and without the exchange of attention the output alone."""
    # Of a rank: float32, two samples, 32 of 64 tokens, 64 channels; and of each of three blocks.
    piece, pool = 4 * 2 * 32 * 64, ranks(2)
    # Half of the heads of q, k, v and the output; keys and values, in backward again, and their gradients twice.
    for axis, forward, backward in (("ulysses", 4 * piece // 2, 4 * piece // 2), ("ring", 2 * piece, 6 * piece)):
        expected = [{axis: 3 * sent, "sequence": piece} for sent in (forward, backward)]
        assert pool.run(bytes_of_a_step, "DiT", {axis: 2}) == [expected] * 2
        assert pool.run(without_exchange, bytes_of_a_step, "DiT", {axis: 2}) == [[{"sequence": piece}] * 2] * 2


WAYS = ["DDP", "FSDP2", "reduce_gradients"]
STEPS = [{"ulysses": 2}, {"ring": 2}, {"ulysses": 2, "ring": 2}, {"data": 2, "ulysses": 2, "inputs": "per-data-rank"}]
STEPS += [{"tensor": 2, "data": 2, "inputs": "per-data-rank"}, {"tensor": 2, "ring": 2}]
ALWAYS = [("FSDP2", 0, True), ("DDP", 4, False)]


@pytest.mark.parametrize(
    ("how", "config", "checkpointing"),
    [
        pytest.param(how, config, again, marks=[] if (how, number, again) in ALWAYS else pytest.mark.matrix)
        for how in WAYS
        for number, config in enumerate(STEPS)
        for again in (False, True)
    ],
)
def test_optimizer_steps(ranks, how, config, checkpointing):
    """Three steps of AdamW are one device's, with torch's data parallelism and sharding over the gradient group."""
    # FSDP2 hands views of what a block has returned to the next one: Flux' second list is fed by its first.
    model = "Flux" if how == "FSDP2" else "SD3"
    for error, name in ranks(ParallelConfig(**config).world_size).run(trained, model, config, how, checkpointing):
        assert error <= 1e-4, name


def test_refusals(ranks):
    """What has no gradient says so on all ranks, before anything is computed."""
    for found in ranks(2).run(refusals):
        assert found.pop("nothing to train") == ""
        assert "attention='frozen' passes no gradient on" in found.pop("kernel")
        assert "attention='frozen' passes no gradient on" in found.pop("kernel by tiles")
        assert "inputs='per-data-rank'" in found.pop("rows")
        assert "transformer_blocks.1.dropping.p = 0" in found.pop("dropout")
        assert "argument hidden_states (rank 1 differs from rank 0)" in found.pop("inputs")
        assert "argument requires_grad (rank 1 differs from rank 0)" in found.pop("leaves")
        assert "(disable_cache()) first" in found.pop("cache")
        assert len(found) == len(STALE)
        for what, message in found.items():
            assert "cannot be trained: " in message, what


def test_mixed_precision(ranks):
    """Under autocast queries, keys and values reach attention in different dtypes, and leave it in one."""
    for error, of_one_device in ranks(2).run(mixed_precision, {"ring": 2}):
        assert error <= 2 * of_one_device


# Blocks of two mix tokens; Chroma with a mask has other bits and gradients under activation checkpointing: open.
UNTRAINED = ("Sana", "Latte", "Chroma")
IN_ORDER = [{}, {"ulysses": 2}, {"ring": 3}, {"ulysses": 2, "ring": 2}, {"ulysses": 2, "speeds": (3, 1)}]


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[] if m == "Wan" else pytest.mark.matrix) for m in MAKERS if m not in UNTRAINED]
)
def test_the_same_bits_on_any_number_of_ranks(ranks, model):
    """Reproducible mode, on 1, 2, 3 and 4 ranks: every gradient's, with and without activation checkpointing."""
    bits = {}
    for config in IN_ORDER if model in MODELS else IN_ORDER[:3]:
        for found in ranks(ParallelConfig(**config).world_size).run(ordered_step, model, config):
            for what, ((worst, name), digest, same) in found.items():
                assert same, (config, what)
                assert worst <= 1e-5, (config, what, worst, name)
                assert bits.setdefault(what.split(",")[0], digest) == digest, (config, what)


def test_the_same_bits_on_any_number_of_data_ranks(ranks):
    bits = set()
    for data in (1, 2, 4):
        for (worst, name), digest in ranks(data).run(ordered_data, "DiT", data):
            assert worst <= EXACT["float32"], (data, worst, name)
            bits.add(digest)
    assert len(bits) == 1
