"""Whole diffusers pipelines of many families, made of tiny random parts and driven by prompt embeddings.

Parts that a pipeline does without when it gets embeddings and returns latents (text encoders, autoencoders) are None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import nn

from support.models import stirred, tiny, variant

TOKENS, WIDTH = 12, 32

# The prompt that guidance leads away from.
NEGATIVE = 0


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
    call: Callable[[list[int]], dict[str, Any]]
    guidance: str = "batched"
    result: str = "images"
    several: bool = True


def build(pipeline: type, **parts: Any) -> Any:
    """The pipeline of these parts; parts that it asks for and that are not given are None."""
    parameters = list(inspect.signature(pipeline.__init__).parameters.values())[1:]
    asked = {one.name: None for one in parameters if one.default is inspect.Parameter.empty}
    return pipeline(**{**asked, **parts})


def flow(**settings: Any) -> Any:
    """The scheduler of most flow-matching pipelines."""
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def noise(prompts: list[int], *shape: int) -> torch.Tensor:
    """(P, *shape): noise drawn from every prompt's number."""
    return torch.stack([torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + one)) for one in prompts])


def mask(prompts: list[int], tokens: int = TOKENS, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """(P, T): prompts of different lengths, padded on the right; the negative prompt is short."""
    lengths = torch.tensor([tokens - 1 - one % 4 if one != NEGATIVE else 3 for one in prompts])
    return (torch.arange(tokens) < lengths[:, None]).to(dtype)


def text(
    prompts: list[int],
    masked: str = "",
    shape: tuple[int, ...] = (TOKENS, WIDTH),
    dtype: torch.dtype = torch.long,
    suffix: str = "",
) -> dict[str, Any]:
    """Embeddings of the prompts and the negative prompt, with masks under the name ``masked`` if there is one."""
    nothing = [NEGATIVE] * len(prompts)
    made: dict[str, Any] = {}
    for prefix, numbers in (("", prompts), ("negative_", nothing)):
        made[f"{prefix}prompt_embeds{suffix}"] = noise(numbers, *shape)
        if masked:
            made[f"{prefix}{masked}{suffix}"] = mask(numbers, shape[0], dtype)
    return made


def decoder(channels: int) -> nn.Module:
    """A tiny image autoencoder, for the pipelines that always decode."""
    torch.manual_seed(0)
    return stirred(
        diffusers.AutoencoderKL(
            block_out_channels=(8,), latent_channels=channels, norm_num_groups=4, layers_per_block=1, sample_size=8
        ).eval()
    )


# --- the families ----------------------------------------------------------------------------------------------------

SQUARE = {"height": 64, "width": 64}
FRAMES = {"height": 64, "width": 64, "num_frames": 5}
# No caption to clean, and the size that is asked for.
PLAIN = {"negative_prompt": None, "use_resolution_binning": False}


def pixart() -> Any:
    return build(
        diffusers.PixArtSigmaPipeline,
        transformer=tiny("PixArt"),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )


def dit() -> Any:
    labels = {number: str(number) for number in range(1000)}
    return build(
        diffusers.DiTPipeline,
        # The pipeline's null class is number 1000; it keeps half of the channels of a model that predicts variance.
        transformer=variant("DiT", out_channels=8),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        vae=decoder(4),
        id2label=labels,
    )


def wan() -> Any:
    return build(
        diffusers.WanPipeline,
        transformer=tiny("Wan"),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


def wan22() -> Any:
    """Wan 2.2: one transformer for the noisy steps and another one for the last."""
    return build(
        diffusers.WanPipeline,
        transformer=tiny("Wan"),
        transformer_2=variant("Wan", ffn_dim=80),
        boundary_ratio=0.875,
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


def cogvideox() -> Any:
    return build(
        diffusers.CogVideoXPipeline,
        transformer=tiny("CogVideoX"),
        scheduler=diffusers.CogVideoXDPMScheduler(),
    )


def hunyuan_dit() -> Any:
    return build(
        diffusers.HunyuanDiTPipeline,
        transformer=tiny("HunyuanDiT"),
        scheduler=diffusers.DDPMScheduler(prediction_type="v_prediction", clip_sample=False),
        requires_safety_checker=False,
    )


def stable_audio() -> Any:
    torch.manual_seed(0)
    return build(
        diffusers.StableAudioPipeline,
        # Where the music starts and ends: two numbers, embedded in WIDTH channels each.
        transformer=variant("StableAudio", global_states_input_dim=2 * WIDTH),
        projection_model=diffusers.StableAudioProjectionModel(WIDTH, WIDTH, min_value=0, max_value=512).eval(),
        vae=diffusers.AutoencoderOobleck(
            encoder_hidden_size=4,
            downsampling_ratios=[1, 2],
            channel_multiples=[1, 2],
            decoder_channels=4,
            decoder_input_channels=8,
            sampling_rate=64,
        ).eval(),
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(
            sigma_schedule="exponential", prediction_type="v_prediction", sigma_data=1.0
        ),
    )


class Unguarded:
    """Stands in for Cosmos' safety checker, which is a package and a download of its own."""

    def to(self, device: Any) -> Unguarded:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def cosmos() -> Any:
    return build(
        diffusers.CosmosTextToWorldPipeline,
        transformer=tiny("Cosmos"),
        scheduler=diffusers.EDMEulerScheduler(
            sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras", final_sigmas_type="sigma_min"
        ),
        safety_checker=Unguarded(),
    )


def cosmos2() -> Any:
    return build(
        diffusers.Cosmos2TextToImagePipeline,
        transformer=tiny("Cosmos"),
        scheduler=flow(use_karras_sigmas=True),
        safety_checker=Unguarded(),
    )


def sana() -> Any:
    return build(
        diffusers.SanaPipeline,
        transformer=tiny("Sana"),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


def latte() -> Any:
    # The pipeline throws half of the channels away: the model predicts a variance, too.
    return build(
        diffusers.LattePipeline,
        transformer=variant("Latte", out_channels=8),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )


def ltx2() -> Any:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    torch.manual_seed(0)
    connector = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_learnable_registers": 4}
    return build(
        diffusers.LTX2Pipeline,
        # A token of sound is 2 channels x 8 mel bands.
        transformer=variant("LTX2", audio_in_channels=16, audio_out_channels=16),
        # Even latents are scaled by what the autoencoders know of their statistics.
        vae=diffusers.AutoencoderKLLTX2Video(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1),
        ).eval(),
        audio_vae=diffusers.AutoencoderKLLTX2Audio(
            base_channels=16, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=32
        ).eval(),
        connectors=LTX2TextConnectors(
            caption_channels=WIDTH,
            text_proj_in_factor=2,
            **{f"{stream}_connector_{key}": value for stream in ("video", "audio") for key, value in connector.items()},
        ).eval(),
        scheduler=flow(),
    )


def hunyuan_video_15() -> Any:
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        spatial_compression_ratio=4,
    )
    pipe = build(
        diffusers.HunyuanVideo15Pipeline,
        # Noise, the picture to start from and its mask.
        transformer=variant("HunyuanVideo15", in_channels=9),
        vae=vae.eval(),
        scheduler=flow(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
    )
    pipe.vision_num_semantic_tokens, pipe.vision_states_dim = 6, 16
    return pipe


FAMILIES: dict[str, Family] = {
    "wan": Family(wan, lambda p: {**text(p), **FRAMES, "guidance_scale": 3.0}, "sequential", "frames"),
    "wan22": Family(wan22, lambda p: {**text(p), **FRAMES, "guidance_scale": 3.0}, "sequential", "frames"),
    "qwen_image": Family(
        lambda: build(diffusers.QwenImagePipeline, transformer=tiny("QwenImage"), scheduler=flow()),
        lambda p: {**text(p, "prompt_embeds_mask"), **SQUARE, "true_cfg_scale": 3.0},
        "sequential",
    ),
    "pixart": Family(pixart, lambda p: {**text(p, "prompt_attention_mask"), **SQUARE, **PLAIN}),
    "dit": Family(dit, lambda p: {"class_labels": p, "output_type": "np"}),
    "flux2": Family(
        lambda: build(diffusers.Flux2Pipeline, transformer=tiny("Flux2"), scheduler=flow()),
        lambda p: {"prompt_embeds": noise(p, TOKENS, WIDTH), **SQUARE},
        "",
    ),
    "hunyuan_dit": Family(
        hunyuan_dit,
        lambda p: {
            **text(p, "prompt_attention_mask", (6, 32)),
            **text(p, "prompt_attention_mask", (7, 24), suffix="_2"),
            **SQUARE,
            "use_resolution_binning": False,
        },
    ),
    "cogvideox": Family(cogvideox, lambda p: {**text(p), **FRAMES}, result="frames"),
    "hunyuan_video": Family(
        lambda: build(diffusers.HunyuanVideoPipeline, transformer=tiny("HunyuanVideo"), scheduler=flow()),
        lambda p: {
            **text(p, "prompt_attention_mask", dtype=torch.bool),
            "pooled_prompt_embeds": noise(p, 16),
            "negative_pooled_prompt_embeds": noise([NEGATIVE] * len(p), 16),
            **FRAMES,
            "true_cfg_scale": 3.0,
        },
        "sequential",
        "frames",
    ),
    "hunyuan_video_15": Family(
        hunyuan_video_15,
        lambda p: {
            **text(p, "prompt_embeds_mask"),
            **text(p, "prompt_embeds_mask", (5, 24), suffix="_2"),
            "height": 16,
            "width": 16,
            "num_frames": 5,
        },
        "sequential",
        "frames",
    ),
    "ltx": Family(
        lambda: build(diffusers.LTXPipeline, transformer=tiny("LTX"), scheduler=flow()),
        lambda p: {**text(p, "prompt_attention_mask"), "height": 128, "width": 128, "num_frames": 9},
        result="frames",
    ),
    "ltx2": Family(
        ltx2,
        lambda p: {
            **text(p, "prompt_attention_mask", (TOKENS, 2 * WIDTH)),
            "height": 128,
            "width": 128,
            "num_frames": 9,
            "stg_scale": 0.0,
            "audio_stg_scale": 0.0,
        },
        "mixed",
        "frames",
    ),
    "mochi": Family(
        lambda: build(diffusers.MochiPipeline, transformer=tiny("Mochi"), scheduler=flow(invert_sigmas=True)),
        lambda p: {**text(p, "prompt_attention_mask", dtype=torch.bool), **SQUARE, "num_frames": 7},
        result="frames",
    ),
    "auraflow": Family(
        lambda: build(diffusers.AuraFlowPipeline, transformer=tiny("AuraFlow"), scheduler=flow()),
        # The tiny model hardly listens to its prompt.
        lambda p: {**text(p, "prompt_attention_mask"), **SQUARE, "guidance_scale": 20.0},
    ),
    "cogview4": Family(
        lambda: build(diffusers.CogView4Pipeline, transformer=tiny("CogView4"), scheduler=flow()),
        lambda p: {**text(p), **SQUARE},
        "sequential",
    ),
    "lumina2": Family(
        lambda: build(diffusers.Lumina2Pipeline, transformer=tiny("Lumina2"), scheduler=flow()),
        lambda p: {**text(p, "prompt_attention_mask"), **SQUARE},
        "sequential",
    ),
    "chroma": Family(
        lambda: build(diffusers.ChromaPipeline, transformer=tiny("Chroma"), scheduler=flow()),
        lambda p: {**text(p, "prompt_attention_mask", dtype=torch.bool), **SQUARE},
        "sequential",
    ),
    "z_image": Family(
        lambda: build(diffusers.ZImagePipeline, transformer=tiny("ZImage"), scheduler=flow()),
        lambda p: {
            # Captions of different lengths, as lists.
            "prompt_embeds": [noise([one], TOKENS + one, WIDTH)[0] for one in p],
            "negative_prompt_embeds": [noise([NEGATIVE], 3, WIDTH)[0] for _ in p],
            **SQUARE,
        },
    ),
    "stable_audio": Family(
        stable_audio,
        lambda p: {
            **text(p),
            "attention_mask": mask(p),
            "negative_attention_mask": mask([NEGATIVE] * len(p)),
        },
        result="audios",
    ),
    "krea2": Family(
        lambda: build(diffusers.Krea2Pipeline, transformer=tiny("Krea2"), scheduler=flow()),
        lambda p: {**text(p, "prompt_embeds_mask", (TOKENS, 2, WIDTH), torch.bool), **SQUARE},
        "sequential",
    ),
    "cosmos": Family(cosmos, lambda p: {**text(p), **SQUARE, "num_frames": 9}, "sequential", "frames"),
    "cosmos2": Family(cosmos2, lambda p: {**text(p), **SQUARE}, "sequential"),
    "sana": Family(
        sana,
        lambda p: {
            **text(p, "prompt_attention_mask"),
            "height": 256,
            "width": 256,
            **PLAIN,
        },
    ),
    "latte": Family(
        latte,
        lambda p: {**text(p), **SQUARE, "negative_prompt": None, "video_length": 2, "mask_feature": False},
        result="frames",
    ),
}


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
