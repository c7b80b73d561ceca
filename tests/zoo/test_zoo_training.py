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


@pytest.mark.parametrize("line", ["1f98a", "1f98a | ", "1f98a | a fox\n1f335 | a fox"])
def test_a_bad_caption_table_is_refused(tmp_path: Path, line: str):
    from training.data import read_entries

    table = tmp_path / "captions.txt"
    table.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=r"captions\.txt:\d"):
        read_entries(table)


def test_every_word_of_a_caption_is_one_token_and_other_words_are_spelled(tmp_path: Path):
    from training import text

    tokenizer = text.make_tokenizer(["a red fox", "a cactus"], tmp_path)
    assert tokenizer.tokenize("a picture of a Red fox") == [
        "a</w>",
        "picture</w>",
        "of</w>",
        "a</w>",
        "red</w>",
        "fox</w>",
    ]
    assert len(tokenizer.tokenize("zebra")) > 1
    nothing = tokenizer("", padding="max_length", truncation=True)["input_ids"]
    assert nothing == [tokenizer.bos_token_id] + [tokenizer.eos_token_id] * (text.MAX_TOKENS - 1)


def test_the_learning_rate_rises_stays_and_falls_to_zero():
    from training.loop import Plan

    plan = Plan(steps=100, batch=1, rate=2.0, warmup=10, cooldown=0.5)
    assert [plan.rate_at(step) for step in (0, 9, 30, 50, 75)] == [0.2, 2.0, 2.0, 2.0, 1.0]
    assert plan.rate_at(100) == 0.0


def test_training_resumes_bit_equal(archive: Path, tmp_path: Path):
    from training.data import build
    from training.loop import Plan

    from training import autoencoder as ae

    pictures, plan = build(archive, 16, entries()), Plan(steps=4, batch=2, rate=1e-3, warmup=2)

    def trained(file: Path, stops: tuple[int | None, ...]) -> dict[str, torch.Tensor]:
        for stop in stops:
            torch.manual_seed(0)
            model = ae.make_autoencoder((8, 8), 4, 16)
            outcome = ae.train(model, plan, pictures.chosen, pictures.wider, file, stop_at=stop)
            assert outcome.finished == (stop is None)
        state = torch.load(file, weights_only=True)
        return state["modules"]["vae"] | {f"average.{i}": v for i, v in enumerate(state["average"]["shadow_params"])}

    once, twice = trained(tmp_path / "a.pt", (None,)), trained(tmp_path / "b.pt", (1, 3, None))
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[key], twice[key]) for key in once)


def test_clothes_get_an_edge_and_lose_it_again():
    from training.fashion_data import narrow, widen

    pictures = grey(3)[0]
    wide = widen(pictures)
    assert wide.shape == (3, 32, 32, 3)
    assert not wide[:, :2].any()
    assert np.array_equal(narrow(wide), pictures)


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
