"""Weights in pieces: the same bits, less memory, exactly undone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ditmesh.config import ParallelConfig
from ditmesh.errors import ConfigError
from ditmesh.resizing import resized
from support.loading import absent, loaded
from support.pipelines import MAKERS as MAKERS_OF_PIPELINES
from support.sharded import broken_off, compared, encoded, fingerprints, not_of_its_files, refused, uneven

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
FOUR: list[tuple[dict[str, Any], int]] = [
    ({"ulysses": 2, "ring": 2}, 4),
    ({"ulysses": 2, "ring": 2, "shared_memory": False}, 2),
    ({"data": 2, "ulysses": 2}, 4),
    ({"data": 2, "ulysses": 2, "inputs": "per-data-rank"}, 2),
    ({"tensor": 2, "ulysses": 2}, 2),
    ({"pipe": 2, "ulysses": 2, "patches": 3, **WARM}, 2),
    ({"pipe": 2, "cfg": 2, "patches": 3, **WARM}, 2),
    ({"cfg": 2, "ring": 2, "exchange": "displaced", **WARM}, 4),
]


@pytest.mark.parametrize(
    ("model", "config", "shard"),
    [
        pytest.param(model, *case, marks=() if i % 2 == j and "compile" not in case[0] else pytest.mark.matrix)
        for i, case in enumerate(CONFIGS)
        for j, model in enumerate(["Flux", "SD3"])
    ],
    ids=str,
)
def test_same_bits(ranks, model, config, shard):
    for result in ranks(ParallelConfig(**config).world_size).run(compared, model, config, shard):
        assert result["equal"], result
        assert result["restored"], result
        assert result["held"] < 0.55 * result["whole"], result


@pytest.mark.parametrize(
    ("config", "shard"),
    [pytest.param(*case, marks=() if i == 1 else pytest.mark.matrix) for i, case in enumerate(FOUR)],
    ids=str,
)
def test_same_bits_on_four(ranks, config, shard):
    for result in ranks(4).run(compared, "Flux", config, shard):
        assert "refused" not in result
        assert result["equal"], result
        assert result["restored"], result
        assert result["held"] < (1 / shard + 0.05) * result["whole"], result


@pytest.mark.parametrize(
    ("config", "prompts"),
    [
        pytest.param({"data": 2, "reproducible": True}, [1, 2, 3], marks=pytest.mark.matrix),
        pytest.param({"cfg": 2}, [1], marks=pytest.mark.matrix),
        pytest.param({"data": 2}, [1, 2, 3]),
    ],
    ids=str,
)
def test_calls_that_are_not_equally_many(ranks, config, prompts):
    """Rows that run one by one: a rank that has fewer takes part in the others' gathers."""
    assert all(ranks(2).run(uneven, config, prompts, 2))


@pytest.mark.parametrize("interrupted", [False, pytest.param(True, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.matrix)], ids=["memory", "gloo"])
def test_a_request_that_was_broken_off(ranks, shared, interrupted):
    config = {"ulysses": 2, "shard": 2, "shared_memory": shared}
    first, second = ranks(2).run(broken_off, config, interrupted)
    assert "on purpose" in second["error"]
    assert first["error"].startswith("PeerError")
    # Who has closed a connection gloo does not say.
    assert ("rank 1" if shared else "has failed this request") in first["error"]
    for result in (first, second):
        assert result["let go"]
        assert result["next"]
        assert result["restored"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("offload", "is offloaded to the CPU.*take the offloading off, or leave shard out$"),
        ("layout", "is not reviewed; use tensor to cut its weights, or leave shard out$"),
        ("mesh", "the mesh is for ulysses=2, the configuration for ulysses=2 shard=2"),
        ("cast", "were torch.float32 on cpu .* are torch.bfloat16 on cpu now; call ditmesh.restore"),
        ("changed", "weights of transformer_blocks.0 were changed while .*; call ditmesh.restore"),
        ("assigned", "weights of transformer_blocks.0 were changed while .*; call ditmesh.restore"),
        ("gradient", "cannot be trained: weights are on a rank while their block runs forward"),
    ],
)
def test_refusals(ranks, case, said):
    for found in ranks(2).run(refused, case):
        assert re.search(said, found), found


def test_configurations():
    with pytest.raises(ConfigError, match=r"shard=2 does not divide the 1 rank of .*; use ulysses, ring, cfg or data"):
        ParallelConfig(tensor=2, shard=2)
    with pytest.raises(ConfigError, match=r"shard=3 does not divide the 4 ranks of .*; use shard=2 or 4"):
        ParallelConfig(ulysses=4, shard=3)
    with pytest.raises(ConfigError, match="share requests"):
        ParallelConfig(data=2, ulysses=2, shard=4, inputs="per-data-rank")
    config = ParallelConfig(ulysses=4, shard=2)
    assert [resized(config, devices).shard for devices in (3, 2, 1)] == [3, 2, 1]


CONFIGS_TO_LOAD = [
    {"ulysses": 2, "shard": 2},
    {"tensor": 2, "ulysses": 2, "shard": 2},
    {"pipe": 2, "ulysses": 2, "shard": 2, "warmup": "fixed(9)"},
]


@pytest.mark.parametrize(
    "config", [CONFIGS_TO_LOAD[0], *(pytest.param(c, marks=pytest.mark.matrix) for c in CONFIGS_TO_LOAD[1:])], ids=str
)
@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.matrix)], ids=str)
def test_loading_in_pieces(ranks, tmp_path, config, dtype):
    """Equal to loading whole: pictures, bits after restore, fingerprints, dtypes."""
    MAKERS_OF_PIPELINES["sd3"]().save_pretrained(tmp_path)
    options = {} if dtype is None else {"torch_dtype": dtype}
    world = ParallelConfig(**config).world_size
    for result in ranks(world).run(loaded, "sd3", tmp_path, config, {}) if dtype is None else ():
        assert result["equal"]
        assert result["bits"]
        assert result["dtypes"]
        assert result["buffers"]
    for prints in ranks(world).run(fingerprints, str(tmp_path), config, {**absent("sd3"), **options}):
        assert len(set(prints)) == 1


@pytest.mark.parametrize(
    ("how", "most"), [("sharded", (0.6, 0.6)), ("tensor", (0.55, 0.55)), ("freed", (0.01, 0.01))], ids=str
)
@pytest.mark.parametrize("shard", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_text_encoders(ranks, how, most, shard):
    """The same pictures; after a request a rank holds what it should; the weights are back in the end."""
    for result, share in zip(ranks(2).run(encoded, how, {"ulysses": 2, "shard": shard}), most, strict=True):
        assert result["images"]
        assert result["held"] <= share
        assert result["restored"]


@pytest.mark.parametrize("later", [False, True])
def test_what_could_not_be_read_again_is_not_freed(ranks, later):
    for said in ranks(2).run(not_of_its_files, later):
        words = "have been changed and are not those of its files" if later else "are not those in"
        assert re.search(f"the weights of text_encoder_2 .* {words} .*; use text_encoder='tensor'", said), said
