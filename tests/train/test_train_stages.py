"""Training on stages (``parallel: {pipe: N}``): gradients, memory, checkpoints and messages of one device."""

from __future__ import annotations

import csv
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ditmesh
from ditmesh.cli.main import main
from ditmesh.generate.model_info import find_model
from ditmesh.train import TrainConfig
from ditmesh.train.gradients.stages import warn_of_bubble
from ditmesh.train.preflight import check_run, check_settings
from support.stages import FAULTS, curve, faulty_step, refused, staged_step
from support.train import folder_of, settings

CASES = [
    # The layers of a list on both sides of the cut, two lists, and glue that all stages have a part of.
    ("SD3", {"pipe": 2}, {"checkpointing": True}),
    ("Flux", {"pipe": 2}, {"count": 5}),
    ("PixArt", {"pipe": 2}, {}),
    # Its end uses a module of its first block.
    ("DiT", {"pipe": 2}, {}),
    ("Wan", {"pipe": 2}, {"checkpointing": True}),
    ("Flux", {"pipe": 2}, {"adapted": True, "checkpointing": True}),
    ("Flux", {"pipe": 4}, {"count": 6}),
    ("SD3", {"pipe": 2, "ulysses": 2}, {"checkpointing": True}),
    ("Wan", {"pipe": 2, "data": 2}, {}),
    ("Flux", {"pipe": 2, "tensor": 2}, {}),
    *(
        pytest.param(name, parallel, more, marks=pytest.mark.matrix)
        for name, parallel, more in [
            ("Flux", {"pipe": 2, "ulysses": 2}, {}),
            ("Flux", {"pipe": 2, "ring": 2}, {"checkpointing": True}),
            ("PixArt", {"pipe": 2}, {"checkpointing": True}),
            ("PixArt", {"pipe": 2, "data": 2}, {}),
            ("PixArt", {"pipe": 2, "tensor": 2}, {}),
            ("SD3", {"pipe": 2, "tensor": 2}, {"checkpointing": True}),
            ("DiT", {"pipe": 2, "ulysses": 2}, {}),
            ("Wan", {"pipe": 2, "ulysses": 2}, {}),
            ("Wan", {"pipe": 4}, {"blocks": {"num_layers": 4}, "count": 5, "checkpointing": True}),
            ("Sana", {"pipe": 2, "ulysses": 2}, {}),
            ("SD3", {"pipe": 2, "ulysses": 2}, {"adapted": True}),
        ]
    ),
]


@pytest.mark.parametrize(("name", "parallel", "more"), CASES, ids=str)
def test_gradients_are_those_of_one_device(ranks, name, parallel, more):
    pool = ranks(ditmesh.ParallelConfig(**parallel).world_size)
    found = pool.run(staged_step, name, parallel, **more)
    for result in found:
        assert result["gradients"][0] <= 1e-9, result["gradients"]
        assert result["prediction"] <= 1e-9
        assert result["norm"] <= 1e-9
        assert result["restored"]
        assert result["trains again"]
        # Counted on the graphs that there are: of a step's micro-batches as many as stages follow, and this one.
        assert result["under way"] == min(more.get("count", 3), result["stages from here"])
        # Frozen weights keep nothing.
        assert result["graphs"] == result["under way"] or "adapted" in more
    # Together they have every gradient.
    every = {name for result in found for name in result["names"]}
    assert every == set(found[0]["trained"])


def test_messages_keep_the_dtype_that_autocast_gives(ranks):
    for result in ranks(2).run(staged_step, "SD3", {"pipe": 2}, autocast=True):
        # What blocks of both stages add to one gradient is rounded to bfloat16 in another order.
        assert result["gradients"][0] <= 2**-7
        assert result["prediction"] == 0.0
        assert result["norm"] <= 1e-3


def test_a_stage_holds_its_share(ranks):
    """Weights, gradients and AdamW's state, where blocks dominate."""
    for result in ranks(2).run(staged_step, "Wan", {"pipe": 2}, blocks={"num_layers": 16}, count=2):
        assert result["held"] <= 0.55
        assert result["kept"] <= 0.55


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(ranks, fault):
    """The comparison fails where it should."""
    assert max(result["gradients"][0] for result in ranks(2).run(faulty_step, fault)) > 1e-3


def test_what_stages_cannot_do_is_refused(ranks):
    pool = ranks(2)
    for name, words in (("HunyuanDiT", "long skips"), ("Latte", "run by turns")):
        (said, other) = pool.run(refused, name, {"pipe": 2})
        assert said == other
        assert words in said
    said, other = pool.run(refused, "SD3", {"pipe": 2, "stages": [1, 5]})
    assert said == other
    assert "add up to them" in said
    said, other = pool.run(refused, "Flux", {"pipe": 2, "stages": [2, 2]}, adapted=True, targets=["attn.to_out.0"])
    assert said == other
    assert "stage 1 of pipe=2 has nothing to train" in said


