"""Gradients through parallel transformers: equal to one device's, in every exact strategy."""

from __future__ import annotations

import pytest

from ditmesh.config import ParallelConfig
from support.gradients import training_step
from test_parity import name_of

EXACT = 1e-9


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ring": 2}, {"tensor": 2}], ids=name_of)
@pytest.mark.parametrize("model", ["DiT", "PixArt", "SD3", "Flux", "Wan", "CogVideoX"])
def test_equal_one_device(ranks, model, config):
    for error, name in ranks(ParallelConfig(**config).world_size).run(training_step, model, config):
        assert error <= EXACT, (error, name)
