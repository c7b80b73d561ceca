"""Training on a random part of the image's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import ditmesh
from ditmesh.layout import layout_of
from ditmesh.train import TrainConfig
from ditmesh.train.model.token_subset import TokenSubset, on_grid, random_tokens
from ditmesh.train.trainer import Trainer
from ditmesh.zoo import path as find
from support.models import inputs, sizes, tiny
from support.train import folder_of, settings

DIT = "emoji-dit-s"


def test_tokens_are_drawn_and_laid_on_the_grid():
    tokens = random_tokens(12, 0.3, 5)
    assert tokens.tolist() == sorted(set(tokens.tolist()))
    assert len(tokens) == 4
    assert not torch.equal(tokens, random_tokens(12, 0.3, 6))
    assert len(random_tokens(12, 0.01, 5)) == 1
    seen = on_grid(torch.tensor([[1, 5], [0, 1]]), (4, 6), (2, 2))
    assert seen.shape == (2, 1, 4, 6)
    assert seen[0, 0].tolist() == [[0, 0, 1, 1, 0, 0]] * 2 + [[0, 0, 0, 0, 1, 1]] * 2
    assert seen[1, 0].tolist() == [[1, 1, 1, 1, 0, 0]] * 2 + [[0] * 6] * 2
    seen = on_grid(torch.tensor([[2]]), (3, 2, 2), (1, 2, 1))
    assert seen[0, 0].nonzero().tolist() == [[1, 0, 0], [1, 1, 0]]


def some_inputs(name: str) -> dict[str, Any]:
    return inputs(name, sizes(name)["B=2 ragged"], masks=False)


def test_flux_sees_what_it_would_of_these_tokens_alone():
    """Its tokens and their places are arguments: they can be left out by hand."""
    model, given = tiny("Flux"), some_inputs("Flux")
    total = given["hidden_states"].shape[1]
    kept = random_tokens(total, 0.4, 0)
    some = {**given, "hidden_states": given["hidden_states"][:, kept], "img_ids": given["img_ids"][kept]}
    subset = TokenSubset(model, layout_of(model))
    with torch.no_grad():
        expected = model(**some)[0]
        subset.keep(kept[None], total)
        found = model(**given)[0]
        torch.testing.assert_close(found[:, kept], expected, rtol=1e-5, atol=1e-6)
        subset.keep(None)
        whole = model(**given)[0]
        subset.close()
        assert torch.equal(model(**given)[0], whole)
    assert not torch.allclose(whole[:, kept], expected, atol=1e-3)


@pytest.mark.parametrize(("name", "per_sample"), [("SD3", True), ("DiT", True), ("PixArt", True), ("Wan", False)])
def test_others_count_for_nothing(name: str, per_sample: bool):
    """Latents of tokens that are left out may be anything; those that are kept are told apart by their places."""
    model, given = tiny(name), some_inputs(name)
    latents = given["hidden_states"]
    patch = model.config.patch_size
    patch = tuple(patch) if isinstance(patch, (list, tuple)) else (patch, patch)
    total = int(torch.tensor([size // step for size, step in zip(latents.shape[2:], patch, strict=True)]).prod())
    kept = torch.stack([random_tokens(total, 0.5, seed) for seed in range(len(latents) if per_sample else 1)])
    seen = on_grid(kept, latents.shape[2:], patch).bool()
    other = torch.where(seen, latents, torch.randn(latents.shape, generator=torch.Generator().manual_seed(1)))
    subset = TokenSubset(model, layout_of(model))
    assert subset.per_sample == per_sample
    with torch.no_grad():
        subset.keep(kept, total)
        first, second = (model(**{**given, "hidden_states": one})[0] for one in (latents, other))
        subset.keep(torch.arange(total).expand(len(kept), -1), total)
        every = model(**given)[0]
        subset.keep(None)
        whole = model(**given)[0]
    subset.close()
    seen = seen.expand(whole.shape)
    assert torch.equal(first[seen], second[seen])
    assert torch.equal(every, whole)
    assert not torch.allclose(first[seen], whole[seen], atol=1e-3)


def losses_of(given: dict[str, Any], steps: int | None = None) -> dict[int, float]:
    config = TrainConfig.read(given)
    pipe = diffusers.DiffusionPipeline.from_pretrained(find(config.pretrained_model_name_or_path))
    pipe.set_progress_bar_config(disable=True)
    with Trainer(config, pipe, timeout=100.0) as trainer:
        return trainer.run(until=steps).losses


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return folder_of(tmp_path_factory.mktemp("data"), 6)


@pytest.fixture(scope="module")
def given(data, tmp_path_factory) -> dict[str, Any]:
    more = {"pretrained_model_name_or_path": DIT, "global_batch_size": 4, "max_train_steps": 4}
    out = tmp_path_factory.mktemp("alone")
    return settings(data, out, **more, token_share=0.25, token_share_until=0.5, learning_rate=1e-3)


@pytest.fixture(scope="module")
def alone(given) -> dict[int, float]:
    return losses_of(given)


@pytest.mark.parametrize(
    "more",
    [
        {"parallel": {"data": 2}, "sharding": "ddp", "gradient_checkpointing": True},
        pytest.param({"parallel": {"data": 2}, "sharding": "fsdp"}, marks=pytest.mark.matrix),
        pytest.param({"parallel": {"data": 2}}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_data_ranks_learn_as_one_device(ranks, given, alone, tmp_path, more):
    for losses in ranks(2).run(losses_of, {**given, "output_dir": str(tmp_path), **more}):
        assert losses.keys() == alone.keys()
        assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-3


def test_the_end_of_the_run_sees_all_tokens_and_a_stop_changes_nothing(given, alone, tmp_path):
    parted = {**given, "output_dir": str(tmp_path)}
    first = losses_of(parted, 1)
    assert first | losses_of({**parted, "resume_from_checkpoint": "latest"}) == alone
    # Without it the first loss, of the same weights, is another one.
    whole = losses_of({**given, "output_dir": str(tmp_path / "whole"), "token_share": 1.0}, 1)
    assert whole[0] != alone[0]
    # From half of the run on it is the same with or without.
    late = {**given, "output_dir": str(tmp_path / "late")}
    losses_of(late, 2)
    assert losses_of({**late, "resume_from_checkpoint": "latest", "token_share": 1.0}, 3) == {2: alone[2]}


def test_where_tokens_cannot_be_left_out_it_is_said(given, tmp_path):
    with pytest.raises(ditmesh.ConfigError, match=r"token_share=0\.25 is for ranks with whole samples"):
        TrainConfig.read({**given, "parallel": {"ulysses": 2}})
    with pytest.raises(ditmesh.ConfigError, match="leave reproducible out"):
        TrainConfig.read({**given, "reproducible": True})
    model = tiny("Sana")
    with pytest.raises(ditmesh.ConfigError, match="SanaTransformer2DModel mixes tokens by their places"):
        TokenSubset(model, layout_of(model))
    with pytest.raises(ditmesh.ConfigError, match="are unknown"):
        TokenSubset(torch.nn.Linear(1, 1), None)
