"""Mixed precision over ranks: one verdict on overflow, one loss scale; and numbers that are not finite."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch

import ditmesh
from ditmesh.train.logs.training_log import read_log
from ditmesh.train.preflight import check_settings
from ditmesh.train.trainer import Trainer
from support.train import configured, folder_of, save_pipeline, settings


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A FLUX whose second half of feed-forward units has large values, so that only one slice of it overflows."""
    folder = tmp_path_factory.mktemp("model")
    pipe = diffusers.DiffusionPipeline.from_pretrained(save_pipeline("flux", folder))
    with torch.no_grad():
        for block in pipe.transformer.transformer_blocks:
            weight = block.ff.net[0].proj.weight
            weight[weight.shape[0] // 2 :] *= 40
            block.ff.net[2].weight[:, weight.shape[0] // 2 :] *= 0.02
    pipe.save_pretrained(folder / "outliers")
    return folder / "outliers"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return folder_of(tmp_path_factory.mktemp("data"), 6, 32)


def given(model, data, out, **more):
    """Steps in which AdamW's epsilon is large: a weight moves in proportion to its gradient, and rounding does not
    decide its direction."""
    short = settings(data, out, pretrained_model_name_or_path=str(model), resolution=32, mixed_precision="fp16")
    short |= {"train_batch_size": 1, "global_batch_size": 4, "max_train_steps": 7, "checkpointing_steps": 9}
    return {**short, "learning_rate": 3e-4, "optimizer_args": {"eps": 1e-2}, **more}


def scaled(given, scale, growth=2):
    """Losses, steps that were skipped, scales after every step, and the trained weights in the end."""
    config = configured(given)
    pipe = diffusers.DiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path)
    pipe.set_progress_bar_config(disable=True)
    scales = []
    with Trainer(config, pipe, timeout=60.0) as trainer:
        trainer.update.scaler._init_scale = scale
        trainer.update.scaler.set_growth_interval(growth)
        outcome = trainer.run(report=lambda now: scales.append((trainer.update.scaler.get_scale(), now.overflowed)))
        weights = trainer.state.weights()
    return list(outcome.losses.values()), outcome.overflowed, scales, weights


SETTINGS = {
    "clipped": {},
    "unclipped": {"max_grad_norm": 0.0},
    "lora": {"lora": {"rank": 2, "target_modules": ["to_q", "ff.net.2"]}},
}


@pytest.fixture(scope="module")
def alone(model, data, tmp_path_factory):
    found = {}

    def of(name):
        if name not in found:
            out = tmp_path_factory.mktemp(name)
            found[name] = scaled(given(model, data, out, **SETTINGS[name]), SCALE)
            rows = read_log(out / "loss.csv")
            assert [int(row["step"]) for row in rows if row["overflowed"]] == found[name][1]
            assert [row["loss_scale"] for row in rows] == [scale for scale, _ in found[name][2]]
        return found[name]

    return of


SCALE = 2.0**18
MESHES = [
    ({"tensor": 2, "ulysses": 2}, "ddp"),
    ({"data": 2}, "none"),
    ({"data": 2}, "fsdp"),
]
MORE = [
    ({"tensor": 2}, "none"),
    ({"tensor": 2, "data": 2}, "fsdp"),
    ({"data": 2}, "ddp"),
    ({"ulysses": 2}, "fsdp"),
    ({"ring": 2}, "ddp"),
    ({"tensor": 2, "ring": 2}, "none"),
    ({"ulysses": 2, "data": 2}, "none"),
    ({"ring": 2, "data": 2}, "fsdp"),
    ({"ulysses": 2, "ring": 2}, "none"),
]


@pytest.mark.parametrize(
    ("name", "parallel", "sharding"),
    [
        *(
            pytest.param("clipped", *mesh, marks=() if number % 3 == 0 else pytest.mark.matrix)
            for number, mesh in enumerate(MESHES)
        ),
        *(pytest.param("clipped", parallel, sharding, marks=pytest.mark.matrix) for parallel, sharding in MORE),
        pytest.param("unclipped", {"tensor": 2}, "none", marks=pytest.mark.matrix),
        pytest.param("unclipped", {"data": 2}, "fsdp", marks=pytest.mark.matrix),
        pytest.param("lora", {"ulysses": 2}, "none", marks=pytest.mark.matrix),
        ("lora", {"data": 2}, "fsdp"),
    ],
    ids=str,
)
def test_ranks_skip_the_steps_that_one_device_skips(ranks, model, data, alone, tmp_path, name, parallel, sharding):
    losses, skipped, scales, weights = alone(name)
    assert 0 < len(skipped) < len(losses)
    on = given(model, data, tmp_path, parallel=parallel, sharding=sharding, **SETTINGS[name])
    world = torch.Size(parallel.values()).numel()
    found = ranks(world).run(scaled, on, SCALE)
    for its_losses, its_skipped, its_scales, _ in found:
        assert its_skipped == skipped
        assert its_scales == scales
        assert its_losses == pytest.approx(losses, rel=5e-3)
    trained = found[0][3]
    assert trained.keys() == weights.keys()
    assert max(float((trained[key] - value).abs().max()) for key, value in weights.items()) <= 1e-5


# --- dropout -----------------------------------------------------------------------------------------------------


def trained(given):
    """Losses and trained weights."""
    config = configured(given)
    pipe = diffusers.DiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path)
    with Trainer(config, pipe, timeout=60.0) as trainer:
        return list(trainer.run().losses.values()), trainer.state.weights()


@pytest.mark.parametrize("recomputed", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_dropout_leaves_out_what_one_device_leaves_out(ranks, model, data, tmp_path, recomputed):
    lora = {
        "rank": 2,
        "dropout": 0.5,
        "target_modules": ["to_q", "to_v", "add_q_proj", "proj_mlp", "proj_out", "ff.net.2"],
    }
    on = given(model, data, tmp_path / "1", mixed_precision="no", lora=lora, max_train_steps=3, learning_rate=1e-2)
    on |= {"gradient_checkpointing": recomputed, "train_batch_size": 2}
    losses, weights = trained(on)
    plain, _ = trained({**on, "lora": {**lora, "dropout": 0.0}, "output_dir": str(tmp_path / "2")})
    assert abs(plain[-1] / losses[-1] - 1) > 1e-4
    (found, its), *_ = ranks(2).run(trained, {**on, "parallel": {"data": 2}, "output_dir": str(tmp_path / "3")})
    assert found == pytest.approx(losses, rel=1e-5)
    assert max(float((its[name] - value).abs().max()) for name, value in weights.items()) <= 1e-5


def dropped(given):
    config = configured(given)
    pipe = diffusers.DiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path)
    pipe.transformer.transformer_blocks[0].ff.net[1].p = 0.5
    Trainer(config, pipe, timeout=60.0)


@pytest.mark.parametrize("axis", ["tensor", pytest.param("ring", marks=pytest.mark.matrix)])
def test_dropout_of_a_part_of_a_sample_is_refused(ranks, model, data, tmp_path, axis):
    with pytest.raises(ditmesh.DitmeshError, match=r"ff.net.1 has dropout p=0.5, and ranks of ulysses, ring and"):
        ranks(2).run(dropped, given(model, data, tmp_path, parallel={axis: 2}))
    lora = {"rank": 2, "dropout": 0.5}
    with pytest.raises(ditmesh.ConfigError, match=r"lora.dropout=0.5: ranks of ulysses, ring and tensor"):
        check_settings(configured(given(model, data, tmp_path, parallel={axis: 2}, lora=lora)))
