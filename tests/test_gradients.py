"""Gradients through parallel transformers: equal to one device's, in every exact strategy."""

from __future__ import annotations

import pytest

from ditmesh.config import ParallelConfig
from support.gradients import training_step
from test_parity import name_of

MODELS = ["DiT", "PixArt", "SD3", "Flux", "Wan", "CogVideoX", "HunyuanVideo"]
# Every strategy and every model; the rest of the product is the matrix.
CELLS = [
    ("DiT", {"ulysses": 2}),
    ("SD3", {"ulysses": 2, "text": "replicate"}),
    ("CogVideoX", {"ring": 2}),
    ("SD3", {"ring": 2, "text": "replicate"}),
    ("Wan", {"tensor": 2}),
    ("PixArt", {"ulysses": 3, "speeds": (3, 2, 1)}),
    ("Flux", {"ring": 3, "speeds": (3, 2, 1), "shared_memory": False}),
    ("HunyuanVideo", {"ulysses": 2, "ring": 2}),
    ("Flux", {"tensor": 2, "ulysses": 2}),
    ("PixArt", {"data": 2, "ulysses": 2, "inputs": "per-data-rank"}),
]
CONFIGS = [
    {"ulysses": 2},
    {"ulysses": 2, "shared_memory": False},
    {"ulysses": 2, "text": "replicate"},
    {"ring": 2},
    {"ring": 2, "text": "replicate"},
    {"tensor": 2},
    {"data": 2},
    {"ulysses": 3, "speeds": (3, 2, 1)},
    {"ring": 3, "speeds": (3, 2, 1)},
    {"tensor": 3},
    {"ulysses": 2, "ring": 2},
    {"data": 2, "ulysses": 2, "inputs": "per-data-rank"},
    {"data": 2, "ring": 2, "inputs": "per-data-rank"},
    {"tensor": 2, "ulysses": 2},
    {"tensor": 2, "ring": 2},
]
EXACT = {"float64": 1e-9, "float32": 1e-4}


def check(ranks, model, config, dtype, size="B=2 ragged"):
    for found in ranks(ParallelConfig(**config).world_size).run(training_step, model, config, dtype, size):
        for step, (error, name) in found.items():
            assert error <= EXACT[dtype], (step, error, name)


@pytest.mark.parametrize(("model", "config"), CELLS, ids=[f"{model} {name_of(config)}" for model, config in CELLS])
def test_equal_one_device(ranks, model, config):
    """Of parameters and inputs; with checkpointing, after a forward without gradients, with two calls under way."""
    check(ranks, model, config, "float64")


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("model", [*MODELS, "LTX", "Lumina2", "Sana", "QwenImage", "ZImage", "Mochi"])
def test_every_strategy(ranks, model, config, dtype):
    check(ranks, model, config, dtype)
