"""The embedded `FluxPipeline` as it is shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ditmesh import zoo
from ditmesh.zoo import references as known
from support.embedded import TOLERANCE, check_captioned_card, generated, on_ranks, pipeline_of

NAME = "emoji-flux"
ASKED = ("a red fox", "a cactus", "a soccer ball", "a rainbow", "a red heart", "a penguin")


def pictures(config: dict[str, Any] | None, steps: int) -> np.ndarray:
    """A picture of every caption, (n, h, w, 3), on the ranks of a configuration; None: without ditmesh."""
    from training import evaluate

    told = zoo.EMBEDDED[NAME]
    with on_ranks(pipeline_of(NAME), config) as pipe:
        return evaluate.draw(pipe, list(ASKED), steps=steps, guidance=told.guidance_scale, size=told.size)


def test_it_is_what_the_zoo_says():
    pipe, told = pipeline_of(NAME), zoo.EMBEDDED[NAME]
    assert type(pipe).__name__ == told.pipeline == "FluxPipeline"
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
        assert {p.dtype for p in part.parameters()} == {torch.float32}
    side = told.size // pipe.vae_scale_factor // 2
    assert side * side == told.image_tokens
    assert pipe.transformer.config.in_channels == 4 * pipe.vae.config.latent_channels
    assert zoo.captions(NAME) == zoo.captions("emoji-sd3")
    assert "Microsoft" in (zoo.path(NAME) / "LICENSE-DATA").read_text(encoding="utf-8")


def test_its_pictures_are_nearest_to_the_right_training_pictures(ranks):
    told, names = zoo.EMBEDDED[NAME], zoo.captions(NAME)
    (made,) = ranks(1).run(pictures, None, told.steps)
    references = known.read_sheet(zoo.path(NAME) / "thumbnails.png", len(names))
    found = [names[at] for at in known.nearest(known.shrink(made), references)]
    assert sum(a == b for a, b in zip(found, ASKED, strict=True)) >= len(ASKED) - 1, found


@pytest.mark.parametrize(
    "config",
    [
        {"ulysses": 2},
        *(pytest.param(c, marks=pytest.mark.matrix) for c in ({"ring": 2}, {"tensor": 2})),
    ],
    ids=str,
)
def test_two_ranks_generate_the_pictures_of_one(ranks, config: dict[str, int]):
    (truth,) = ranks(1).run(pictures, None, 4)
    for made in ranks(2).run(pictures, config, 4):
        assert np.abs(made.astype(int) - truth).max() <= TOLERANCE


def test_generate_takes_size_and_settings_of_the_card(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    receipt = generated(NAME, ASKED[0], tmp_path, capfd)
    assert (receipt.width, receipt.height) == (64, 64)
    assert receipt.guidance == zoo.EMBEDDED[NAME].guidance_scale


def test_the_card_states_the_measured_figures():
    check_captioned_card(NAME, "nearest_picture_accuracy")
