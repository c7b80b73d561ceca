"""The embedded class-conditional models as they are shipped, and what their training is made of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ditmesh import zoo
from ditmesh.zoo import references as known
from support.sample import sampled

NAMES = ("emoji-dit-s", "emoji-dit-l")
FLOOR = 18.0  # dB
DRAWN = ("fox", "cactus", "strawberry", "football", "heart", "panda")


# --- the shipped models ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipes():
    from diffusers import DiffusionPipeline

    loaded = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        for name in NAMES:
            loaded[name] = DiffusionPipeline.from_pretrained(zoo.path(name))
            loaded[name].set_progress_bar_config(disable=True)
    return loaded


def test_both_are_small_and_say_what_they_are():
    files = [file for name in NAMES for file in zoo.path(name).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 20e6
    for name in NAMES:
        assert (zoo.path(name) / "samples.png").exists()
        assert "Microsoft" in (zoo.path(name) / "LICENSE-DATA").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_in_float32_and_is_what_the_zoo_says(pipes, name: str):
    from diffusers import DDIMScheduler, DiTPipeline

    pipe, told = pipes[name], zoo.EMBEDDED[name]
    assert type(pipe) is DiTPipeline
    assert told.pipeline == "DiTPipeline"
    for part in (pipe.transformer, pipe.vae):
        assert {p.dtype for p in part.parameters()} == {torch.float32}
    config = pipe.transformer.config
    assert (config.sample_size // config.patch_size) ** 2 == told.image_tokens >= 256
    assert (config.num_attention_heads, config.attention_head_dim % 8) == (8, 0)
    assert pipe.vae.config.shift_factor is None  # DiTPipeline would leave it out
    assert type(pipe.scheduler) is DDIMScheduler
    assert pipe.scheduler.config.prediction_type == "v_prediction"


def test_one_is_twice_as_deep_as_the_other(pipes):
    small, large = (len(pipes[name].transformer.transformer_blocks) for name in NAMES)
    assert (small, large) == (6, 12)


@pytest.mark.parametrize("name", NAMES)
def test_its_classes_have_the_names_of_the_table(pipes, name: str):
    from training.data import CLASSES, read_entries

    pipe, entries = pipes[name], read_entries(CLASSES)
    assert zoo.captions(name) == [entry.caption for entry in entries]
    assert len(entries) == zoo.EMBEDDED[name].classes
    assert pipe.get_label_ids(["fox", "red fox", "a red fox", "heart"]) == [0, 0, 0, len(entries) - 1]


def drawn_and_judged(pipe, name: str) -> tuple[list[bool], float]:
    """Which of ``DRAWN`` are nearest to their class, and how near they are to a view, in dB."""
    from training import evaluate_dit

    told, asked = zoo.EMBEDDED[name], pipe.get_label_ids(list(DRAWN))
    drawn = evaluate_dit.draw(pipe, asked, steps=12, guidance=told.guidance_scale)
    assert drawn.shape == (len(DRAWN), 64, 64, 3)
    references = known.read_references(zoo.path(name), told.classes, 64)
    found, near = evaluate_dit.judge(known.shrink(drawn), references)
    return (found == asked).tolist(), near.mean()


@pytest.mark.parametrize(("name", "sampler"), sampled(NAMES, ["DDIM", "DPM-Solver++"], of=3))
def test_its_drawings_are_nearest_to_views_of_the_right_class(pipes, name: str, sampler: str):
    from training.evaluate_dit import use_sampler

    use_sampler(pipes[name], sampler)
    right, near = drawn_and_judged(pipes[name], name)
    assert sum(right) >= len(DRAWN) - 1, right
    assert near > FLOOR


def test_the_measure_sees_a_wrong_kind_of_prediction_which_fails_nowhere(pipes):
    from diffusers import DDIMScheduler

    pipe = pipes["emoji-dit-s"]
    was = pipe.scheduler.config
    pipe.scheduler = DDIMScheduler.from_config(was, prediction_type="epsilon")
    try:
        assert drawn_and_judged(pipe, "emoji-dit-s")[1] < FLOOR
    finally:
        pipe.scheduler = DDIMScheduler.from_config(was, prediction_type="v_prediction")


@pytest.mark.parametrize("name", NAMES)
def test_the_card_states_the_measured_figures(name: str):
    told = zoo.EMBEDDED[name]
    record = json.loads((zoo.path(name) / "training.json").read_text(encoding="utf-8"))
    card = (zoo.path(name) / "README.md").read_text(encoding="utf-8")
    measured = record["evaluation"]
    assert (measured["steps"], measured["guidance_scale"]) == (told.steps, told.guidance_scale)
    for sampler in ("DDIM", "DPM-Solver++"):
        row = measured["samplers"][sampler]
        assert row["nearest_picture_accuracy"] >= 0.9
        assert f"| {sampler} | {row['nearest_picture_accuracy']:.3f} | {row['psnr_to_nearest']:.1f} dB |" in card


def test_an_embedded_model_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from ditmesh.errors import InputError
    from ditmesh.generate.model_info import find_model

    monkeypatch.chdir(tmp_path)
    info = find_model("emoji-dit-s")
    assert (info.name, info.files, info.local) == ("emoji-dit-s", zoo.path("emoji-dit-s"), True)
    assert zoo.embedded(info.files) is zoo.EMBEDDED["emoji-dit-s"]
    with pytest.raises(InputError, match="emoji-dit-l"):
        find_model("emoji-dit-xl")
    shutil.copytree(info.files, tmp_path / "emoji-dit-s", ignore=shutil.ignore_patterns("*.safetensors"))
    assert find_model("emoji-dit-s").files == Path("emoji-dit-s")  # a folder of that name goes first
    assert zoo.embedded(Path("emoji-dit-s")) is None


def test_generate_draws_a_class_by_name_with_the_settings_of_the_card(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    from ditmesh.cli.main import main
    from ditmesh.generate.receipt import read_receipt
    from training import evaluate_dit

    name = "emoji-dit-s"
    with pytest.raises(SystemExit) as left:
        main(["generate", "a red fox", "--model", name, "--threads", "1", "--device", "cpu", "--out", str(tmp_path)])
    assert left.value.code == 0, capfd.readouterr().err
    (file,) = tmp_path.iterdir()
    assert read_receipt(file).steps == zoo.EMBEDDED[name].steps
    with Image.open(file) as picture:
        drawn = np.asarray(picture.convert("RGB"))[None]
    references = known.read_references(zoo.path(name), zoo.EMBEDDED[name].classes, 64)
    assert evaluate_dit.judge(known.shrink(drawn), references)[0].tolist() == [0]


# --- their training ----------------------------------------------------------------------------------------


def stirred():
    from training.diffusion import make_transformer

    torch.manual_seed(0)
    model = make_transformer(classes=3, side=4, channels=4, layers=2, heads=2, head_dim=8)
    for parameter in model.parameters():  # fresh models are the identity: stir them
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_the_model_itself_drops_no_labels():
    model = stirred()
    latents, steps, labels = torch.randn(16, 4, 4, 4), torch.full((16,), 20), torch.ones(16, dtype=torch.long)
    with torch.no_grad():
        training = model.train()(latents, timestep=steps, class_labels=labels).sample
        generating = model.eval()(latents, timestep=steps, class_labels=labels).sample
    assert torch.equal(training, generating)


def test_views_are_the_picture_in_two_corners_as_it_is_and_mirrored():
    from ditmesh.zoo.references import views

    picture = np.random.default_rng(0).integers(0, 255, (1, 6, 6, 3), dtype=np.uint8)
    seen = views(picture, 8)[0]
    assert seen.shape == (4, 8, 8, 3)
    for number, (picked, corner) in enumerate([(1, 0), (1, 2), (-1, 0), (-1, 2)]):
        inside = seen[number, corner : corner + 6, corner : corner + 6]
        assert np.array_equal(inside, picture[0, :, ::picked])
        assert (seen[number] == 255).all(axis=-1).sum() == 64 - 36


def test_a_perfect_prediction_draws_the_picture_with_every_sampler():
    """The target of the loss is what the samplers take a prediction for."""
    import diffusers
    from training.diffusion import make_scheduler
    from training.evaluate_dit import SAMPLERS

    generator = torch.Generator().manual_seed(0)
    picture = torch.randn(1, 2, 4, 4, generator=generator)
    plain = make_scheduler()
    for name in SAMPLERS.values():
        scheduler = getattr(diffusers, name).from_config(plain.config)
        scheduler.set_timesteps(10)
        latents = torch.randn(picture.shape, generator=generator)
        for step in scheduler.timesteps:
            keep = plain.alphas_cumprod[step] ** 0.5
            noise = (latents - keep * picture) / (1 - keep**2) ** 0.5
            velocity = plain.get_velocity(picture, noise, step[None])
            latents = scheduler.step(velocity, step, latents).prev_sample
        torch.testing.assert_close(latents, picture, atol=1e-3, rtol=0)
