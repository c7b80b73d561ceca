"""How transformers of each family are called in training: as diffusers' own training scripts call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from PIL import Image

import ditmesh
from ditmesh.train.run import train
from ditmesh.train.trainer import Trainer
from support.sample import sampled
from support.train import configured, emoji, save_pipeline, settings

FAMILIES = ("flux", "pixart", "dit")
# A DiT makes squares.
SIZES = {"flux": (32, 48), "pixart": (32, 48), "dit": (32, 32)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """By family: the pipeline, and pictures of its size."""
    root = tmp_path_factory.mktemp("families")
    found = {}
    for name in FAMILIES:
        data, (height, width) = root / f"{name}-data", SIZES[name]
        data.mkdir()
        lines = []
        for number, (caption, picture) in enumerate(emoji(4)):
            Image.fromarray(picture).resize((width, height)).save(data / f"{number}.png")
            lines.append(json.dumps({"file_name": f"{number}.png", "text": caption, "label": number}))
        (data / "metadata.jsonl").write_text("\n".join(lines))
        found[name] = (save_pipeline(name, root), data)
    return found


def run_of(name: str, folders: dict[str, tuple[Path, Path]], out: Path, **more: Any) -> dict[str, Any]:
    pipe, data = folders[name]
    height, width = SIZES[name]
    given = settings(data, out, pretrained_model_name_or_path=str(pipe), resolution=32, **more)
    return given | {"aspect_ratio_buckets": f"{height},{width}", "max_sequence_length": 24}


# --- the reference: what the scripts in diffusers' examples compute ------------------------------------------------


def latents_of(pipe: Any, files: list[Path]) -> torch.Tensor:
    pictures = np.stack([np.asarray(Image.open(file)) for file in files])
    values = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255 * 2 - 1
    latents = pipe.vae.encode(values).latent_dist.sample()
    if pipe.vae.config.shift_factor is not None:
        latents = latents - pipe.vae.config.shift_factor
    return latents * pipe.vae.config.scaling_factor


def flux(pipe: Any, latents: Any, noise: Any, timesteps: Any, said: list[Any]) -> tuple[Any, Any, Any]:
    """examples/dreambooth/train_dreambooth_flux.py: prediction, target, weighting."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)
    steps = [int((scheduler.timesteps == t).nonzero().item()) for t in timesteps]
    sigmas = scheduler.sigmas[steps].flatten()[:, None, None, None]
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    text, pooled, text_ids = pipe.encode_prompt(said, None, max_sequence_length=24)
    batch, _, height, width = noisy.shape
    rows, columns = height // 2, width // 2
    # Each token is a square of 2 x 2: channel, row and column within the square.
    packed = torch.stack(
        [
            noisy[:, :, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].reshape(batch, -1)
            for r in range(rows)
            for c in range(columns)
        ],
        dim=1,
    )
    image_ids = torch.tensor([(0.0, r, c) for r in range(rows) for c in range(columns)])
    prediction = pipe.transformer(
        hidden_states=packed,
        timestep=timesteps / 1000,
        guidance=torch.tensor([1.0]).expand(batch),
        pooled_projections=pooled,
        encoder_hidden_states=text,
        txt_ids=text_ids,
        img_ids=image_ids,
        return_dict=False,
    )[0]
    scale = pipe.vae_scale_factor
    prediction = pipe._unpack_latents(prediction, height * scale, width * scale, scale)
    return prediction, noise - latents, compute_loss_weighting_for_sd3("logit_normal", sigmas)


def of_ddpm(pipe: Any, latents: Any, noise: Any, timesteps: Any) -> Any:
    """The scripts load DDPM's scheduler whatever the pipeline samples with."""
    scheduler = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
    level = scheduler.alphas_cumprod[timesteps][:, None, None, None]
    return level.sqrt() * latents + (1 - level).sqrt() * noise


def pixart(pipe: Any, latents: Any, noise: Any, timesteps: Any, said: list[Any]) -> tuple[Any, Any, Any]:
    """The scripts of examples/research_projects/pixart."""
    batch, _, height, width = latents.shape
    text, mask, _, _ = pipe.encode_prompt(said, do_classifier_free_guidance=False, max_sequence_length=24)
    assert not mask.all()
    size = torch.tensor([height * 2.0, width * 2.0])  # of the picture
    added = {"resolution": size.repeat(batch, 1), "aspect_ratio": torch.tensor([height / width]).repeat(batch, 1)}
    prediction = pipe.transformer(
        of_ddpm(pipe, latents, noise, timesteps),
        encoder_hidden_states=text,
        encoder_attention_mask=mask,
        timestep=timesteps,
        added_cond_kwargs=added,
    ).sample
    return prediction.chunk(2, dim=1)[0], noise, torch.ones(batch, 1, 1, 1)


def dit(pipe: Any, latents: Any, noise: Any, timesteps: Any, said: list[Any]) -> tuple[Any, Any, Any]:
    """No script of diffusers trains it; as its pipeline calls it, whose class 1000 stands for none."""
    pipe.transformer.eval()  # or it would drop labels itself
    labels = torch.tensor([1000 if one is None else one for one in said])
    prediction = pipe.transformer(of_ddpm(pipe, latents, noise, timesteps), timestep=timesteps, class_labels=labels)
    return prediction.sample.chunk(2, dim=1)[0], noise, torch.ones(len(said), 1, 1, 1)


