"""Edit pairs and fills as whole runs: on any ranks the same losses, each picture with its own other picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from PIL import Image, ImageOps

from ditmesh.errors import ConfigError
from ditmesh.train.data.references import source_image
from ditmesh.train.observed.family import ObservedFamily
from ditmesh.train.run import train
from ditmesh.train.trainer import Trainer
from support.observed import EXAMS
from support.train import configured, emoji, settings

KINDS = {"FluxKontextPipeline": "reference", "FluxFillPipeline": "hole"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Pictures after in ``after``, with instructions, and before in ``before``: larger, and of another shape."""
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("after", "before"):
        (folder / name).mkdir()
    for number, (caption, picture) in enumerate(emoji(4)):
        before = Image.fromarray(picture)
        before.resize((96, 80)).save(folder / "before" / f"{number}.png")
        ImageOps.mirror(before).resize((32, 32)).save(folder / "after" / f"{number}.png")
        (folder / "after" / f"{number}.txt").write_text(f"mirror {caption}")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    found = {}
    for name in KINDS:
        folder = tmp_path_factory.mktemp(name)
        EXAMS[name].make().save_pretrained(folder)
        found[name] = str(folder)
    return found


def run_of(model: str, pairs: Path, out: Path, **more: Any) -> dict[str, Any]:
    given = {"pretrained_model_name_or_path": model, "resolution": 32, "max_sequence_length": 12, "lora": {"rank": 4}}
    given |= {"train_batch_size": 1, "global_batch_size": 2, "max_train_steps": 2, "learning_rate": 1e-2}
    return settings(pairs / "after", out, **{**given, **more})


def test_a_pair_is_what_the_pipeline_is_given(models, pairs, tmp_path):
    """The condition of a sample is that of the pipeline's call with the picture before, cut to the size after."""
    name = "FluxKontextPipeline"
    given = run_of(models[name], pairs, tmp_path, conditioning_dir=str(pairs / "before"))
    pipe: Any = DiffusionPipeline.from_pretrained(models[name])
    pipe.set_progress_bar_config(disable=True)
    with Trainer(configured(given), pipe, timeout=100.0) as trainer:
        assert isinstance(trainer.family, ObservedFamily)
        assert trainer.family.reference == "image"
        micro = trainer.data.order.step(0)[0]
        batch = trainer.data.batch(micro)
        number = micro.samples[0].index
        before = Image.open(pairs / "before" / f"{number}.png").convert("RGB")
        shown = before.resize((38, 32)).crop((3, 0, 35, 32))
        pixels = pipe.image_processor.preprocess(shown, 32, 32)
        with torch.no_grad():
            latents = pipe._encode_vae_image(pixels, torch.Generator().manual_seed(0))
        tokens = pipe._pack_latents(latents, 1, *latents.shape[1:])
        held = batch.conditions["hidden_states"].flatten(0, 1)
        assert held.shape[1] == 2 * tokens.shape[1]
        off = (held[:, tokens.shape[1] :] - tokens).abs().max() / tokens.abs().max()
        other = (held[:, : tokens.shape[1]] - tokens).abs().max() / tokens.abs().max()
        assert float(off) < 1e-4 < float(other)


def test_a_hole_is_the_samples_mask(models, pairs, tmp_path):
    """The picture that a fill is given has nothing where the mask is white, and so has its mirror image."""
    values = torch.full((3, 32, 32), 0.5)
    mask = Image.new("L", (32, 32), 0)
    mask.paste(255, (0, 8, 16, 24))
    found = source_image("hole", values, 0, mask)
    assert np.array_equal(np.asarray(found.getchannel("A")) == 0, np.asarray(mask) == 255)
    masks = tmp_path / "masks"
    masks.mkdir()
    for number in range(4):
        mask.save(masks / f"{number}.png")
    given = run_of(models["FluxFillPipeline"], pairs, tmp_path / "out", mask_dir=str(masks), random_flip=True)
    pipe = DiffusionPipeline.from_pretrained(models["FluxFillPipeline"])
    pipe.set_progress_bar_config(disable=True)
    with Trainer(configured(given), pipe, timeout=100.0) as trainer:
        encoder = trainer.data.encoded._encoder
        for flip in (False, True):
            shown = encoder.reference(0, flip, 0)
            assert shown is not None
            wanted = np.asarray(ImageOps.mirror(mask) if flip else mask) == 255
            assert np.array_equal(np.asarray(shown.getchannel("A")) == 0, wanted)


def test_a_prompt_alone_is_no_validation(models, pairs, tmp_path):
    given = run_of(models["FluxFillPipeline"], pairs, tmp_path, validation_prompts=["a fox"])
    with pytest.raises(ConfigError, match="validation_prompts: FluxFillPipeline draws from an image"):
        train(configured(given))
    assert not list(tmp_path.glob("checkpoint-*"))
