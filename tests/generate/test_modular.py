"""A saved modular pipeline, in programs, commands and a server: as diffusers draws with it on one device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import ClassifierFreeGuidance
from PIL import Image

import ditmesh
from ditmesh.cli.main import main
from ditmesh.generate.model_info import find_model, parameters_of
from ditmesh.generate.modular import INDEX
from ditmesh.serve.offers import ModelSpec
from support.batching import Owner, at_once, picture, pixels, task
from support.tiny import save_tiny_sd3

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


def test_generated_and_drawn_again(saved, truth, kept_ranks, capsys, tmp_path):
    words = ["generate", CALL["prompt"], "--model", str(saved), "--devices", "2", "--ulysses", "2", "--steps", "2"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--size", "32x32", "--threads", "1", "--out", str(tmp_path)])
    assert not ended.value.code
    (file,) = tmp_path.glob("*.png")
    assert abs(pixels(Image.open(file)) - truth).max() <= 1
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(file), "--model", str(saved), "--threads", "1", "--out", str(tmp_path / "again")])
    assert not ended.value.code
    assert "the same pixels" in capsys.readouterr().out


def test_served(ranks, saved, truth):
    start = task("0", CALL["prompt"], "modular", steps=2, width=32, height=32, guidance=None)
    said = Owner(at_once(start), 1).serve(
        ranks(2), [ModelSpec("modular", str(saved), config=ditmesh.ParallelConfig(ulysses=2))]
    )
    assert abs(picture(said, "0") - truth).max() <= 1


def test_inputs_are_those_of_the_blocks():
    assert {"prompt", "height", "generator", "output_type"} <= parameters_of("StableDiffusion3ModularPipeline").keys()
    assert parameters_of("FluxModularPipeline")["num_inference_steps"].default == 50


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
    with pytest.raises(SystemExit) as ended:
        main(["generate", "a fox", "--model", str(saved), "--guidance", "3", "--out", str(tmp_path / "out")])
    assert ended.value.code
    assert "StableDiffusion3ModularPipeline takes no guidance_scale" in capsys.readouterr().err