def checked(given):
    """As the command does before it starts ranks."""
    config = TrainConfig.read(given)
    check_settings(config)
    check_run(config, find_model(config.pretrained_model_name_or_path))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sharding": "fsdp"}, "sharding='fsdp' shares out whole models"),
        ({"sharding": "ddp"}, "sharding='ddp' shares out whole models"),
        ({"reproducible": True, "global_batch_size": 4}, "reproducible adds gradients up"),
        ({"data_speeds": "auto"}, "data_speeds='auto'"),
        ({"parallel": {"pipe": 2, "stages": "measured"}}, "stages='measured' moves blocks"),
        ({"parallel": {"pipe": 2, "speeds": "auto"}}, "speeds='auto' moves blocks"),
        ({"parallel": {"pipe": 2, "patches": 4}}, "patches=4 is not for training"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout=0.1"),
        ({"token_share": 0.5}, "token_share=0.5"),
        # Its step depends on the size of whole matrices.
        ({"optimizer": "Adafactor"}, "looks at whole weights, of which ranks hold parts with pipe=2"),
        ({"parallel": {"pipe": 99}}, "pipe=99"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, more, words):
    data = folder_of(tmp_path / "data", 2)
    given = settings(data, tmp_path / "out", **{"parallel": {"pipe": 2}, **more})
    with pytest.raises(ditmesh.ConfigError, match=re.escape(words)):
        checked(given)


def test_few_micro_batches_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_bubble(4, 4)
        assert not caplog.text
        warn_of_bubble(4, 1)
    assert "pipe=4 with 1 micro-batch a step: every stage waits for 75 % of it" in caplog.text


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return folder_of(tmp_path_factory.mktemp("data"), 6)


def rows(folder: Path) -> list[tuple[float, float]]:
    """Loss and norm of every step."""
    with (folder / "loss.csv").open() as file:
        return [(float(row["loss"]), float(row["grad_norm"])) for row in csv.DictReader(file)]


def same(found: list[tuple[float, float]], truth: list[tuple[float, float]]) -> bool:
    pairs = [*zip(sum(found, ()), sum(truth, ()), strict=True)]
    return all(abs(one - other) <= 1e-5 * abs(other) for one, other in pairs)


def test_a_run_goes_on_between_stages_and_data_ranks(ranks, data, tmp_path):
    """Stages of one step, data ranks of the next, and stages again: the curve, weights and average of one device."""
    given = settings(data, tmp_path / "alone", train_batch_size=1, global_batch_size=4, max_train_steps=3)
    given |= {"use_ema": True, "ema_decay": 0.5, "max_grad_norm": 0.05}
    alone = curve(given)
    parted = {**given, "output_dir": str(tmp_path / "parted"), "resume_from_checkpoint": "latest"}
    pool = ranks(2)
    staged, plain = {"parallel": {"pipe": 2}}, {"parallel": {"data": 2}}
    for step, parallel in ((1, staged), (2, plain), (3, staged)):
        found = pool.run(curve, {**parted, **parallel}, step)
    assert same(rows(tmp_path / "parted"), rows(tmp_path / "alone"))
    assert found[0].keys() == alone.keys()
    assert not found[1]
    for name, value in alone.items():
        assert torch.allclose(found[0][name], value, rtol=1e-3, atol=2e-6), name
    files = sorted((tmp_path / "parted" / "checkpoint-3").glob("*.safetensors"))
    there = {name for file in files for name in load_file(file)}
    whole = {name for file in (tmp_path / "alone" / "checkpoint-3").glob("*.safetensors") for name in load_file(file)}
    assert there == whole


@pytest.mark.parametrize(
    ("model", "more"),
    [
        pytest.param("emoji-sd3", {"lora": {"rank": 2}, "mixed_precision": "bf16"}, marks=pytest.mark.matrix),
        ("emoji-flux", {"validation_prompts": ["a cactus"], "validation_steps": 2, "validation_inference_steps": 2}),
    ],
    ids=["lora in bf16", "with images"],
)
def test_the_command_trains_on_stages(ranks, kept_ranks, data, tmp_path, model, more):
    """Its curve, images and pipeline are those of one device."""
    import yaml

    given = settings(data, tmp_path / "alone", pretrained_model_name_or_path=model, max_train_steps=2, **more)
    given |= {"global_batch_size": 4}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    for name, change in (("alone", []), ("staged", ["--devices", "2", "--pipe", "2"])):
        arguments = ["train", str(tmp_path / "run.yaml"), *change, "--set", f"output_dir={tmp_path / name}"]
        with pytest.raises(SystemExit) as left:
            main([*arguments, "--device", "cpu", "--threads", "1"])
        assert left.value.code == 0
    tolerance = 1e-2 if "mixed_precision" in more else 1e-5
    for found, truth in zip(rows(tmp_path / "staged"), rows(tmp_path / "alone"), strict=True):
        assert found[0] == pytest.approx(truth[0], rel=tolerance)
    kind = "lora/pytorch_lora_weights.safetensors" if "lora" in more else None
    kind = kind or "pipeline/transformer/diffusion_pytorch_model.safetensors"
    found, truth = load_file(tmp_path / "staged" / kind), load_file(tmp_path / "alone" / kind)
    assert found.keys() == truth.keys()
    assert all((found[name] - value).abs().max() <= 2.1e-4 for name, value in truth.items())
    images = sorted(path.name for path in (tmp_path / "staged" / "validation").glob("*"))
    assert bool(images) == ("validation_prompts" in more)
    if images:
        from PIL import Image

        one, other = (Image.open(tmp_path / name / "validation" / images[0]) for name in ("staged", "alone"))
        assert max(one.size) > 1
        assert np.abs(np.asarray(one, int) - np.asarray(other, int)).max() <= 2


@pytest.mark.matrix
def test_data_ranks_of_unlike_speeds_have_pipelines_of_unlike_lengths(ranks, data, tmp_path):
    given = settings(data, tmp_path / "alone", train_batch_size=1, global_batch_size=4, max_train_steps=2)
    curve(given)
    more = {"parallel": {"pipe": 2, "data": 2}, "data_speeds": [3, 1], "output_dir": str(tmp_path / "staged")}
    ranks(4).run(curve, {**given, **more})
    assert same(rows(tmp_path / "staged"), rows(tmp_path / "alone"))
