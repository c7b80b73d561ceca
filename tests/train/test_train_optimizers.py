"""Optimizers by name or path: what they do to the weights, on ranks, and through checkpoints."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ditmesh
from ditmesh.train.optimizer.optimizers import check_optimizer, make_optimizer
from support.sample import sampled
from support.train import configured, folder_of, made, save_pipeline, settings, trainer_of

# Settings of an optimizer that moves the weights of four steps visibly.
MORE = {
    "SGD": {"optimizer_args": {"momentum": 0.9}},
    "Prodigy": {"learning_rate": 1.0, "optimizer_args": {"d0": 1e-4}},
    "AdamW8bit": {"optimizer_args": {"min_8bit_size": 256}},
}


model = made(lambda folder: save_pipeline("pixart", folder))
data = made(lambda folder: folder_of(folder, 6, 32))


@pytest.fixture
def given(model, data, tmp_path):
    base = settings(data, tmp_path / "out", pretrained_model_name_or_path=str(model), resolution=32)
    base |= {"learning_rate": 1e-3, "train_batch_size": 1, "global_batch_size": 2}
    return lambda name, **more: {**base, "optimizer": name, **MORE.get(name, {}), **more}


def steps(given, until=None):
    """Losses of a run, a digest of its weights, and the largest change of one in its first step."""
    with trainer_of(given) as t:
        outcome = t.run(until=until)
        return outcome.losses, t.state.weights_digest(), outcome.unsaved


@pytest.mark.parametrize("name", sampled(["AdamW8bit", "SGD", "Adafactor", "Prodigy", "torch.optim.RMSprop"], of=3))
def test_a_run_that_stopped_goes_on_to_the_bit(given, tmp_path, name):
    whole, weights, unsaved = steps(given(name))
    assert not unsaved
    assert len({round(loss, 5) for loss in whole.values()}) == 4
    stops = given(name, output_dir=str(tmp_path / "stops"))
    first, *_ = steps(stops, 2)
    rest, same, _ = steps({**stops, "resume_from_checkpoint": "latest"})
    assert sorted(rest) == [2, 3]
    assert first | rest == whole
    assert same == weights
    saved = tmp_path / "out" / "checkpoint-4"
    facts = json.loads((saved / "manifest.json").read_text())["optimizer"]
    if name == "Prodigy":
        (group,) = facts["groups"]
        assert group["k"] == 4
        assert group["d"] > 1e-4
        assert not {"lr", "betas", "d0", "params"} & group.keys()
        assert {"step": 4} in facts["numbers"].values()
    if name == "AdamW8bit":
        # States of eight bits are saved as bytes.
        tensors = {key: value for file in saved.glob("*.safetensors") for key, value in load_file(file).items()}
        sizes = Counter[Any]()
        for key, value in tensors.items():
            sizes[key.partition(".")[0], value.dtype] += value.nbytes
        assert sizes["optimizer", torch.uint8] > 0.2 * sizes["model", torch.float32]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("SGD", {"parallel": {"data": 2}, "sharding": "fsdp"}),
        *(
            pytest.param(name, more, marks=pytest.mark.matrix)
            for name, more in (
                ("Prodigy", {"parallel": {"ulysses": 2}}),
                ("SGD", {"parallel": {"tensor": 2}}),
                ("Adam", {"parallel": {"tensor": 2, "data": 2}, "sharding": "fsdp"}),
                ("AdamW8bit", {"parallel": {"data": 2}}),
                ("Adafactor", {"parallel": {"ulysses": 2}}),
            )
        ),
    ],
    ids=str,
)
def test_ranks_learn_as_one_device_and_one_goes_on(ranks, given, tmp_path, name, more):
    """Two steps on the ranks and two on one device are four on one device."""
    alone, *_ = steps(given(name, output_dir=str(tmp_path / "alone")))
    count = ditmesh.ParallelConfig(**more["parallel"]).world_size
    (found, first, unsaved), *others = ranks(count).run(steps, given(name, **more), 2)
    assert not unsaved
    assert all(other[:2] == (found, first) for other in others)
    rest, *_ = steps(given(name, resume_from_checkpoint="latest"))
    found |= rest
    assert sorted(found) == [0, 1, 2, 3]
    assert max(abs(found[step] / alone[step] - 1) for step in alone) <= 2e-5


def test_adamw_is_torchs_with_the_runs_settings(given):
    model = torch.nn.ModuleDict({"transformer": torch.nn.Linear(3, 2)})
    made = make_optimizer(
        model, configured(given("AdamW", optimizer_args={"betas": [0.8, 0.999], "weight_decay": 0.1}))
    )
    assert type(made) is torch.optim.AdamW
    (group,) = made.param_groups
    assert (group["betas"], group["weight_decay"], group["eps"], group["lr"]) == ((0.8, 0.999), 0.1, 1e-8, 1e-3)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"optimizer": "Adamw8bits"}, "'Adamw8bits' is no optimizer; use AdamW, .*; did you mean 'AdamW8bit'"),
        ({"optimizer_args": {"fused_": True}}, "does not take its arguments .'fused_'.*; did you mean 'fused'"),
        ({"optimizer_args": {"lr": 1}}, "learning rate is learning_rate"),
        ({"optimizer": "SGD", "optimizer_args": {"betas": [0.9, 0.99]}}, "does not take its arguments .'betas'"),
        ({"optimizer": "Prodigy"}, "finds its own step size.*learning_rate: 1.0"),
        ({"optimizer": "torch.optim.Muons"}, "is no torch.optim.Optimizer"),
        ({"optimizer": "Adafactor", "parallel": {"tensor": 2}}, "may look at whole weights.*tensor=2; use data"),
        ({"optimizer": "Prodigy", "learning_rate": 1, "parallel": {"data": 2}, "sharding": "fsdp"}, "sharding='fsdp'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_the_run(tmp_path, more, said):
    config = configured({"pretrained_model_name_or_path": "emoji-sd3", **settings(tmp_path, tmp_path), **more})
    with pytest.raises(ditmesh.ConfigError, match=said):
        check_optimizer(config)


def test_a_missing_package_is_named_with_its_pip_line(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prodigyopt", None)
    config = configured({**settings(tmp_path, tmp_path), "optimizer": "prodigy", "learning_rate": 1.0})
    with pytest.raises(ditmesh.ConfigError, match=r"prodigyopt cannot be imported .*; pip install 'ditmesh\[train\]'"):
        check_optimizer(config)


def test_what_is_not_finite_is_named_by_its_optimizer(given, monkeypatch):
    step = torch.optim.SGD.step

    def broken(optimizer, closure=None):
        step(optimizer)
        for state in optimizer.state.values():
            state["momentum_buffer"].fill_(float("inf"))

    monkeypatch.setattr(torch.optim.SGD, "step", broken)
    with trainer_of(given("SGD")) as it, pytest.raises(FloatingPointError, match="SGD's momentum_buffer of trans"):
        it.run(until=1)
