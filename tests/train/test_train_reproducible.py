"""Reproducible training: the same weights, to the bit, on any number of ranks."""

from __future__ import annotations

import pytest

import ditmesh
from ditmesh.config import ParallelConfig
from support.train import configured, folder_of, made, settings, weights_after

WAYS = [
    {},
    {"parallel": {"data": 2}},
    {"parallel": {"ulysses": 2}, "gradient_checkpointing": True},
    {"parallel": {"ring": 3, "reproducible": True}},
    {"parallel": {"data": 2, "ulysses": 2}},
]


data = made(lambda folder: folder_of(folder, 8))


def found(ranks, way, given):
    results = ranks(ParallelConfig.read(way.get("parallel", {})).world_size).run(weights_after, {**given, **way})
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.matrix
def test_the_same_weights_on_any_number_of_ranks(ranks, data, tmp_path):
    """1, 2, 3 and 4 ranks: text encoders trained along, pictures mirrored, captions left out, an uneven last batch."""
    given = settings(data, tmp_path, global_batch_size=4, max_train_steps=2, ema_decay=0.9999, reproducible=True)
    given |= {"train_modules": ["transformer", "text_encoder", "text_encoder_2"]}
    given |= {"random_flip": True, "proportion_empty_prompts": 0.2}
    alone = found(ranks, WAYS[0], given)
    for number, way in enumerate(WAYS[1:]):
        assert found(ranks, way, {**given, "output_dir": str(tmp_path / str(number))}) == alone, way
    # Another seed is another run.
    assert found(ranks, WAYS[1], {**given, "seed": 1, "output_dir": str(tmp_path / "other")}) != alone


@pytest.mark.matrix
def test_adapters_on_another_mesh_after_a_stop(ranks, data, tmp_path):
    """LoRA; two ranks go on with what one has saved, and come to the weights of one that was not stopped."""
    given = settings(data, tmp_path / "a", global_batch_size=4, lora={"rank": 2}, reproducible=True, max_train_steps=2)
    whole = weights_after(given)
    parted = {**given, "output_dir": str(tmp_path / "b")}
    found(ranks, {"parallel": {"data": 2}}, {**parted, "until": 1})
    on = {**parted, "resume_from_checkpoint": "latest"}
    losses, digest = found(ranks, {"parallel": {"ulysses": 2}}, on)
    assert digest == whole[1]
    assert losses == whole[0][1:]


def test_what_cannot_be_in_order_is_refused(data, tmp_path):
    given = settings(data, tmp_path, reproducible=True)
    for more, message in (({"sharding": "fsdp"}, "needs 'none'"), ({"parallel": {"tensor": 2}}, "reproducible")):
        with pytest.raises(ditmesh.ConfigError, match=message):
            configured({**given, **more})
