"""Between the requests of a program on fake CUDA devices: adapters, tiles of the VAE, its generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nccl_rules.fake_cuda import cuda, unavailable
from support.features_on_fake_cuda import told
from support.train import save_pipeline

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("adapters", {"ulysses": 2}, False),
    ("adapters", {"tensor": 2}, True),
    ("tiles", {"ring": 2}, False),
    ("generators", {"cfg": 2}, False),
    ("generators that differ", {"ulysses": 2}, True),
]


@pytest.mark.parametrize(
    ("story", "config"),
    [pytest.param(story, config, marks=() if quick else pytest.mark.matrix) for story, config, quick in CASES],
    ids=str,
)
def test_a_story(ranks, tmp_path, story, config):
    folder = str(save_pipeline("flux", tmp_path)) if story == "tiles" else ""
    for errors, apart, looks in ranks(2).run(told, story, folder, config):
        print(story, errors, apart, looks, flush=True)
        assert max(errors.values()) <= 1e-5, errors
        assert errors.get("states", 0) == 0
