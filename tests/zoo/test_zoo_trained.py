"""The embedded models that the trainer trained, as they are shipped."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from ditmesh import zoo
from support.embedded import TOLERANCE, card_of, on_ranks, pipeline_of

NAME = "fashion-dit"


def clothes(config: dict[str, int] | None) -> np.ndarray:
    """A picture of every class on the ranks of a configuration; None: without ditmesh."""
    from training import evaluate_dit

    told = zoo.EMBEDDED[NAME]
    with on_ranks(pipeline_of(NAME), config) as pipe:
        return evaluate_dit.draw(pipe, list(range(told.classes)), steps=12, guidance=told.guidance_scale)


def said_of(pictures: np.ndarray) -> list[int]:
    """The classes in which the embedded classifier puts pictures."""
    from training.evaluate_fashion import in_parts, read_classifier
    from training.fashion_data import narrow

    return in_parts(read_classifier(zoo.path(NAME)), narrow(pictures)).argmax(1).tolist()


@pytest.fixture(scope="module")
def truth(ranks) -> np.ndarray:
    return ranks(1).run(clothes, None)[0]


def test_all_embedded_models_together_are_small():
    """As a wheel holds them: compressed, so that rows of classes nobody trained count for nothing."""
    weights = [file for name in zoo.EMBEDDED for file in zoo.path(name).rglob("*.safetensors")]
    assert sum(len(zlib.compress(file.read_bytes())) for file in weights) <= 57e6


def test_no_embedded_model_says_where_it_was_made():
    for name in zoo.EMBEDDED:
        for file in zoo.path(name).rglob("*.json"):
            assert "_name_or_path" not in file.read_text(encoding="utf-8"), file


def test_it_is_what_the_zoo_says():
    pipe, told = pipeline_of(NAME), zoo.EMBEDDED[NAME]
    assert type(pipe).__name__ == told.pipeline
    for part in (pipe.transformer, pipe.vae):
        assert {p.dtype for p in part.parameters()} == {torch.float32}
    config = pipe.transformer.config
    assert (config.sample_size // config.patch_size) ** 2 == told.image_tokens
    assert config.sample_size * 2 == told.size
    assert pipe.get_label_ids(zoo.captions(NAME)) == list(range(told.classes))
    assert "Zalando" in (zoo.path(NAME) / "LICENSE-DATA").read_text(encoding="utf-8")


def test_its_pictures_are_of_their_classes(truth: np.ndarray):
    told = zoo.EMBEDDED[NAME]
    assert truth.shape == (told.classes, told.size, told.size, 3)
    right = [said == asked for asked, said in enumerate(said_of(truth))]
    assert sum(right) >= told.classes - 2, right


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ring": 2}, {"cfg": 2}], ids=str)
def test_two_ranks_generate_the_pictures_of_one(ranks, truth: np.ndarray, config: dict[str, int]):
    for pictures in ranks(2).run(clothes, config):
        assert np.abs(pictures.astype(int) - truth).max() <= TOLERANCE


def test_the_card_states_the_measured_figures():
    card, measured = card_of(NAME)
    assert measured["classifier_on_drawn"] >= 0.8
    assert f"{measured['classifier_on_drawn']:.1%} of the generated ones" in card
    near = measured["nearest_training_picture"]
    # Learnt by heart, they would lie on their training pictures.
    assert near["drawn"]["1 %"] > near["test"]["1 %"] / 2
    assert f"| 50 % | {near['test']['50 %']} | {near['drawn']['50 %']} |" in card
