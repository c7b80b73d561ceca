"""A saved modular pipeline, in programs, commands and a server: as diffusers draws with it on one device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import ClassifierFreeGuidance
from PIL import Image

import ditmesh
from ditmesh.engine.auto import guided
from ditmesh.generate.model_info import find_model, parameters_of
from ditmesh.generate.modular import INDEX, call_parameters, guided_by
from ditmesh.generate.receipt import read_receipt
from ditmesh.layout.probe import meta_model
from ditmesh.serve.offers import ModelSpec
from ditmesh.strategies.tensor.slices import plan_slices, share_cut
from ditmesh.train.run import train
from support import exam
from support.batching import Owner, at_once, picture, pixels, task
from support.commands import run
from support.exam import EXAMS
from support.parity import largest_error, tensors
from support.tiny import save_tiny_sd3
from support.train import configured, folder_of

CALL = {"prompt": "a red fox", "height": 32, "width": 32, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """As its `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("modular")
    pipe = diffusers.ModularPipeline.from_pretrained(str(save_tiny_sd3(folder)))
    pipe.load_components()
    pipe.save_pretrained(str(folder / "saved"), overwrite_modular_index=True)
    return folder / "saved"


def drawn(pipe: Any) -> np.ndarray:
    return pixels(pipe(**CALL, generator=torch.Generator().manual_seed(0), output="images")[0])


@pytest.fixture(scope="module")
def truth(saved) -> np.ndarray:
    pipe = diffusers.ModularPipeline.from_pretrained(str(saved))
    pipe.load_components()
    return drawn(pipe)


def loaded(folder: Path, config: dict[str, Any]) -> tuple[np.ndarray, float]:
    """What a loaded pipeline draws, and the share of its transformer that this rank held."""
    other = ditmesh.load(folder, config, guider=ClassifierFreeGuidance(guidance_scale=1.5), text_encoder_3=None)
    assert other.guider.guidance_scale == 1.5
    assert other.text_encoder_3 is None
    pipe = ditmesh.load(folder, config)
    found = drawn(pipe)
    held = sum(parameter.numel() for parameter in pipe.transformer.parameters())
    ditmesh.restore(pipe)
    return found, held / sum(parameter.numel() for parameter in pipe.transformer.parameters())


@pytest.mark.parametrize("config", [{"tensor": 2}, {"cfg": 2}], ids=str)
def test_loaded(ranks, saved, truth, config):
    for found, held in ranks(2).run(loaded, saved, config):
        assert abs(found - truth).max() <= 1
        assert held < 0.6 if "tensor" in config else held == 1


def h3(folder: Path) -> tuple[float, float]:
    """MiniMax-H3 with its denoising blocks alone, read in slices: the error, and the share of modulation on a rank."""
    case = EXAMS["MiniMaxH3ModularPipeline"]
    whole = case.make()
    truth = tensors(exam.draw(whole, case.call([1])))
    pipe = ditmesh.load(folder, {"tensor": 2}, dtype=torch.float32)
    for block in set(pipe._blocks.sub_blocks) - {"denoise"}:
        pipe._blocks.sub_blocks.pop(block)
    error = largest_error(tensors(exam.draw(pipe, case.call([1]))), truth)
    held, all_of_it = (p.transformer.transformer_blocks[0].adaln_proj.linear.weight.numel() for p in (pipe, whole))
    return error, held / all_of_it


def test_minimax_h3_is_read_in_slices(ranks, tmp_path):
    pipe = EXAMS["MiniMaxH3ModularPipeline"].make()
    pipe.save_pretrained(str(tmp_path), overwrite_modular_index=True)
    for error, held in ranks(2).run(h3, tmp_path):
        assert error < 1e-5
        assert held == 0.5


CARDS = (Path(__file__).parents[2] / "docs" / "cards.md").read_text(encoding="utf-8")


def test_minimax_h3_at_its_true_width():
    """33.1 billion parameters, of which tensor ranks hold equal shares."""
    model = meta_model("MiniMaxH3Transformer3DModel", {})
    total = 2 * sum(parameter.numel() for parameter in model.parameters()) / 1e9
    shares = {degree: share_cut(model, plan_slices(model, degree)) for degree in (2, 4, 7, 8)}
    two, four, seven, eight = (total * (1 - share + share / degree) for degree, share in shares.items())
    figures = f"{total:.1f} GB on 1 rank, {two:.1f} on 2, {four:.1f} on 4, {seven:.1f} on 7 and {eight:.1f} on 8"
    assert figures in CARDS


def test_generated_and_drawn_again(saved, truth, kept_ranks, capsys, tmp_path):
    words = ["generate", CALL["prompt"], "--model", str(saved), "--devices", "2", "--ulysses", "2", "--steps", "2"]
    assert not run(*words, "--size", "32x32", "--threads", "1", "--out", str(tmp_path))
    (file,) = tmp_path.glob("*.png")
    assert abs(pixels(Image.open(file)) - truth).max() <= 1
    # The guider's own.
    assert read_receipt(file).guidance == 7.0
    assert not run("replay", str(file), "--model", str(saved), "--threads", "1", "--out", str(tmp_path / "again"))
    assert "the same pixels" in capsys.readouterr().out


def test_served(ranks, saved, truth):
    start = task("0", CALL["prompt"], "modular", steps=2, width=32, height=32, guidance=None)
    said = Owner(at_once(start), 1).serve(
        ranks(2), [ModelSpec("modular", str(saved), config=ditmesh.ParallelConfig(ulysses=2))]
    )
    assert abs(picture(said, "0") - truth).max() <= 1


def test_a_guider_has_the_guidance_of_a_call(saved):
    pipe = diffusers.ModularPipeline.from_pretrained(str(saved))
    given = {"prompt": "a red fox", "guidance_scale": 1.5}
    with guided_by(pipe, given):
        assert pipe.guider.guidance_scale == 1.5
        assert given == {"prompt": "a red fox"}
    assert pipe.guider.guidance_scale == 7.0
    assert call_parameters(pipe)["guidance_scale"].default == 7.0
    pipe.guider = SimpleNamespace()
    assert "guidance_scale" not in call_parameters(pipe)
    refusal = pytest.raises(ditmesh.InputError, match=r"guidance 1\.5: .* no guider with a guidance_scale, but SimpleN")
    with refusal, guided_by(pipe, {"guidance_scale": 1.5}):
        pass


@pytest.mark.matrix
def test_trained_as_in_the_other_form(saved, tmp_path):
    """To the same bits; what is written is a modular pipeline again, which diffusers reads."""
    data, weights = folder_of(tmp_path / "data", 2, 32), set()
    asked = {"train_data_dir": str(data), "resolution": 32, "max_train_steps": 2, "learning_rate": 1e-2}
    for model in (saved.parent / "tiny-sd3", saved):
        places = {"pretrained_model_name_or_path": str(model), "output_dir": str(tmp_path / model.name)}
        made = train(configured({**asked, **places, "train_batch_size": 2, "reproducible": True}))
        weights.add(made["weights"])
    assert len(weights) == 1
    before, after = (diffusers.ModularPipeline.from_pretrained(str(folder)) for folder in (saved, made["pipeline"]))
    for pipe in (before, after):
        pipe.load_components()
    assert abs(drawn(after) - drawn(before)).max() > 1


def test_inputs_are_those_of_the_blocks():
    assert {"prompt", "height", "generator", "output_type"} <= parameters_of("StableDiffusion3ModularPipeline").keys()
    assert parameters_of("FluxModularPipeline")["num_inference_steps"].default == 50


@pytest.mark.parametrize(("name", "has_branches"), [("QwenImage", True), ("QwenImage21", False), ("Flux2Klein", False)])
def test_auto_shares_the_branches_of_a_guider(name, has_branches):
    """Of QwenImage 21's guider the scale is 1, FLUX.2 Klein has no guider."""
    assert guided(getattr(diffusers, f"{name}ModularPipeline"), {}) == has_branches


def refused(folder: Path) -> str:
    with pytest.raises(ditmesh.InputError) as refusal:
        ditmesh.load(folder, {})
    return str(refusal.value)


def test_what_is_not_there_is_said(saved, tmp_path, capsys):
    """A component in another place, a weight that is missing, an option that the blocks do not take."""
    away, damaged = tmp_path / "away", tmp_path / "damaged"
    for folder in (away, damaged):
        shutil.copytree(saved, folder)
    index = json.loads((away / INDEX).read_text())
    index["transformer"][2]["pretrained_model_name_or_path"] = "owner/other"
    (away / INDEX).write_text(json.dumps(index))
    shutil.rmtree(away / "transformer")
    assert "has no transformer of its own, but that of 'owner/other'; in a program, load" in refused(away)
    (weights,) = (damaged / "text_encoder").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot be loaded by diffusers" in refused(damaged)
    assert find_model(saved).modular
    assert run("generate", "a fox", "--model", str(saved), "--frames", "9", "--out", str(tmp_path / "out"))
    assert "StableDiffusion3ModularPipeline generates images; leave --frames out" in capsys.readouterr().err