REFERENCES = {"flux": flux, "pixart": pixart, "dit": dit}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("empty", [0.0, 1.0], ids=["conditioned", "unconditioned"])
def test_prediction_and_loss_are_those_of_the_scripts(folders, tmp_path, name, empty):
    given = configured(run_of(name, folders, tmp_path, train_batch_size=4, proportion_empty_prompts=empty))
    pipe = diffusers.DiffusionPipeline.from_pretrained(folders[name][0])
    with Trainer(given, pipe) as trainer, torch.no_grad():
        micro = trainer.data.order.step(0)[0]
        samples = [trainer.data.samples[drawn.index] for drawn in micro.samples]
        batch = trainer.data.encoded.batch(micro)
        noised = trainer.objective(batch.latents, batch.generators)
        predicted = trainer.family.predict(
            pipe, trainer.parallel.sync.transformer, noised.latents, noised.timesteps, batch.conditions
        )
        losses = trainer._losses(micro)
    fresh = diffusers.DiffusionPipeline.from_pretrained(folders[name][0])
    said: list[Any] = [("" if name != "dit" else None) if empty else sample.words for sample in samples]
    with torch.no_grad():
        latents = latents_of(fresh, [sample.part.file for sample in samples])
        assert torch.allclose(batch.latents, latents, atol=1e-5)
        noise = noised.target + latents if name == "flux" else noised.target
        assert 0.9 < float(noise.std()) < 1.1
        assert len(set(noised.timesteps.tolist())) > 2
        prediction, target, weighting = REFERENCES[name](fresh, latents, noise, noised.timesteps, said)
    assert float(prediction.std()) > 0.05
    assert torch.allclose(predicted, prediction, atol=1e-4)
    expected = (weighting * (prediction - target) ** 2).flatten(1).mean(1)
    assert torch.allclose(losses, expected, rtol=1e-5)


# --- curves and what comes out -------------------------------------------------------------------------------------


def losses_of(given: dict[str, Any]) -> dict[int, float]:
    config = configured(given)
    pipe = diffusers.DiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path)
    with Trainer(config, pipe, timeout=100.0) as trainer:
        return trainer.run().losses


@pytest.mark.parametrize("name", sampled(FAMILIES, of=2))
def test_ranks_learn_as_one_device(ranks, folders, tmp_path, name):
    more = {"global_batch_size": 4, "learning_rate": 3e-3, "max_train_steps": 5, "proportion_empty_prompts": 0.2}
    alone = losses_of(run_of(name, folders, tmp_path / "1", **more))
    assert alone[4] != alone[0]
    for axis, sharding in (("ulysses", "none"), ("data", "none"), ("data", "fsdp")):
        way = {"parallel": {axis: 2}, "sharding": sharding}
        for losses in ranks(2).run(losses_of, run_of(name, folders, tmp_path / f"{axis}-{sharding}", **way, **more)):
            assert max(abs(losses[step] / alone[step] - 1) for step in alone) <= 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_what_comes_out_generates(folders, tmp_path, name):
    prompts = {"dit": ("3",)}.get(name, ("a red fox",))
    given = run_of(name, folders, tmp_path, learning_rate=1e-2, max_train_steps=2, validation_prompts=prompts)
    done = train(configured(given | {"validation_steps": 2, "validation_inference_steps": 2}))
    assert (tmp_path / "validation" / "step-2-0.png").exists()
    pictures = []
    for folder in (folders[name][0], done["pipeline"]):
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
        options: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np"}
        if name != "dit":
            options |= {"height": 32, "width": 32, "max_sequence_length": 24}
        if name == "pixart":
            options |= {"use_resolution_binning": False, "clean_caption": False}
        said: list[Any] = [3] if name == "dit" else ["a red fox"]
        pictures.append(pipe(said, generator=torch.Generator().manual_seed(0), **options).images[0])
    assert pictures[0].shape == (32, 32, 3)
    assert np.abs(pictures[0] - pictures[1]).max() > 0.01


def test_a_dit_has_squares_only(folders, tmp_path):
    with pytest.raises(ditmesh.ConfigError, match=r"its loop ends in those of \(4, 16, 16\); change resolution"):
        losses_of(run_of("dit", folders, tmp_path) | {"aspect_ratio_buckets": "32,48"})


def test_lora_keeps_its_scale(folders, tmp_path):
    """The scale of adapters, alpha over rank, is that of training wherever they are loaded."""
    lora = {"rank": 2, "alpha": 8.0, "target_modules": ["to_q", "proj_mlp", "context_embedder"]}
    given = run_of("flux", folders, tmp_path, lora=lora, learning_rate=1e-2, max_train_steps=2)
    config = configured(given)
    pipe = diffusers.DiffusionPipeline.from_pretrained(folders["flux"][0])
    with Trainer(config, pipe) as trainer:
        trainer.run()
        micro = trainer.data.order.step(0)[0]
        with torch.no_grad(), trainer.update.averaged():
            trained = trainer._losses(micro)
    # Another run of the same seed writes them down.
    done = train(configured(given | {"output_dir": str(tmp_path / "again")}))
    loaded = diffusers.DiffusionPipeline.from_pretrained(folders["flux"][0])
    loaded.load_lora_weights(done["pipeline"])
    plain = diffusers.DiffusionPipeline.from_pretrained(folders["flux"][0])
    found = []
    for other in (loaded, plain):
        fresh = configured({**given, "lora": None, "output_dir": str(tmp_path / "none")})
        with Trainer(fresh, other) as trainer, torch.no_grad():
            found.append(trainer._losses(micro))
    assert torch.allclose(found[0], trained, rtol=1e-5)
    assert not torch.allclose(found[1], trained, rtol=1e-3)
    with pytest.raises(
        ditmesh.ConfigError, match=r"lora.target_modules: FluxTransformer2DModel has no linear layer 'nowhere'"
    ):
        losses_of(given | {"lora": {"target_modules": ["nowhere"]}, "output_dir": str(tmp_path / "other")})
