"""Losses of pipelines, held against what diffusers' own training scripts compute.

Each reference below says in our words what a script in diffusers' examples (at 58eb52c0803e) computes from latents of
the autoencoder, noise and timesteps: scale of the latents, noise levels, packing, guidance, target and weighting. They
use diffusers' own classes and nothing of ditmesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from torch import Tensor

from ditmesh.train.objective import NoiseObjective, sample_losses
from ditmesh.train.observed.family import CAPTIONS
from support.exam import Exam, exam
from support.observed import EXAMS, NUMBERS, OTHER, ExamFamily, settings
from support.sample import sampled

SAID = (CAPTIONS[1], OTHER)
# Prediction, target, weights of the errors.
Computed = tuple[Tensor, Tensor, Tensor]


def level_of(pipe: Any, times: Tensor, like: Tensor) -> Tensor:
    """Noise levels by timestep in a scheduler that has sampled nothing, as all flow scripts look them up."""
    config = {**pipe.scheduler.config}
    if "flow_shift" in config:
        # Of a solver: the scripts read it as a flow's, which knows no `flow_shift`. Its timesteps are these.
        config["shift"] = config["flow_shift"]
    table = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config)
    places = [int((table.timesteps - t).abs().argmin()) for t in times]
    assert torch.allclose(table.timesteps[places], times.float(), atol=1e-2)
    return table.sigmas[places].to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def shifted(pipe: Any, raw: Tensor) -> Tensor:
    return (raw - (pipe.vae.config.shift_factor or 0.0)) * pipe.vae.config.scaling_factor


def mixed(clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    return (1.0 - level) * clean + level * noise


def weights_of(level: Tensor) -> Tensor:
    return compute_loss_weighting_for_sd3("logit_normal", level)


def sd3(pipe: Any, given: dict[str, Any], raw: Tensor, noise: Tensor, times: Tensor, edm: bool = False) -> Computed:
    """dreambooth/train_dreambooth_sd3.py and _lora_sd3.py; ``edm``: with ``--precondition_outputs 1``."""
    clean = shifted(pipe, raw)
    level = level_of(pipe, times, clean)
    noisy = mixed(clean, noise, level)
    text, _, pooled, _ = pipe.encode_prompt(
        given["prompt"], None, None, do_classifier_free_guidance=False, max_sequence_length=given["max_sequence_length"]
    )
    found = pipe.transformer(noisy, text, pooled, times, return_dict=False)[0]
    if edm:
        return noisy - level * found, clean, weights_of(level)
    return found, noise - clean, weights_of(level)


def flux2(pipe: Any, given: dict[str, Any], raw: Tensor, noise: Tensor, times: Tensor) -> Computed:
    """dreambooth/train_dreambooth_lora_flux2.py, with a ``guidance_scale`` of 1."""
    kind = diffusers.Flux2Pipeline
    clean, noise = kind._patchify_latents(raw), kind._patchify_latents(noise)
    mean = pipe.vae.bn.running_mean.view(1, -1, 1, 1)
    clean = (clean - mean) / (pipe.vae.bn.running_var.view(1, -1, 1, 1) + pipe.vae.config.batch_norm_eps).sqrt()
    places = kind._prepare_latent_ids(clean)
    level = level_of(pipe, times, clean)
    text = given["prompt_embeds"]
    found = pipe.transformer(
        hidden_states=kind._pack_latents(mixed(clean, noise, level)),
        timestep=times / 1000,
        guidance=torch.full((len(raw),), 1.0),
        encoder_hidden_states=text,
        txt_ids=kind._prepare_text_ids(text),
        img_ids=places,
        return_dict=False,
    )[0]
    found = kind._unpack_latents_with_ids(found, places)
    found = torch.stack(found) if isinstance(found, list) else found
    return found, noise - clean, weights_of(level)


def lumina2(pipe: Any, given: dict[str, Any], raw: Tensor, noise: Tensor, times: Tensor) -> Computed:
    """dreambooth/train_dreambooth_lora_lumina2.py, where a level of one is the picture: of opposite timesteps."""
    clean, times = shifted(pipe, raw), 1000 - times
    level = level_of(pipe, times, clean)
    found = pipe.transformer(
        hidden_states=(1.0 - level) * noise + level * clean,
        encoder_hidden_states=given["prompt_embeds"],
        encoder_attention_mask=given["prompt_attention_mask"],
        timestep=times / pipe.scheduler.config.num_train_timesteps,
        return_dict=False,
    )[0]
    return found, clean - noise, weights_of(level)


def qwen(pipe: Any, given: dict[str, Any], raw: Tensor, noise: Tensor, times: Tensor) -> Computed:
    """dreambooth/train_dreambooth_lora_qwen_image.py."""
    config, scale = pipe.vae.config, pipe.vae_scale_factor
    mean, deviation = (torch.tensor(config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    clean = (raw - mean) * (1.0 / deviation)
    level = level_of(pipe, times, clean)
    batch, channels, _, height, width = clean.shape
    noisy = mixed(clean, noise, level).permute(0, 2, 1, 3, 4)
    found = pipe.transformer(
        hidden_states=pipe._pack_latents(noisy, batch, channels, height, width),
        encoder_hidden_states=given["prompt_embeds"],
        encoder_hidden_states_mask=given["prompt_embeds_mask"],
        timestep=times / 1000,
        img_shapes=[(1, height // 2, width // 2)] * batch,
        return_dict=False,
    )[0]
    found = pipe._unpack_latents(found, height * scale, width * scale, scale)
    return found, noise - clean, weights_of(level)


def z_image(pipe: Any, given: dict[str, Any], raw: Tensor, noise: Tensor, times: Tensor) -> Computed:
    """dreambooth/train_dreambooth_lora_z_image.py."""
    clean = shifted(pipe, raw)
    level = level_of(pipe, times, clean)
    pictures = list(mixed(clean, noise, level).unsqueeze(2).unbind(0))
    found = pipe.transformer(pictures, (1000 - times) / 1000, given["prompt_embeds"], return_dict=False)[0]
    return -torch.stack(list(found)).squeeze(2), noise - clean, weights_of(level)


def cogvideox(pipe: Any, given: dict[str, Any], raw: Tensor, noise: Tensor, times: Tensor) -> Computed:
    """cogvideo/train_cogvideox_lora.py: what is compared is the video, and the weight takes its noise level back."""
    scheduler = diffusers.CogVideoXDPMScheduler.from_config(pipe.scheduler.config)
    clean, noise = ((one).permute(0, 2, 1, 3, 4) for one in (raw * pipe.vae.config.scaling_factor, noise))
    text, _ = pipe.encode_prompt(given["prompt"], do_classifier_free_guidance=False, max_sequence_length=24)
    scale, rotary = pipe.vae_scale_factor_spatial, None
    if pipe.transformer.config.use_rotary_positional_embeddings:
        rotary = pipe._prepare_rotary_positional_embeddings(
            clean.shape[3] * scale, clean.shape[4] * scale, clean.shape[1], torch.device("cpu")
        )
    noisy = scheduler.add_noise(clean, noise, times)
    found = pipe.transformer(
        hidden_states=noisy, encoder_hidden_states=text, timestep=times, image_rotary_emb=rotary, return_dict=False
    )[0]
    weights = 1 / (1 - scheduler.alphas_cumprod[times])
    return scheduler.get_velocity(found, noisy, times), clean, weights.view(-1, 1, 1, 1, 1)


VELOCITY = diffusers.CogVideoXDPMScheduler(prediction_type="v_prediction")


CASES: dict[str, tuple[Callable[..., Computed], Exam]] = {
    "StableDiffusion3Pipeline": (sd3, EXAMS["StableDiffusion3Pipeline"]),
    "Flux2Pipeline": (flux2, EXAMS["Flux2Pipeline"]),
    "Lumina2Pipeline": (lumina2, EXAMS["Lumina2Pipeline"]),
    "QwenImagePipeline": (qwen, EXAMS["QwenImagePipeline"]),
    "ZImagePipeline": (z_image, EXAMS["ZImagePipeline"]),
    "CogVideoXPipeline": (cogvideox, exam("CogVideoXPipeline", scheduler=VELOCITY)),
}


def losses_of(name: str) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    """Ours, the noise levels' timesteps, and what computes the script's of the same latents, noise and timesteps."""
    script, exam = CASES[name]
    pipe = exam.make()
    family = ExamFamily(exam, pipe)
    family.check_size(pipe, (0, 0))
    recipe = next(iter(family.recipes.values()))
    draw = torch.Generator().manual_seed(5)
    raw = torch.randn(2, *recipe.latents.shape, generator=draw)
    latents = family.scaled(pipe, raw)
    config = settings()
    noised = NoiseObjective(family.scheduler, config)(latents, [torch.Generator().manual_seed(n) for n in (1, 2)])
    noise = torch.stack([torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(n)) for n in (1, 2)])
    with torch.no_grad():
        conditions = family.encode(pipe, SAID, None)
        ours = sample_losses(
            family.predict(pipe, pipe.transformer, noised.latents, noised.timesteps, conditions), noised
        )

    def theirs(**more: Any) -> Tensor:
        call = exam.call([NUMBERS[one] for one in SAID])
        with torch.no_grad():
            found, target, weights = script(pipe, call, raw, noise, noised.timesteps, **more)
        assert found.shape == target.shape
        return (weights.float() * (found.float() - target.float()) ** 2).flatten(1).mean(1)

    return ours, noised.timesteps, theirs


@pytest.mark.parametrize("name", sampled(CASES, of=4))
def test_losses_are_those_of_the_script(name: str):
    ours, times, theirs = losses_of(name)
    assert len(set(times.tolist())) == 2
    assert torch.allclose(theirs(), ours, rtol=1e-5), (theirs(), ours)


def test_the_sd3_scripts_other_loss_is_weighted_by_the_level():
    """``--precondition_outputs``, which is on unless it is switched off, compares pictures in place of velocities."""
    ours, times, theirs = losses_of("StableDiffusion3Pipeline")
    assert torch.allclose(theirs(edm=True), ours * (times / 1000) ** 2, rtol=1e-5)


@pytest.mark.parametrize("what", ["sign", "time", "scale"])
def test_a_wrong_recipe_has_another_loss(what: str, monkeypatch: pytest.MonkeyPatch):
    """The comparison fails where it should."""
    changes: dict[str, Callable[[Any], Any]] = {
        "sign": lambda r: replace(r, prediction=replace(r.prediction, scale=-r.prediction.scale)),
        "time": lambda r: replace(r, times=tuple(replace(t, scale=1.1 * t.scale) for t in r.times)),
        "scale": lambda r: replace(r, latents=replace(r.latents, scale=1.01 * r.latents.scale)),
    }
    observed = ExamFamily.check_size

    def wrong(family: Any, pipe: Any, size: tuple[int, int]) -> None:
        observed(family, pipe, size)
        family.recipes = {shape: changes[what](recipe) for shape, recipe in family.recipes.items()}
        family._on_device.clear()

    monkeypatch.setattr(ExamFamily, "check_size", wrong)
    ours, _, theirs = losses_of("ZImagePipeline")
    assert not torch.allclose(theirs(), ours, rtol=1e-4)
