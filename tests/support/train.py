"""Small data sets and runs for tests of training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from ditmesh.generate.model_info import find_model
from ditmesh.lab.study.references import read_sheet
from ditmesh.train import TrainConfig, config
from ditmesh.train.trainer import Trainer
from support.models import component
from support.tiny import letters_tokenizer

ZOO = Path(__import__("ditmesh").__file__).parent / "zoo"


def importing_tests() -> dict[str, str]:
    """An environment in which a program finds the modules of the tests, and ditmesh where this process has it from."""
    tests = Path(__file__).parents[1]
    rooms = sorted({str(file.parent) for file in tests.glob("*/test_*.py")})
    paths = [str(tests), *rooms, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def emoji(count: int) -> list[tuple[str, np.ndarray]]:
    """Captions and pictures (32, 32, 3) of real emoji."""
    model = ZOO / "emoji-sd3"
    entries = json.loads((model / "captions.json").read_text(encoding="utf-8"))[:count]
    return [
        (entry["caption"], picture)
        for entry, picture in zip(entries, read_sheet(model / "thumbnails.png", count), strict=True)
    ]


def made(make: Callable[[Path], Path]) -> Any:
    """A fixture of a module: what a function makes in a folder of its own."""
    return pytest.fixture(scope="module")(lambda tmp_path_factory: make(tmp_path_factory.mktemp("made")))


def folder_of(path: Path, count: int, side: int = 64) -> Path:
    """A data folder with ``metadata.jsonl``: captions under ``text``, numbers under ``label``."""
    path.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (caption, picture) in enumerate(emoji(count)):
        Image.fromarray(picture).resize((side, side)).save(path / f"{number:03}.png")
        lines.append(json.dumps({"file_name": f"{number:03}.png", "text": caption, "label": number}))
    (path / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run by their names, which are unique, in the groups of a run file; and ``reproducible``."""
    flat = {**flat}
    if "reproducible" in flat:
        flat["parallel"] = {**flat.get("parallel", {}), "reproducible": flat.pop("reproducible")}
    return config.grouped(flat)


def configured(flat: Mapping[str, Any] | TrainConfig) -> TrainConfig:
    """The run of settings by their names, without groups; a run is left as it is."""
    return flat if isinstance(flat, TrainConfig) else TrainConfig.read(grouped(flat))


def settings(data: Path, out: Path, **more: Any) -> dict[str, Any]:
    """A short run of the embedded text-to-image model; names of settings are unique, and stand here without groups."""
    return {
        "pretrained_model_name_or_path": "emoji-sd3",
        "train_data_dir": str(data),
        "output_dir": str(out),
        "resolution": 64,
        "max_sequence_length": 16,
        "train_batch_size": 2,
        "max_train_steps": 4,
        **more,
    }


def data_and_model(folder: Path, count: int) -> Path:
    """A data folder, beside which a tiny Flux lies that `tiny_settings` trains."""
    save_pipeline("flux", folder)
    return folder_of(folder / "data", count)


def tiny_settings(data: Path, out: Path, **more: Any) -> dict[str, Any]:
    """`settings` of the pipeline of `data_and_model`: a run costs a quarter of what the embedded one's does."""
    given = {"pretrained_model_name_or_path": str(data.with_name("flux")), "resolution": 32}
    return settings(data, out, **{**given, **more})


def loaded(name: Any) -> Any:
    """A pipeline of a folder, or an embedded one, as diffusers has it."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(find_model(str(name)).files)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def trainer_of(given: Mapping[str, Any], kind: Any = Trainer, timeout: float = 100.0, **more: Any) -> Any:
    """The trainer of a run."""
    config = configured(given)
    return kind(config, loaded(config.pretrained_model_name_or_path), timeout=timeout, **more)


def losses_of(given: dict[str, Any], until: int | None = None) -> dict[int, float]:
    """Losses of a run, by step."""
    with trainer_of(given) as trainer:
        return trainer.run(until=until).losses


def weights_after(given: dict[str, Any]) -> tuple[list[str], str]:
    """Losses of every step, in hexadecimal, and the digest of the weights after a run; ``until``: a step to stop at."""
    with trainer_of({name: value for name, value in given.items() if name != "until"}) as trainer:
        outcome = trainer.run(until=given.get("until"))
        return [loss.hex() for loss in outcome.losses.values()], trainer.state.weights_digest()


# --- tiny pipelines of the families that are trained ------------------------------------------------------------


def save_pipeline(name: str, folder: Path) -> Path:
    """Write a whole pipeline with random weights, ``flux``, ``pixart`` or ``dit``; its latents have half the pixels.

    What starts as zeros in a fresh transformer is noise, so that every part of it shows in the output.
    """
    torch.manual_seed(0)
    made = {"flux": _flux, "pixart": _pixart, "dit": _dit}[name](letters_tokenizer(folder / "words"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.transformer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    made.save_pretrained(folder / name)
    return folder / name


def _vae(scaling: float, shift: float | None) -> Any:
    """Its deviation is next to nothing: a sample of its latents is their mean."""
    vae = component("kl saved", scaling_factor=scaling, shift_factor=shift)
    out = vae.encoder.conv_out
    with torch.no_grad():
        out.weight[4:] = 0.0
        out.bias[4:] = -30.0
    return vae


def _flux(words: Any) -> Any:
    return diffusers.FluxPipeline(
        # As FLUX.1-dev has it: the shift depends on the picture's size when it is sampled.
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_vae(0.36, 0.12),
        text_encoder=component("clip saved plain"),
        tokenizer=words,
        text_encoder_2=component("t5 saved"),
        tokenizer_2=words,
        transformer=component("Flux saved"),
    )


def _pixart(words: Any) -> Any:
    return diffusers.PixArtAlphaPipeline(
        tokenizer=words,
        text_encoder=component("t5 saved"),
        vae=_vae(0.18, None),
        # At this sample size it is the one with additional conditions.
        transformer=component("PixArt saved"),
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02),
    )


def _dit(_: Any) -> Any:
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return diffusers.DiTPipeline(transformer=component("DiT saved"), vae=_vae(0.18, None), scheduler=scheduler)
