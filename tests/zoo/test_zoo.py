"""The embedded models as they are shipped: what they are, and what they make."""

from __future__ import annotations

import gzip
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ditmesh
from ditmesh import zoo
from ditmesh.generate.model_info import find_model
from ditmesh.generate.receipt import read_receipt
from ditmesh.lab.study import references
from ditmesh.train.config import DataConfig
from ditmesh.train.data.sources import read_samples
from support.commands import run as run_command

# What each is asked for, in images that its training knows.
ASKED: dict[str, tuple[str, ...]] = {
    "emoji-sd3": ("a red fox", "a cactus", "a red apple", "a soccer ball", "a rainbow", "a red heart"),
    "emoji-flux": ("a red fox", "a cactus", "a soccer ball", "a rainbow", "a red heart", "a penguin"),
    "emoji-dit-s": ("fox", "cactus", "strawberry", "football", "heart", "panda"),
    "emoji-dit-l": ("fox", "cactus", "strawberry", "football", "heart", "panda"),
    "emoji-wan": ("a red apple moves left", "a rocket moves up", "a yellow star grows"),
    "emoji-anyflow": ("a red apple moves left", "a rocket moves up", "a yellow star grows"),
    "fashion-dit": tuple(zoo.captions("fashion-dit")),
}


@cache
def pipeline_of(name: str) -> Any:
    """Loaded once in a process."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(zoo.path(name))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def in_the_matrix(names: Any, *quick: Any) -> list[Any]:
    """Parameters of which only those of `quick` are no cells of the matrix."""
    return [pytest.param(name, id=str(name), marks=[] if name in quick else pytest.mark.matrix) for name in names]


def test_an_embedded_model_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="emoji-sd3"):
        zoo.path("emoji-sd4")
    info = find_model("emoji-dit-s")
    assert (info.name, info.files, info.local) == ("emoji-dit-s", zoo.path("emoji-dit-s"), True)
    assert zoo.embedded(info.files) is zoo.EMBEDDED["emoji-dit-s"]
    with pytest.raises(ditmesh.InputError, match="emoji-dit-l"):
        find_model("emoji-dit-xl")
    shutil.copytree(info.files, tmp_path / "emoji-dit-s", ignore=shutil.ignore_patterns("*.safetensors"))
    assert find_model("emoji-dit-s").files == Path("emoji-dit-s")  # a folder of that name goes first
    assert zoo.embedded(Path("emoji-dit-s")) is None


def test_without_its_distribution_a_model_is_answered_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo, "_folders", list)
    with pytest.raises(ditmesh.InputError, match=r"'emoji-flux' is not installed; pip install 'ditmesh\[zoo\]'"):
        find_model("emoji-flux")


@pytest.mark.parametrize("name", zoo.EMBEDDED)
def test_it_is_what_the_zoo_says(name: str):
    pipe, told = pipeline_of(name), zoo.EMBEDDED[name]
    assert type(pipe).__name__ == told.pipeline
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            assert {p.dtype for p in part.parameters()} <= {torch.float32}
    config = pipe.transformer.config
    if told.frames:
        side = told.size // pipe.vae_scale_factor_spatial
        assert side * side * ((told.frames - 1) // pipe.vae_scale_factor_temporal + 1) == told.image_tokens
    elif told.pipeline == "FluxPipeline":
        assert (told.size // pipe.vae_scale_factor // 2) ** 2 == told.image_tokens
    else:
        assert (config.sample_size // config.patch_size) ** 2 == told.image_tokens
    if told.classes:
        assert pipe.get_label_ids(zoo.captions(name)) == list(range(told.classes))


def test_the_trainer_reads_the_data_of_the_recipe_of_clothes(tmp_path: Path):
    from training.fashion import FashionDiT
    from training.fashion_data import INSIDE

    (folder := tmp_path / INSIDE).mkdir(parents=True)
    for part, content in (("images-idx3", bytes(16 + 2 * 28 * 28)), ("labels-idx1", bytes([*bytes(8), 7, 3]))):
        (folder / f"train-{part}-ubyte.gz").write_bytes(gzip.compress(content))
    samples = read_samples(DataConfig(train_data_dir=str(FashionDiT().write_data(tmp_path))), "label").good
    assert [(sample.words, sample.size) for sample in samples] == [(7, (32, 32)), (3, (32, 32))]


def test_each_seed_has_a_face_of_its_own():
    from training.faces import SIDE, faces

    ten, again = ([each["image"] for each in faces(10, 7)] for _ in range(2))
    assert np.shape(ten) == (10, SIDE, SIDE, 3)
    assert len({image.tobytes() for image in ten}) == 10
    assert np.array_equal(ten, again)


# --- what they make


def made(name: str) -> np.ndarray:
    """Images or videos of what is asked for, without ditmesh."""
    from training import evaluate, evaluate_dit, motion

    told, asked, pipe = zoo.EMBEDDED[name], list(ASKED[name]), pipeline_of(name)
    given: dict[str, Any] = {"steps": told.steps, "guidance": told.guidance_scale}
    if told.frames:
        return np.stack([motion.generate(pipe, caption, **given, seed=3) for caption in asked])
    if told.classes:
        return evaluate_dit.draw(pipe, pipe.get_label_ids(asked), **given)
    given |= {"max_sequence_length": 16} if name == "emoji-sd3" else {"size": told.size}
    return evaluate.draw(pipe, asked, **given)


def recognised(name: str, images: np.ndarray) -> list[str]:
    """The captions whose training images are the nearest; for clothes what the classifier says."""
    from training.evaluate_fashion import in_parts, read_classifier
    from training.fashion_data import narrow

    from training import evaluate_dit, motion

    folder, told, names = zoo.path(name), zoo.EMBEDDED[name], zoo.captions(name)
    if name == "fashion-dit":
        return [names[at] for at in in_parts(read_classifier(folder), narrow(images)).argmax(1).tolist()]
    if told.classes:
        views = references.read_references(folder, told.classes, told.size)
        found, _ = evaluate_dit.judge(references.shrink(images), views)
        return [ASKED[name][pipeline_of(name).get_label_ids(list(ASKED[name])).index(at)] for at in found]
    if not told.frames:
        sheet = references.read_sheet(folder / "thumbnails.png", len(names))
        return [names[at] for at in references.nearest(references.shrink(images), sheet)]
    sheet, size = np.asarray(Image.open(folder / "subjects.png").convert("RGB")), motion.SIZE
    tiles = [
        sheet[y : y + size, x : x + size] for y in range(0, len(sheet), size) for x in range(0, len(sheet[0]), size)
    ]
    subjects = dict(zip(motion.SUBJECTS, tiles, strict=False))
    videos = np.stack([motion.video(subjects[subject], moves) for subject, moves, _ in motion.captions()])
    return [motion.captions()[motion.judge(video, videos)[0]][2] for video in images]


@pytest.mark.parametrize("name", in_the_matrix(zoo.EMBEDDED, "emoji-flux"))
def test_its_images_show_what_is_asked_for(name: str):
    found = recognised(name, made(name))
    wrong = [(asked, shown) for asked, shown in zip(ASKED[name], found, strict=True) if asked != shown]
    assert len(wrong) <= 1, wrong


@pytest.mark.parametrize("name", in_the_matrix(["emoji-dit-s", "emoji-flux", "emoji-wan"], "emoji-dit-s"))
def test_generate_takes_size_and_settings_of_the_card(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str):
    told = zoo.EMBEDDED[name]
    asked = ["generate", ASKED[name][0], "--model", name, "--threads", "1", "--device", "cpu", "--steps", "2"]
    code = run_command(*asked, "--out", tmp_path, "--json")
    captured = capfd.readouterr()
    assert code == 0, captured.err
    receipt = read_receipt(json.loads(captured.out)["images"][0]["path"])
    assert (receipt.width, receipt.height, receipt.frames or 0) == (told.size, told.size, told.frames)
    assert receipt.guidance == told.guidance_scale
    assert json.loads((zoo.path(name) / "training.json").read_text("utf-8"))["evaluation"]["steps"] == told.steps
