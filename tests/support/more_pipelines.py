"""Whole diffusers pipelines of many families, made of tiny random parts and driven by prompt embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch

from support.exam import (
    NEGATIVE,
    TOKENS,
    WIDTH,
    Call,
    Exam,
    build,
    flow,
    latents,
    mask,
    noise,
    pooled,
    text,
    texts,
    unipc,
)
from support.models import plain, tiny, variant


@dataclass(frozen=True)
class Family:
    """One pipeline class.

    Attributes:
        make: builds the pipeline.
        call: arguments of its call for prompts given by number, without those every pipeline takes.
        guidance: ``"batched"`` when all branches of guidance are rows of one transformer call, ``"sequential"``
            when every branch is a call of its own, ``""`` when the pipeline has no branches.
        result: the attribute of the pipeline's output that holds the latents.
        several: whether it takes several prompts at once.
    """

    make: Callable[[], Any]
    call: Call
    guidance: str = "batched"
    result: str = "images"
    several: bool = True


class Unguarded:
    """Stands in for Cosmos' safety checker, which is a package and a download of its own."""

    def to(self, device: Any) -> Unguarded:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def edm() -> Any:
    return diffusers.EDMEulerScheduler(
        sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras", final_sigmas_type="sigma_min"
    )


def around(pipeline: str, model: str, scheduler: Callable[[], Any] = flow, **parts: Any) -> Callable[[], Any]:
    """A maker of a pipeline around the tiny model of a family."""
    return lambda: build(pipeline, transformer=tiny(model), scheduler=scheduler(), **parts)


def dit() -> Any:
    return build(
        "DiTPipeline",
        # The pipeline's null class is number 1000; it keeps half of the channels of a model that predicts variance.
        transformer=variant("DiT", out_channels=8),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        vae=variant("dit_vae"),
        id2label={number: str(number) for number in range(1000)},
    )


def wan22() -> Any:
    """Wan 2.2: one transformer for the noisy steps and another one for the last."""
    return build(
        "WanPipeline",
        transformer=tiny("Wan"),
        transformer_2=variant("Wan", ffn_dim=80),
        boundary_ratio=0.875,
        scheduler=unipc(),
    )


def stable_audio() -> Any:
    return build(
        "StableAudioPipeline",
        # Where the music starts and ends: two numbers, embedded in WIDTH channels each.
        transformer=variant("StableAudio", global_states_input_dim=2 * WIDTH),
        projection_model=plain("StableAudioProjectionModel"),
        vae=plain("AutoencoderOobleck"),
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(
            sigma_schedule="exponential", prediction_type="v_prediction", sigma_data=1.0
        ),
    )


def latte() -> Any:
    # The pipeline throws half of the channels away: the model predicts a variance, too.
    return build(
        "LattePipeline",
        transformer=variant("Latte", out_channels=8),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )


def ltx2() -> Any:
    return build(
        "LTX2Pipeline",
        # A token of sound is 2 channels x 8 mel bands.
        transformer=variant("LTX2", audio_in_channels=16, audio_out_channels=16),
        # Even latents are scaled by what the autoencoders know of their statistics.
        vae=plain("AutoencoderKLLTX2Video", latent_channels=8, decoder_block_out_channels=(8, 8, 8)),
        audio_vae=plain("AutoencoderKLLTX2Audio"),
        connectors=plain("LTX2TextConnectors"),
        scheduler=flow(),
    )


