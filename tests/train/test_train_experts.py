"""Two transformers by noise level (Wan 2.2): each is trained on its own levels, and the other one stays as it is."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

from ditmesh import zoo
from ditmesh.errors import ConfigError, InputError
from ditmesh.generate.loras import load_lora
from ditmesh.train.model.frozen import FrozenLinear
from ditmesh.train.observed.check import checked_recipe
from ditmesh.train.run import train
from ditmesh.train.trainer import Trainer
from support.train import configured, emoji, loaded, losses_of, settings

# The first timestep of DDPM's thousand that is the first transformer's.
BOUNDARY = 875


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The embedded video model, with another transformer for low noise."""
    folder = tmp_path_factory.mktemp("wan-2.2")
    pipe: Any = DiffusionPipeline.from_pretrained(zoo.path("emoji-wan"))
    second = copy.deepcopy(pipe.transformer)
    with torch.no_grad():
        for number, weight in enumerate(second.parameters()):
            weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    parts = {**pipe.components, "transformer_2": second}
    diffusers.WanPipeline(**parts, boundary_ratio=BOUNDARY / 1000).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def films(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    for number, (caption, picture) in enumerate(emoji(4)):
        frames = [Image.fromarray(picture).rotate(10 * turn).resize((32, 32)) for turn in range(5)]
        frames[0].save(folder / f"{number}.gif", save_all=True, append_images=frames[1:], duration=100)
        (folder / f"{number}.txt").write_text(caption)
    return folder


def run_of(model: Path, films: Path, out: Path, **more: Any) -> dict[str, Any]:
    given = {"pretrained_model_name_or_path": str(model), "resolution": 32, "num_frames": 5, "max_sequence_length": 8}
    given |= {"global_batch_size": 2, "train_batch_size": 1, "max_train_steps": 3, "learning_rate": 1e-3}
    return settings(films, out, **{**given, "train_modules": ["transformer_2"], **more})


def spelt_out(trainer: Trainer, model: Path, name: str, levels: range) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run, from its samples alone.

    Args:
        trainer: knows the samples.
        model: the pipeline's folder.
        name: of the transformer.
        levels: its timesteps, in the order of the scheduler's table.
    """
    expert = diffusers.WanTransformer3DModel.from_pretrained(model, subfolder=name).train()
    optimizer, losses = torch.optim.AdamW(expert.parameters(), lr=1e-3, weight_decay=0.01), []
    for step in range(3):
        found = []
        for micro in trainer.data.order.step(step):
            batch = trainer.data.batch(micro)
            (generator,) = batch.generators
            noise = torch.randn(batch.latents.shape, generator=generator)
            share = torch.normal(0.0, 1.0, size=(1,), generator=generator).sigmoid()
            moment = levels[int(share * len(levels))]
            noisy = (1 - moment / 1000) * batch.latents + moment / 1000 * noise
            text = batch.conditions["encoder_hidden_states"].flatten(0, 1)
            called = {"timestep": torch.tensor([float(moment)]), "encoder_hidden_states": text, "return_dict": False}
            output = expert(noisy, **called)[0]
            loss = (output - (noise - batch.latents)).square().mean()
            (loss / 2).backward()
            found.append(loss.item())
        torch.nn.utils.clip_grad_norm_(expert.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(found) / 2)
    return losses, expert.state_dict()


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        pytest.param("transformer", range(1000, BOUNDARY - 1, -1), marks=pytest.mark.matrix),
        ("transformer_2", range(BOUNDARY - 1, 0, -1)),
    ],
)
def test_an_expert_is_trained_on_its_noise_levels(ranks, model, films, tmp_path, name, levels):
    """The losses and weights of the algorithm spelt out; the other transformer stays; two ranks have its losses."""
    given = run_of(model, films, tmp_path / "out", train_modules=[name])
    result = train(configured(given))
    with Trainer(configured({**given, "output_dir": str(tmp_path / "hand")}), loaded(model)) as trainer:
        assert trainer.family.moments_of_training == pytest.approx((min(levels), max(levels)), abs=1)
        losses, weights = spelt_out(trainer, model, name, levels)
    rows = (tmp_path / "out" / "loss.csv").read_text().splitlines()
    place = rows[0].split(",").index("loss")
    assert [float(row.split(",")[place]) for row in rows[1:]] == pytest.approx(losses, rel=1e-5)
    files = {one: load_file(next((Path(result["pipeline"]) / one).glob("*.safetensors"))) for one in BOTH}
    before = {one: load_file(next((model / one).glob("*.safetensors"))) for one in BOTH}
    other = BOTH[name == BOTH[0]]
    assert all(torch.equal(files[other][path], value) for path, value in before[other].items())
    # Adam divides by what rounding is a part of, where gradients are next to nothing: all weights together.
    moved, off = (
        sum(float((files[name][path] - value).square().sum()) for path, value in one.items()) ** 0.5
        for one in (before[name], weights)
    )
    assert moved > 0.1
    assert off < 1e-3 * moved
    parallel = {**given, "output_dir": str(tmp_path / "two"), "parallel": {"data": 2}}
    found = list(ranks(2).run(losses_of, parallel)[0].values())
    assert found == pytest.approx(losses, rel=1e-5)


BOTH = ("transformer", "transformer_2")


@pytest.mark.matrix
def test_an_adapter_of_the_second_transformer(model, films, tmp_path):
    """Over a quantised base; diffusers loads it with its own argument, and ditmesh by what the file says."""
    given = run_of(model, films, tmp_path / "out", lora={"rank": 2}, base_precision="nf4", learning_rate=0.1)
    file = Path(train(configured(given))["pipeline"]) / "pytorch_lora_weights.safetensors"
    inputs = {
        "hidden_states": torch.randn(1, 24, 2, 4, 4, generator=torch.Generator().manual_seed(0)),
        "timestep": torch.tensor([300.0]),
        "encoder_hidden_states": torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(1)),
        "return_dict": False,
    }
    theirs, ours, plain = loaded(model), loaded(model), loaded(model)
    theirs.load_lora_weights(str(file.parent), load_into_transformer_2=True)
    load_lora(ours, file, "leaf")
    with torch.no_grad():
        for name, differs in zip(BOTH, (False, True), strict=True):
            found = [getattr(pipe, name)(**inputs)[0] for pipe in (theirs, ours, plain)]
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[0], found[2]) is not differs
    with pytest.raises(InputError, match="for the transformer_2 of a pipeline with two, and WanPipeline has none"):
        load_lora(DiffusionPipeline.from_pretrained(zoo.path("emoji-wan")), file, "leaf")
    # The other one lies beside it in as few bits.
    from ditmesh.generate.model_info import find_model
    from ditmesh.train.model.frozen import read_pipeline_frozen

    frozen = read_pipeline_frozen(find_model(model), "nf4")
    assert all(any(isinstance(one, FrozenLinear) for one in getattr(frozen, name).modules()) for name in BOTH)


def test_what_is_refused_and_said(model, films, tmp_path):
    given = partial(run_of, model, films, tmp_path)
    with pytest.raises(ConfigError, match="a run trains one of two transformers, each on noise levels of its own"):
        configured(given(train_modules=["transformer", "transformer_2"]))
    alone = given(pretrained_model_name_or_path="emoji-wan")
    with pytest.raises(ConfigError, match="train_modules: WanPipeline has no transformer_2 here"):
        checked_recipe(configured(alone))
    found = checked_recipe(configured(given()))
    assert (found["component"], found["timesteps"][0]) == ("transformer_2", 0.0)
    assert found["timesteps"][1] == pytest.approx(BOUNDARY)
    assert json.loads((model / "model_index.json").read_text())["boundary_ratio"] == BOUNDARY / 1000
