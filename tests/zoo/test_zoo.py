"""The embedded model as it is shipped, and what its training is made of."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ditmesh
from ditmesh import zoo
from ditmesh.zoo import references as known
from support.embedded import check_captioned_card

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


def test_without_its_distribution_a_model_is_answered_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    from ditmesh.generate.model_info import find_model

    monkeypatch.setattr(zoo, "_folders", list)
    with pytest.raises(ditmesh.InputError, match=r"'emoji-flux' is not installed; pip install 'ditmesh\[zoo\]'"):
        find_model("emoji-flux")


def test_models_of_the_distribution_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its files lie in a package of their own, and code without models beside it finds them there."""
    source = Path(zoo.__file__).parent
    built = tomllib.loads((source / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert sorted(built["only-include"]) == sorted(zoo.EMBEDDED)
    (package,) = built["targets"]["wheel"]["sources"].values()
    (tmp_path / "site" / package).mkdir(parents=True)
    for name in zoo.EMBEDDED:
        (tmp_path / "site" / package / name).mkdir()
        (tmp_path / "site" / package / name / "model_index.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(zoo, "__file__", str(tmp_path / "code" / "__init__.py"))
    assert zoo.path("emoji-wan") == tmp_path / "site" / package / "emoji-wan"
    assert zoo.embedded(zoo.path("emoji-wan")) is zoo.EMBEDDED["emoji-wan"]
    assert zoo.embedded(source / "emoji-wan") is None


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


def test_the_card_states_the_measured_figures():
    card, measured = check_captioned_card("emoji-sd3", "nearest_picture_accuracy")
    assert measured["padded_accuracy"] >= 0.9
    assert f"{measured['padded_accuracy']:.3f}" in card


# --- its training ------------------------------------------------------------------------------------------


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
    nothing = tokenizer("", padding="max_length", truncation=True)["input_ids"]
    assert nothing == [tokenizer.bos_token_id] + [tokenizer.eos_token_id] * (text.MAX_TOKENS - 1)


def test_the_same_captions_make_the_same_tokenizer(tmp_path: Path):
    from training import text

    captions = zoo.captions("emoji-sd3")
    for folder in ("once", "again"):
        text.make_tokenizer(captions, tmp_path / folder)
    assert (tmp_path / "once" / "merges.txt").read_bytes() == (tmp_path / "again" / "merges.txt").read_bytes()


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
