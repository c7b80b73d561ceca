"""The scripts that train the embedded models: from pictures to a pipeline."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

# The learning rate of the first one is zero, and no gradient passes a layer that begins at zero before it has moved.
STEPS = 6


def grey(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count, dtype=np.uint8) % 10


def webp(color: tuple[int, int, int, int]) -> bytes:
    picture = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    picture.paste(color, (8, 8, 24, 24))
    data = io.BytesIO()
    picture.save(data, "webp", lossless=True)
    return data.getvalue()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    file = tmp_path / "pictures.tgz"
    with tarfile.open(file, "w:gz") as tar:
        for code, color in {
            "1f98a": (255, 0, 0, 255),
            "1f335": (0, 255, 0, 255),
            "1f4a1": (0, 0, 255, 255),
            "1f44b-1f3fb": (9, 9, 9, 255),
        }.items():
            data = webp(color)
            member = tarfile.TarInfo(f"package/assets/{code}.webp")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file


def entries():
    from training.data import Entry

    return (Entry("1f98a", ("a red fox", "a fox")), Entry("1f335", ("a cactus",)))


def test_pictures_are_laid_on_white_and_near_copies_left_out(archive: Path):
    from training.data import build

    pictures = build(archive, 16, entries())
    assert pictures.chosen.shape == (2, 16, 16, 3)
    assert pictures.chosen[0, 0, 0].tolist() == [255, 255, 255]
    assert pictures.chosen[0, 8, 8].tolist() == [255, 0, 0]
    assert len(pictures.wider) == 1  # neither the chosen ones nor the one with a skin tone


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
    ["fashion-dit", "emoji-flux", "emoji-wan", "emoji-sd3", "emoji-dit-s"],
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
