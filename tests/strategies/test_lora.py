"""LoRA adapters under parallelism: loaded before or after, switched, scaled, fused, swapped, unloaded."""

from __future__ import annotations

import pytest
from test_parity import TOLERANCE, name_of

from ditmesh.config import ParallelConfig
from support.lora import fused, refused, story, through_the_pipeline, with_bias
from support.sample import sampled

CONFIGS = [{"ulysses": 2}, {"ring": 2}, {"tensor": 2}, {"tensor": 3}, {"tensor": 2, "ulysses": 2}]


@pytest.mark.parametrize(
    ("model", "config", "before"), sampled(["SD3", "Flux", "Wan"], CONFIGS, [True, False], of=7), ids=str
)
def test_equals_one_device(ranks, model, config, before):
    for result in ranks(ParallelConfig(**config).world_size).run(story, model, config, before):
        assert max(result["errors"].values()) <= TOLERANCE, result["errors"]
        # The adapters matter: without them, or with another, the picture is a different one.
        assert result["spread"] > 1000 * TOLERANCE
        assert result["kept"]
        assert result["untouched"]
        assert result["output"]


@pytest.mark.parametrize(
    ("model", "config"),
    sampled(["SD3", "Flux"], [{"ulysses": 2}, {"tensor": 2}], of=2),
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_fused_and_swapped(ranks, model, config):
    for errors in ranks(2).run(fused, model, config):
        assert max(errors.values()) <= TOLERANCE, errors


def test_adapters_with_a_bias(ranks):
    for result in ranks(2).run(with_bias, "Flux", {"tensor": 2}):
        assert result["error"] <= TOLERANCE
        assert result["restored"]


def test_other_adapters_are_refused_by_name(ranks):
    for message in ranks(2).run(refused, {"use_dora": True}):
        assert "tensor parallelism knows plain LoRA only" in message


# Stages are exact while all steps are synchronous.
STAGES = {"pipe": 2, "warmup": "fixed(100)"}
SHARDS = {"ulysses": 2, "shard": 2}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("SD3", {"cfg": 2}),
        # Flux's pipeline compares an adapter with the shapes of the weights.
        ("Flux", {"tensor": 2}),
        *(
            pytest.param(model, config, marks=pytest.mark.matrix)
            for model, configs in (
                ("Flux", (STAGES, SHARDS, {"tensor": 2, **STAGES})),
                ("SD3", ({"tensor": 2}, STAGES, SHARDS, {"tensor": 2, "cfg": 2})),
            )
            for config in configs
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_through_the_pipeline(ranks, model, config):
    for errors in ranks(ParallelConfig(**config).world_size).run(through_the_pipeline, config, model):
        assert errors.pop("matters") > 1000 * TOLERANCE
        assert max(errors.values()) <= TOLERANCE, errors
