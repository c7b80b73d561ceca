"""The embedded model as it is shipped, and the script that trained it."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ditmesh import zoo
from ditmesh.zoo import references as known

DRAWN = (
    "a red fox",
    "a cactus",
    "a red apple",
    "a soccer ball",
    "a rainbow",
    "a red heart",
    "a penguin",
    "a house",
)


def test_importing_the_zoo_is_cheap():
    code = "import sys, ditmesh.zoo; print({'torch', 'diffusers', 'transformers'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_an_unknown_name_is_answered_with_the_names():
    with pytest.raises(ValueError, match="emoji-sd3"):
        zoo.path("emoji-sd4")


# --- the shipped model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Path:
    return zoo.path("emoji-sd3")


@pytest.fixture(scope="module")
def pipe(model: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_OFFLINE", "1")
        from diffusers import DiffusionPipeline

        pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_weights_are_small(model: Path):
    assert sum(file.stat().st_size for file in model.rglob("*.safetensors")) <= 40e6
    assert (model / "README.md").exists()
    assert "Microsoft" in (model / "LICENSE-DATA").read_text(encoding="utf-8")


def test_there_are_at_least_200_captions(model: Path):
    captions = zoo.captions()
    assert len(set(captions)) == len(captions) >= 200
    assert {"a red fox", "a cactus"} <= set(captions)


def test_captions_are_those_of_the_training_table(model: Path):
    from training.data import read_entries

    entries = read_entries()
    assert [entry.caption for entry in entries] == zoo.captions()


def test_it_loads_in_float32_with_256_image_tokens_and_8_heads(pipe):
    from diffusers import StableDiffusion3Pipeline

    assert type(pipe) is StableDiffusion3Pipeline
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        assert {p.dtype for p in getattr(pipe, name).parameters()} == {torch.float32}, name
    config = pipe.transformer.config
    assert (config.sample_size // config.patch_size) ** 2 == zoo.EMBEDDED["emoji-sd3"].image_tokens >= 256
    assert config.num_attention_heads == 8
    assert config.attention_head_dim % 8 == 0
    assert pipe.tokenizer.model_max_length == 16


def test_its_third_text_encoder_says_what_an_absent_one_would(pipe):
    with torch.no_grad():
        theirs = pipe._get_t5_prompt_embeds(["a red fox"], max_sequence_length=20)
    assert theirs.shape == (1, 20, pipe.transformer.config.joint_attention_dim)
    assert not theirs.any()


def test_its_drawings_are_nearest_to_the_right_training_pictures(pipe, model: Path):
    from training import evaluate

    names = zoo.captions()
    references = known.read_sheet(model / "thumbnails.png", len(names))
    drawn = evaluate.draw(pipe, list(DRAWN), steps=8, max_sequence_length=16)
    assert drawn.shape == (len(DRAWN), 64, 64, 3)
    found = [names[i] for i in known.nearest(known.shrink(drawn), references)]
    assert sum(a == b for a, b in zip(found, DRAWN, strict=True)) >= len(DRAWN) - 1, found


def test_the_card_states_the_measured_figures(model: Path):
    record = json.loads((model / "training.json").read_text(encoding="utf-8"))
    measured = record["evaluation"]
    assert measured["captions"] == len(zoo.captions())
    assert measured["nearest_picture_accuracy"] >= 0.9
    assert measured["steps"] == zoo.EMBEDDED["emoji-sd3"].steps
    assert measured["guidance_scale"] == zoo.EMBEDDED["emoji-sd3"].guidance_scale
    card = (model / "README.md").read_text(encoding="utf-8")
    assert f"{measured['nearest_picture_accuracy']:.3f}" in card
    assert f"{record['autoencoder']['psnr']:.1f} dB" in card


# --- the training script -----------------------------------------------------------------------------------


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


def test_a_missing_picture_is_named(archive: Path):
    from training.data import Entry, build

    with pytest.raises(ValueError, match="1f40d"):
        build(archive, 16, (Entry("1f40d", ("a snake",)),))


@pytest.mark.parametrize("line", ["1f98a", "1f98a | ", "1f98a | a fox\n1f335 | a fox"])
def test_a_bad_caption_table_is_refused(tmp_path: Path, line: str):
    from training.data import read_entries

    table = tmp_path / "captions.txt"
    table.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=r"captions\.txt:\d"):
        read_entries(table)


def test_without_npm_the_fetch_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from training.data import fetch

    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="npm was not found"):
        fetch(tmp_path)


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
    rows = text.tokenize(tokenizer, ["", "a red fox"])
    assert rows.shape == (2, text.MAX_TOKENS)
    assert rows[0, 0] == tokenizer.bos_token_id
    assert set(rows[0, 1:].tolist()) == {tokenizer.eos_token_id}


def tiny_transformer():
    from training.transformer import make_transformer

    torch.manual_seed(0)
    model = make_transformer(side=4, channels=4, layers=2, heads=2, head_dim=8, joint_width=16, pooled_width=16)
    for parameter in model.parameters():  # fresh models are the identity: stir them
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.mark.parametrize("zeros", [1, 16, 256])
def test_one_raised_zero_token_stands_for_many(zeros: int):
    from training.transformer import predict

    model = tiny_transformer()
    latents, levels = torch.randn(2, 4, 4, 4), torch.tensor([0.2, 0.9])
    prompt, pooled = torch.randn(2, 5, 16), torch.randn(2, 16)
    with torch.no_grad():
        whole = model(
            latents,
            timestep=levels * 1000,
            encoder_hidden_states=torch.cat([prompt, torch.zeros(2, zeros, 16)], dim=1),
            pooled_projections=pooled,
        ).sample
        ours = predict(model, latents, levels, prompt, pooled, zero_tokens=zeros)
    torch.testing.assert_close(ours.transpose(1, 2).reshape(whole.shape), whole, atol=2e-6, rtol=1e-5)


def test_the_prompt_is_encoded_as_the_pipeline_encodes_it(pipe):
    from training import text

    prompts = ["a red fox", ""]
    with torch.no_grad():
        theirs, _, theirs_pooled, _ = pipe.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=7
        )
        ours, pooled = text.encode(
            (pipe.text_encoder, pipe.text_encoder_2),
            text.tokenize(pipe.tokenizer, prompts),
            pipe.transformer.config.joint_attention_dim,
        )
    assert torch.equal(theirs[:, : text.MAX_TOKENS], ours)
    assert not theirs[:, text.MAX_TOKENS :].any()
    assert torch.equal(theirs_pooled, pooled)


def test_the_learning_rate_rises_stays_and_falls_to_zero():
    from training.loop import Plan

    plan = Plan(steps=100, batch=1, rate=2.0, warmup=10, cooldown=0.5)
    assert [plan.rate_at(step) for step in (0, 9, 30, 50, 75)] == [0.2, 2.0, 2.0, 2.0, 1.0]
    assert plan.rate_at(100) == 0.0


def test_nearest_and_psnr():
    from training.autoencoder import psnr

    from ditmesh.zoo.references import nearest

    pictures = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    assert nearest(pictures[::-1], pictures).tolist() == [4, 3, 2, 1, 0]
    assert math.isclose(psnr(np.zeros((1, 2, 2, 3), np.uint8), np.full((1, 2, 2, 3), 255, np.uint8))[0], 0.0)


def tiny_recipe():
    from training.loop import Plan
    from training.train import Recipe

    plan = Plan(steps=6, batch=2, rate=1e-3, warmup=2)
    return Recipe(
        size=16, widths=(8, 8), latent_channels=4, layers=2, heads=2, head_dim=8, text_width=16,
        autoencoder=replace(plan, steps=4), decoder=replace(plan, steps=2), transformer=plan,
        part=16, part_share=0.5, whole_batch=2,
    )  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / "transformer.pt", weights_only=True)
    out = {f"{m}.{k}": v for m, inner in state["modules"].items() for k, v in inner.items()}
    return out | {f"average.{i}": v for i, v in enumerate(state["average"]["shadow_params"])}


def test_training_resumes_bit_equal_and_exports_a_pipeline(archive: Path, tmp_path: Path):
    from diffusers import DiffusionPipeline
    from training.data import build

    from training import evaluate, train

    recipe, pictures = tiny_recipe(), build(archive, 16, entries())
    record = train.run(tmp_path / "a", tmp_path / "wa", recipe, pictures=pictures, check=False)
    assert record["transformer"]["finished"]

    folder = tmp_path / "wb"
    for stop in (1, 4, None):  # stopped in the part-token phase and again in the whole-token phase
        parts = train.make_parts(recipe, pictures, folder / "tokenizer")
        train.train_autoencoder(recipe, parts.vae, pictures, folder, stop_at=2 if stop == 1 else None)
        if stop == 1:
            continue
        train.train_decoder(recipe, parts.vae, pictures, folder)
        outcome = train.train_transformer(recipe, parts, pictures, folder, stop_at=stop)
        assert outcome.finished == (stop is None)
    once, twice = weights(tmp_path / "wa"), weights(folder)
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[key], twice[key]) for key in once)

    figures = evaluate.evaluate(tmp_path / "a", steps=2, guidance=1.0)
    assert figures["captions"] == 2
    assert (tmp_path / "a" / "samples.png").exists()
    assert DiffusionPipeline.from_pretrained(tmp_path / "a").transformer.dtype == torch.float32


def test_a_decoder_that_is_trained_alone_leaves_the_latents_as_they_are(archive: Path, tmp_path: Path):
    from training.data import build
    from training.loop import Plan

    from training import autoencoder as ae

    torch.manual_seed(0)
    pictures, model = build(archive, 16, entries()), ae.make_autoencoder((8, 8), 4, 16)
    latents, restored = ae.encode(model, pictures.chosen), ae.decode(model, ae.encode(model, pictures.chosen))
    plan = Plan(steps=30, batch=4, rate=3e-3, warmup=2, average=0.5)
    ae.train_decoder(model, plan, pictures.chosen, pictures.wider, tmp_path / "decoder.pt")
    assert torch.equal(ae.encode(model, pictures.chosen), latents)
    before, after = (ae.psnr(some, pictures.chosen).mean() for some in (restored, ae.decode(model, latents)))
    assert after > before + 3


def test_a_run_out_of_time_can_go_on(archive: Path, tmp_path: Path):
    from training.data import build

    from training import train

    pictures = build(archive, 16, entries())
    record = train.run(tmp_path / "a", tmp_path / "w", tiny_recipe(), pictures=pictures, minutes=0, check=False)
    assert not record["autoencoder"]["finished"]
    record = train.run(tmp_path / "a", tmp_path / "w", tiny_recipe(), pictures=pictures, check=False)
    assert record["transformer"]["finished"]
