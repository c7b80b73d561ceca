"""The embedded `WanPipeline` as it is shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ditmesh import zoo
from support.embedded import TOLERANCE, check_captioned_card, generated, on_ranks, pipeline_of

pytest.importorskip("av", reason="PyAV is not installed: pip install av")
pytest.importorskip("ftfy", reason="Wan's pipeline wants ftfy: pip install ftfy")

NAME = "emoji-wan"
ASKED = ("a red apple moves left", "a rocket moves up", "a yellow star grows")


def videos(config: dict[str, Any] | None, steps: int) -> np.ndarray:
    """A video of every caption, (3, frames, h, w, 3), on the ranks of a configuration; None: without ditmesh."""
    from training import motion

    guidance = zoo.EMBEDDED[NAME].guidance_scale
    with on_ranks(pipeline_of(NAME), config) as pipe:
        return np.stack([motion.generate(pipe, one, steps=steps, guidance=guidance, seed=3) for one in ASKED])


def test_it_is_what_the_zoo_says():
    pipe, told = pipeline_of(NAME), zoo.EMBEDDED[NAME]
    assert type(pipe).__name__ == told.pipeline == "WanPipeline"
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder):
        assert {p.dtype for p in part.parameters()} == {torch.float32}
    side = told.size // pipe.vae_scale_factor_spatial
    frames = (told.frames - 1) // pipe.vae_scale_factor_temporal + 1
    assert side * side * frames == told.image_tokens
    assert len(zoo.captions(NAME)) == 72
    assert "Microsoft" in (zoo.path(NAME) / "LICENSE-DATA").read_text(encoding="utf-8")
    assert sum(file.stat().st_size for file in zoo.path(NAME).rglob("*") if file.is_file()) < 20e6


def test_its_videos_show_what_is_asked_for(ranks):
    """Which emoji it is, and where it goes: of all videos the one asked for is the nearest."""
    from training import motion

    (made,) = ranks(1).run(videos, None, zoo.EMBEDDED[NAME].steps)
    pictures = subjects()
    every = motion.captions()
    references = np.stack([motion.video(pictures[subject], moves) for subject, moves, _ in every])
    found = [every[motion.judge(one, references)[0]][2] for one in made]
    assert found == list(ASKED)


def subjects() -> dict[str, np.ndarray]:
    """The subjects' pictures, as they lie beside the model."""
    from training import motion

    sheet = np.asarray(Image.open(zoo.path(NAME) / "subjects.png").convert("RGB"))
    size = motion.SIZE
    tiles = [
        sheet[y : y + size, x : x + size]
        for y in range(0, sheet.shape[0], size)
        for x in range(0, sheet.shape[1], size)
    ]
    return dict(zip(motion.SUBJECTS, tiles, strict=False))


@pytest.mark.parametrize(
    "config", [{"ulysses": 2}, *(pytest.param(c, marks=pytest.mark.matrix) for c in ({"ring": 2}, {"cfg": 2}))], ids=str
)
def test_two_ranks_generate_the_videos_of_one(ranks, config: dict[str, int]):
    (truth,) = ranks(1).run(videos, None, 4)
    for made in ranks(2).run(videos, config, 4):
        assert np.abs(made.astype(int) - truth).max() <= TOLERANCE


def test_generate_takes_size_and_settings_of_the_card(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    receipt = generated(NAME, ASKED[0], tmp_path, capfd)
    assert (receipt.width, receipt.height, receipt.frames) == (64, 64, 17)
    assert receipt.guidance == zoo.EMBEDDED[NAME].guidance_scale


def test_the_card_states_the_measured_figures():
    check_captioned_card(NAME, "nearest_caption_accuracy")
