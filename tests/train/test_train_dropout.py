"""Dropout over ranks: what is left out is what one device leaves out."""

from __future__ import annotations

import pytest

import ditmesh
from ditmesh.train.preflight import check_settings
from ditmesh.train.trainer import Trainer
from support.train import configured, folder_of, loaded, made, save_pipeline, settings, trainer_of

model = made(lambda folder: save_pipeline("flux", folder))
data = made(lambda folder: folder_of(folder, 6, 32))


def given(model, data, out, **more):
    """Steps in which AdamW's epsilon is large: a weight moves in proportion to its gradient, and rounding does not
    decide its direction."""
    short = settings(data, out, pretrained_model_name_or_path=str(model), resolution=32)
    short |= {"train_batch_size": 1, "global_batch_size": 4, "max_train_steps": 7, "checkpointing_steps": 9}
    return {**short, "learning_rate": 3e-4, "optimizer_args": {"eps": 1e-2}, **more}


def trained(given):
    """Losses and trained weights."""
    with trainer_of(given) as trainer:
        return list(trainer.run().losses.values()), trainer.state.weights()


@pytest.mark.matrix
@pytest.mark.parametrize("recomputed", [False, True])
def test_dropout_leaves_out_what_one_device_leaves_out(ranks, model, data, tmp_path, recomputed):
    lora = {
        "rank": 2,
        "dropout": 0.5,
        "target_modules": ["to_q", "to_v", "add_q_proj", "proj_mlp", "proj_out", "ff.net.2"],
    }
    on = given(model, data, tmp_path / "1", lora=lora, max_train_steps=3, learning_rate=1e-2)
    on |= {"gradient_checkpointing": recomputed, "train_batch_size": 2}
    losses, weights = trained(on)
    plain, _ = trained({**on, "lora": {**lora, "dropout": 0.0}, "output_dir": str(tmp_path / "2")})
    assert abs(plain[-1] / losses[-1] - 1) > 1e-4
    (found, its), *_ = ranks(2).run(trained, {**on, "parallel": {"data": 2}, "output_dir": str(tmp_path / "3")})
    assert found == pytest.approx(losses, rel=1e-5)
    assert max(float((its[name] - value).abs().max()) for name, value in weights.items()) <= 1e-5


def dropped(given):
    config = configured(given)
    pipe = loaded(config.pretrained_model_name_or_path)
    pipe.transformer.transformer_blocks[0].ff.net[1].p = 0.5
    Trainer(config, pipe, timeout=60.0)


@pytest.mark.parametrize("axis", ["tensor", pytest.param("ring", marks=pytest.mark.matrix)])
def test_dropout_of_a_part_of_a_sample_is_refused(ranks, model, data, tmp_path, axis):
    with pytest.raises(ditmesh.DitmeshError, match=r"ff.net.1 has dropout p=0.5, and ranks of ulysses, ring and"):
        ranks(2).run(dropped, given(model, data, tmp_path, parallel={axis: 2}))
    lora = {"rank": 2, "dropout": 0.5}
    with pytest.raises(ditmesh.ConfigError, match=r"lora.dropout=0.5: ranks of ulysses, ring and tensor"):
        check_settings(configured(given(model, data, tmp_path, parallel={axis: 2}, lora=lora)))