def hunyuan_video_15() -> Any:
    pipe = build(
        "HunyuanVideo15Pipeline",
        # Noise, the picture to start from and its mask.
        transformer=variant("HunyuanVideo15", in_channels=9),
        vae=plain("AutoencoderKLHunyuanVideo15"),
        scheduler=flow(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
    )
    pipe.vision_num_semantic_tokens, pipe.vision_states_dim = 6, 16
    return pipe


def sana_scheduler() -> Any:
    return diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


SQUARE = {"height": 64, "width": 64}
FRAMES = {"height": 64, "width": 64, "num_frames": 5}
WIDE = {"height": 128, "width": 128, "num_frames": 9}
# No caption to clean, and the size that is asked for.
PLAIN = {"negative_prompt": None, "use_resolution_binning": False}
MASKED = texts("prompt_attention_mask")
BOOLEAN = texts("prompt_attention_mask", dtype=torch.bool)


def called(*given: Any, **more: Any) -> Call:
    """A call of these arguments alone."""
    return lambda p: {key: v for one in (*given, more) for key, v in (one(p) if callable(one) else one).items()}


def captions(prompts: list[int]) -> dict[str, Any]:
    """Captions of different lengths, as lists."""
    return {
        "prompt_embeds": [noise([one], TOKENS + one, WIDTH)[0] for one in prompts],
        "negative_prompt_embeds": [noise([NEGATIVE], 3, WIDTH)[0] for _ in prompts],
    }


# As HunyuanDiT is called.
TWO_TEXTS = called(
    texts("prompt_attention_mask", (6, 32)),
    texts("prompt_attention_mask", (7, 24), suffix="_2"),
    SQUARE,
    use_resolution_binning=False,
)

FAMILIES: dict[str, Family] = {
    "wan": Family(
        around("WanPipeline", "Wan", unipc), called(texts(), FRAMES, guidance_scale=3.0), "sequential", "frames"
    ),
    "wan22": Family(wan22, called(texts(), FRAMES, guidance_scale=3.0), "sequential", "frames"),
    "qwen_image": Family(
        around("QwenImagePipeline", "QwenImage"),
        called(texts("prompt_embeds_mask"), SQUARE, true_cfg_scale=3.0),
        "sequential",
    ),
    "pixart": Family(
        around("PixArtSigmaPipeline", "PixArt", diffusers.DPMSolverMultistepScheduler), called(MASKED, SQUARE, PLAIN)
    ),
    "dit": Family(dit, lambda p: {"class_labels": p, "output_type": "np"}),
    "flux2": Family(
        around("Flux2Pipeline", "Flux2"), lambda p: {"prompt_embeds": noise(p, TOKENS, WIDTH), **SQUARE}, ""
    ),
    "hunyuan_dit": Family(
        around(
            "HunyuanDiTPipeline",
            "HunyuanDiT",
            partial(diffusers.DDPMScheduler, prediction_type="v_prediction", clip_sample=False),
            requires_safety_checker=False,
        ),
        TWO_TEXTS,
    ),
    "cogvideox": Family(
        around("CogVideoXPipeline", "CogVideoX", diffusers.CogVideoXDPMScheduler),
        called(texts(), FRAMES),
        result="frames",
    ),
    "hunyuan_video": Family(
        around("HunyuanVideoPipeline", "HunyuanVideo"),
        called(BOOLEAN, pooled(), FRAMES, true_cfg_scale=3.0),
        "sequential",
        "frames",
    ),
    "hunyuan_video_15": Family(
        hunyuan_video_15,
        called(
            texts("prompt_embeds_mask"),
            texts("prompt_embeds_mask", (5, 24), suffix="_2"),
            height=16,
            width=16,
            num_frames=5,
        ),
        "sequential",
        "frames",
    ),
    "ltx": Family(around("LTXPipeline", "LTX"), called(MASKED, WIDE), result="frames"),
    "ltx2": Family(
        ltx2,
        called(texts("prompt_attention_mask", (TOKENS, 2 * WIDTH)), WIDE, stg_scale=0.0, audio_stg_scale=0.0),
        "mixed",
        "frames",
    ),
    "mochi": Family(
        around("MochiPipeline", "Mochi", partial(flow, invert_sigmas=True)),
        called(BOOLEAN, SQUARE, num_frames=7),
        result="frames",
    ),
    # The tiny model hardly listens to its prompt.
    "auraflow": Family(around("AuraFlowPipeline", "AuraFlow"), called(MASKED, SQUARE, guidance_scale=20.0)),
    "cogview4": Family(around("CogView4Pipeline", "CogView4"), called(texts(), SQUARE), "sequential"),
    "lumina2": Family(around("Lumina2Pipeline", "Lumina2"), called(MASKED, SQUARE), "sequential"),
    "chroma": Family(around("ChromaPipeline", "Chroma"), called(BOOLEAN, SQUARE), "sequential"),
    "z_image": Family(around("ZImagePipeline", "ZImage"), called(captions, SQUARE)),
    "stable_audio": Family(
        stable_audio,
        lambda p: {**text(p), "attention_mask": mask(p), "negative_attention_mask": mask([NEGATIVE] * len(p))},
        result="audios",
    ),
    "krea2": Family(
        around("Krea2Pipeline", "Krea2"),
        called(texts("prompt_embeds_mask", (TOKENS, 2, WIDTH), torch.bool), SQUARE),
        "sequential",
    ),
    "cosmos": Family(
        around("CosmosTextToWorldPipeline", "Cosmos", edm, safety_checker=Unguarded()),
        called(texts(), SQUARE, num_frames=9),
        "sequential",
        "frames",
    ),
    "cosmos2": Family(
        around(
            "Cosmos2TextToImagePipeline", "Cosmos", partial(flow, use_karras_sigmas=True), safety_checker=Unguarded()
        ),
        called(texts(), SQUARE),
        "sequential",
    ),
    "sana": Family(around("SanaPipeline", "Sana", sana_scheduler), called(MASKED, PLAIN, height=256, width=256)),
    "latte": Family(
        latte,
        called(texts(), SQUARE, negative_prompt=None, video_length=2, mask_feature=False),
        result="frames",
    ),
}


def family(name: str, **more: Any) -> Exam:
    """A family as an exam, with some arguments changed."""
    one = FAMILIES[name]
    return Exam(one.make, latents(one.call, more), guidance=bool(one.guidance), several=one.several)


def arguments(name: str, prompts: list[int], seed: int = 0, steps: int = 3) -> dict[str, Any]:
    """Arguments of a family's call; the first prompt draws its noise from ``seed``, the next from ``seed + 1`` …"""
    return {
        "num_inference_steps": steps,
        "output_type": "latent",
        "generator": [torch.Generator().manual_seed(seed + row) for row in range(len(prompts))],
        **FAMILIES[name].call(prompts),
    }


def draw(name: str, pipe: Any, prompts: list[int], seed: int = 0, steps: int = 3) -> torch.Tensor:
    """Latents (P, ...) of one call."""
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        return torch.as_tensor(getattr(pipe(**arguments(name, prompts, seed, steps)), FAMILIES[name].result))
