"""The command that trains embedded models: from pictures to a pipeline."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

# The learning rate of the first one is zero, and no gradient passes a layer that begins at zero before it has moved.
STEPS = 6


def grey(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count, dtype=np.uint8) % 10


def test_distances_are_zero_between_equals_and_known_between_others():
    from training.evaluate_fashion import distances, frechet

    pictures = grey(6)[0]
    assert np.allclose(distances(pictures[:3], pictures), 0.0, atol=1e-2)
    moved = np.clip(pictures.astype(int), 0, 250).astype(np.uint8)
    assert np.allclose(distances(moved + 5, moved), 5.0, atol=1e-2)
    features = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    assert frechet(features, features) == pytest.approx(0.0, abs=1e-6)
    assert frechet(features, features + 2.0) == pytest.approx(16.0, rel=1e-5)


def test_clothes_get_an_edge_and_lose_it_again():
    from training.fashion_data import narrow, widen

    pictures = grey(3)[0]
    wide = widen(pictures)
    assert wide.shape == (3, 32, 32, 3)
    assert not wide[:, :2].any()
    assert np.array_equal(narrow(wide), pictures)


def test_the_files_of_the_set_are_found_and_read(tmp_path: Path):
    from training.fashion_data import INSIDE, fetch, read

    pictures, labels = grey(3)
    (tmp_path / INSIDE).mkdir(parents=True)
    for kind, head, array in (("images-idx3", 16, pictures), ("labels-idx1", 8, labels)):
        with gzip.open(tmp_path / INSIDE / f"train-{kind}-ubyte.gz", "wb") as file:
            file.write(bytes(head) + array.tobytes())
    found = read(fetch(tmp_path), "train")
    assert np.array_equal(found[0], pictures)
    assert np.array_equal(found[1], labels)


def test_without_apt_the_fetch_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from training import fashion_data

    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(fashion_data, "INSIDE", Path("nowhere"))
    with pytest.raises(RuntimeError, match=r"apt-get was not found.*put its four \.gz files there"):
        fashion_data.fetch(tmp_path)


def test_a_picture_keeps_its_captions_in_its_copies():
    from training.data import Entry
    from training.emoji import AS_WRITTEN, COPIES, wordings

    said = wordings(Entry("1f98a", ("a red fox", "a fox")), 0)
    assert len(said) == COPIES
    assert said[:AS_WRITTEN].count("a red fox") == said[:AS_WRITTEN].count("a fox") == AS_WRITTEN / 2
    assert not {"a red fox", "a fox"} & set(said[AS_WRITTEN:])
    assert all("fox" in one for one in said)


def test_videos_move_as_their_captions_say():
    from training.motion import FRAMES, MOTIONS, judge, video

    # A black disc on white.
    down, across = np.indices((64, 64)) - 31.5
    picture = np.where((down**2 + across**2 < 24**2)[..., None], 0, 255).repeat(3, 2).astype(np.uint8)
    videos = np.stack([video(picture, motion) for motion in MOTIONS])
    assert videos.shape == (len(MOTIONS), FRAMES, 64, 64, 3)
    dark = 255.0 - videos[..., 0]
    weight = dark.sum((2, 3))
    x, y = ((dark * one).sum((2, 3)) / weight for one in (across, down))
    moved = np.stack([x[:, -1] - x[:, 0], y[:, -1] - y[:, 0]], axis=1)
    expected = [[MOTIONS[motion][0] * 26, MOTIONS[motion][1] * 26] for motion in MOTIONS]
    assert np.allclose(moved, expected, atol=0.5)
    grown = weight[:, -1] / weight[:, 0]
    assert np.allclose(grown[:4], 1, atol=0.02)
    assert grown[4] > 4
    assert grown[5] < 1 / 4
    noisy = np.clip(videos[2].astype(int) + np.random.default_rng(0).integers(-40, 41, videos[2].shape), 0, 255)
    place, level = judge(noisy, videos)
    assert place == 2
    assert 15 < level < 30


@pytest.mark.matrix
def test_the_card_of_the_videos_has_the_figures_of_the_record(tmp_path: Path):
    from training.motion import EmojiWan

    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"z_dim": 24}')
    measured = {"captions": 72, "steps": 16, "guidance_scale": 3.0, "psnr_to_nearest": 21.5, "autoencoder_psnr": 30.25}
    measured |= {f"nearest_{one}_accuracy": 0.5 for one in ("caption", "subject", "motion")}
    record = {
        "name": "emoji-wan",
        "evaluation": {**measured, "wrong": {"a red apple grows": "a red heart grows"}},
        "parameters": {"transformer": 2_420_504, "unused": 0},
        "training": {"steps": 7, "minutes": 3.5},
        "settings": {"train_batch_size": 8},
        "machine": {"processor": "x", "threads": 1, "torch": "2"},
        "image_tokens": 320,
        "notes": [],
    }
    EmojiWan().write_card(tmp_path, record)
    card = (tmp_path / "README.md").read_text()
    assert "30.2 dB" in card
    assert "a red apple grows (to a red heart grows)" in card
    assert "Fluent Emoji" in (tmp_path / "LICENSE-DATA").read_text()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """Recipes with few pictures and an autoencoder of one step."""
    from training.data import Entry, Pictures

    from training import emoji, fashion, loop, motion

    plan = loop.Plan(steps=1, batch=2, rate=1e-3, warmup=1)
    chosen = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    pictures = Pictures((Entry("1f98a", ("a red fox", "a fox")), Entry("1f335", ("a cactus",))), chosen, chosen[:0])
    monkeypatch.setattr(fashion, "AUTOENCODER", plan)
    monkeypatch.setattr(fashion, "fetch", lambda folder: folder)
    monkeypatch.setattr(fashion, "read", lambda there, part: grey(20))
    monkeypatch.setattr(emoji, "AUTOENCODER", plan)
    monkeypatch.setattr(emoji, "DECODER", plan)
    monkeypatch.setattr(motion, "AUTOENCODER", plan)
    monkeypatch.setattr(motion, "DECODER", plan)
    monkeypatch.setattr(motion, "SUBJECTS", ("a red fox", "a cactus"))
    monkeypatch.setattr(motion, "load", lambda folder: pictures)
    monkeypatch.setattr(
        emoji, "load", lambda folder, size=64, table=None: replace(pictures, chosen=chosen[:, :size, :size])
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    [
        "fashion-dit",
        *(
            pytest.param(name, marks=pytest.mark.matrix)
            for name in ("emoji-flux", "emoji-wan", "emoji-sd3", "emoji-dit-s")
        ),
    ],
)
@pytest.mark.usefixtures("small")
def test_a_recipe_goes_from_pictures_to_a_pipeline_with_a_record(tmp_path: Path, name: str):
    from diffusers import DiffusionPipeline
    from safetensors.torch import load_file

    from training import zoo as command

    recipe = command.RECIPES[name]
    trained = command.train(recipe, tmp_path, steps=STEPS)
    recipe.export(trained, tmp_path / "out", tmp_path)
    record = command.describe(name, tmp_path)
    assert record["training"]["steps"] == record["settings"]["max_train_steps"] == STEPS
    file = tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors"
    assert {value.dtype for value in load_file(file).values()} == {torch.float16}
    before = DiffusionPipeline.from_pretrained(tmp_path / "untrained")
    after = DiffusionPipeline.from_pretrained(trained)
    for part in recipe.settings.get("train_modules", ["transformer"]):
        pairs = zip(getattr(before, part).parameters(), getattr(after, part).parameters(), strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs), part
    assert (tmp_path / "out" / "captions.json").exists()
    # What is there is not made again.
    written = (trained / "model_index.json").stat().st_mtime_ns
    assert command.train(recipe, tmp_path, steps=STEPS) == trained
    assert (trained / "model_index.json").stat().st_mtime_ns == written
