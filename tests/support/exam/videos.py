"""Pipelines that make videos, of tiny random parts, called as diffusers' documentation calls them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import tokenizers
import torch
import transformers
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from torch import nn

from support import more_pipelines
from support.classes import others
from support.classes import videos as classes
from support.exam import Exam, generators
from support.models import stirred, tiny, variant
from support.more_pipelines import FAMILIES, build, flow, mask, noise, text

WIDTH = 32  # channels of a prompt's embeddings, where a model has no others
STEPS = 2
# Two pictures high, three wide: the tokens of a video are an odd number.
HEIGHT, COLUMNS = 48, 80
SIZE = {"height": HEIGHT, "width": COLUMNS}
FRAMES = 9
PROMPTS = ("blurry", "a red kite over the sea", "two foxes in deep snow look up", "rain")


# --- parts -----------------------------------------------------------------------------------------------------------


def words(prompts: list[int]) -> str | list[str]:
    """The prompts as users write them: one, or several in a list."""
    texts = [PROMPTS[one] for one in prompts]
    return texts[0] if len(texts) == 1 else texts


def guided(prompts: list[int]) -> dict[str, Any]:
    """The prompts, and what to stay away from."""
    return {"prompt": words(prompts), "negative_prompt": words([0] * len(prompts))}


@cache
def tokenizer(length: int = 24) -> Any:
    """A tokenizer that knows letters."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", "<unk>", *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )


@cache
def encoder(width: int = WIDTH) -> nn.Module:
    """A text encoder of one layer."""
    torch.manual_seed(0)
    config = transformers.UMT5Config(
        vocab_size=len(tokenizer()), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    return transformers.UMT5EncoderModel(config).eval()


def reads(width: int = WIDTH) -> dict[str, Any]:
    """The parts of a pipeline that read a prompt."""
    return {"tokenizer": tokenizer(), "text_encoder": encoder(width)}


@cache
def looks(width: int = 16) -> dict[str, Any]:
    """The parts of a pipeline that look at an image: 5 tokens."""
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(
        hidden_size=width, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return {"image_encoder": transformers.CLIPVisionModel(config).eval(), "image_processor": processor}


@cache
def wan_vae(channels: int = 4) -> nn.Module:
    """Wan's autoencoder: 8 pixels wide and high and 4 frames are one latent."""
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1] * channels,
        latents_std=[1.5] * channels,
    )
    return stirred(model.eval())


def unipc(shift: float = 3.0) -> Any:
    """The scheduler of Wan and its kin."""
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def changed(make: Callable[[], nn.Module], **changes: Any) -> nn.Module:
    """The tiny model that ``make`` makes, with some settings of its configuration changed."""
    base = make()
    torch.manual_seed(0)
    return stirred(type(base).from_config(dict(base.config), **changes).eval())


def picture(seed: int = 0, width: int = COLUMNS, height: int = HEIGHT) -> PIL.Image.Image:
    """A photograph of large spots."""
    spots = np.random.default_rng(seed).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    return PIL.Image.fromarray(spots).resize((width, height), PIL.Image.Resampling.BICUBIC)


def film(frames: int = FRAMES, seed: int = 0, width: int = COLUMNS, height: int = HEIGHT) -> list[PIL.Image.Image]:
    """Frames that go over from one picture to another."""
    first, last = picture(seed, width, height), picture(seed + 1, width, height)
    return [PIL.Image.blend(first, last, one / frames) for one in range(frames)]


def stencil(frames: int = FRAMES) -> list[PIL.Image.Image]:
    """The right half is to be painted."""
    made = PIL.Image.new("L", (COLUMNS, HEIGHT), 0)
    made.paste(255, (COLUMNS // 2, 0, COLUMNS, HEIGHT))
    return [made] * frames


def asked(call: Callable[[list[int]], dict[str, Any]], **more: Any) -> Callable[[list[int]], dict[str, Any]]:
    """A call with what every exam passes: the steps, a generator per prompt, latents as output."""

    def made(prompts: list[int]) -> dict[str, Any]:
        common = {"num_inference_steps": STEPS, "output_type": "latent", "generator": generators(prompts)}
        given = {**common, **more, **call(prompts)}
        return {key: value for key, value in given.items() if value is not ...}

    return made


def alone(call: Callable[[list[int]], dict[str, Any]]) -> Callable[[list[int]], dict[str, Any]]:
    """A call of a pipeline that takes one generator and no list of them."""
    return lambda prompts: {**call(prompts), "generator": generators(prompts)[0]}


def family(name: str) -> Exam:
    """A pipeline that has a maker already."""
    one = FAMILIES[name]
    return Exam(one.make, asked(one.call), guidance=bool(one.guidance), several=one.several)


# --- Wan -------------------------------------------------------------------------------------------------------------


def wan_words(prompts: list[int], width: int = WIDTH, tokens: int = 24) -> dict[str, Any]:
    """What Wan's text encoder makes of prompts: zeros behind the last word. Its pipelines read no words without ftfy."""
    given = text(prompts, shape=(tokens, width))
    for name, numbers in (("prompt_embeds", prompts), ("negative_prompt_embeds", [more_pipelines.NEGATIVE] * len(prompts))):
        given[name] = given[name] * mask(numbers, tokens)[..., None]
    return given


def wan_text(**parts: Any) -> Any:
    return build(
        diffusers.WanPipeline,
        **{"transformer": tiny("Wan"), "vae": wan_vae(), "scheduler": unipc(), **parts},
    )


def wan_image(**parts: Any) -> Any:
    return build(diffusers.WanImageToVideoPipeline, **{"vae": wan_vae(), "scheduler": unipc(), **parts})


def wan_22() -> dict[str, Any]:
    """Wan 2.2: another transformer for the last steps."""
    return {
        "transformer": tiny("Wan"),
        "transformer_2": variant("Wan", ffn_dim=80),
        "boundary_ratio": 0.875,
    }


def wan_vace(reference: bool) -> Exam:
    make = others.CASES["WanVACETransformer3DModel"].make
    given = {"video": film(), "mask": stencil()}
    if reference:
        given["reference_images"] = [picture(7)]
    return Exam(
        lambda: build(
            diffusers.WanVACEPipeline,
            # Latents of what is kept and of what is painted, and 8x8 values of the mask.
            transformer=changed(make, vace_in_channels=2 * 4 + 64),
            vae=wan_vae(),
            scheduler=unipc(),
        ),
        alone(asked(lambda p: {**wan_words(p, others.TEXT_DIM), **SIZE, **given, "num_frames": FRAMES})),
        several=False,
    )


def wan_animate(mode: str) -> Exam:
    given = {"background_video": film(13, 4), "mask_video": stencil(13)} if mode == "replace" else {}
    return Exam(
        lambda: build(
            diffusers.WanAnimatePipeline,
            transformer=others.CASES["WanAnimateTransformer3DModel"].make(),
            vae=wan_vae(),
            scheduler=unipc(),
            **looks(10),
        ),
        asked(
            lambda p: {
                **wan_words(p, others.TEXT_DIM, 512),
                **SIZE,
                **given,
                "image": picture(),
                # Two segments.
                "pose_video": film(13, 2),
                "face_video": film(13, 6, 16, 16),
                "segment_frame_length": FRAMES,
                "guidance_scale": 3.0,
                "mode": mode,
            }
        ),
    )


def wan_call(**more: Any) -> Callable[[list[int]], dict[str, Any]]:
    return asked(lambda p: {**wan_words(p), **SIZE, "num_frames": FRAMES, **more})


def wan_image_call(**more: Any) -> Callable[[list[int]], dict[str, Any]]:
    # Blocks that see an image take the last 512 tokens for the prompt.
    return asked(lambda p: {**wan_words(p, tokens=512), **SIZE, "num_frames": FRAMES, "image": picture(), **more})


def i2v_wan(**changes: Any) -> nn.Module:
    """Latents, those of the image and a mask of four frames each."""
    return variant("Wan I2V" if changes.pop("sees", False) else "Wan", in_channels=12, **changes)


WAN: dict[str, Exam] = {
    "WanPipeline": Exam(wan_text, wan_call()),
    "WanPipeline two transformers": Exam(
        lambda: wan_text(**wan_22()), wan_call(guidance_scale_2=4.0, num_inference_steps=3)
    ),
    "WanPipeline expand_timesteps": Exam(lambda: wan_text(expand_timesteps=True), wan_call()),
    "WanImageToVideoPipeline": Exam(
        lambda: wan_image(transformer=i2v_wan(sees=True), **looks()), wan_image_call()
    ),
    "WanImageToVideoPipeline two transformers": Exam(
        lambda: wan_image(transformer=i2v_wan(), transformer_2=i2v_wan(ffn_dim=80), boundary_ratio=0.875),
        wan_image_call(num_inference_steps=3),
    ),
    "WanImageToVideoPipeline last image": Exam(
        lambda: wan_image(transformer=i2v_wan(sees=True, pos_embed_seq_len=10), **looks()),
        wan_image_call(last_image=picture(1)),
    ),
    "WanImageToVideoPipeline expand_timesteps": Exam(
        lambda: wan_image(transformer=tiny("Wan"), expand_timesteps=True), wan_image_call()
    ),
    "WanVideoToVideoPipeline": Exam(
        lambda: build(
            diffusers.WanVideoToVideoPipeline,
            transformer=tiny("Wan"),
            vae=wan_vae(),
            scheduler=unipc(),
        ),
        asked(lambda p: {**wan_words(p), **SIZE, "video": film(), "strength": 0.7, "num_inference_steps": 3}),
    ),
    "WanVACEPipeline": wan_vace(False),
    "WanVACEPipeline reference": wan_vace(True),
    "WanAnimatePipeline": wan_animate("animate"),
    "WanAnimatePipeline replace": wan_animate("replace"),
}


# --- LTX, HunyuanVideo, CogVideoX --------------------------------------------------------------------------------------

WIDE = {"height": 96, "width": 160}  # LTX's latents are 32 pixels wide and high and 8 frames long


@cache
def ltx_vae() -> nn.Module:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )
    return stirred(model.eval())


def ltx(pipeline: type, **parts: Any) -> Any:
    return build(
        pipeline, **{"transformer": tiny("LTX"), "vae": ltx_vae(), "scheduler": flow(), **reads(), **parts}
    )


def ltx_call(**more: Any) -> Callable[[list[int]], dict[str, Any]]:
    return asked(lambda p: {**guided(p), **WIDE, "num_frames": 9, "max_sequence_length": 24, **more})


def each(prompts: list[int], one: Any) -> Any:
    """One thing for one prompt, a list of as many for several."""
    return one if len(prompts) == 1 else [one] * len(prompts)


def ltx_conditions() -> list[Any]:
    """A picture at the beginning, another one later."""
    return [
        LTXVideoCondition(image=picture(width=160, height=96), frame_index=0),
        LTXVideoCondition(image=picture(1, width=160, height=96), frame_index=8, strength=0.8),
    ]


LTX: dict[str, Exam] = {
    "LTXPipeline": Exam(lambda: ltx(diffusers.LTXPipeline), ltx_call(num_frames=17)),
    "LTXImageToVideoPipeline": Exam(
        lambda: ltx(diffusers.LTXImageToVideoPipeline),
        lambda p: ltx_call(image=each(p, picture(width=160, height=96)))(p),
    ),
    "LTXConditionPipeline": Exam(
        lambda: ltx(diffusers.LTXConditionPipeline), alone(ltx_call(conditions=ltx_conditions()))
    ),
    "LTXI2VLongMultiPromptPipeline": Exam(
        lambda: ltx(
            diffusers.LTXI2VLongMultiPromptPipeline, scheduler=diffusers.LTXEulerAncestralRFScheduler()
        ),
        alone(
            lambda p: {
                **ltx_call(
                    prompt=f"{words(p)} | sunset",
                    cond_image=picture(width=160, height=96),
                    guidance_scale=3.0,
                    # Two windows, of three latents each.
                    num_frames=33,
                    temporal_tile_size=24,
                    temporal_overlap=8,
                    seed=None,
                    num_inference_steps=3,
                )(p),
            }
        ),
        several=False,
    ),
}


@cache
def hunyuan_vae() -> nn.Module:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    return stirred(model.eval())


@cache
def siglip(width: int) -> dict[str, Any]:
    """The parts of a pipeline that look at an image: 4 tokens."""
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(
        hidden_size=width, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    processor = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    return {"image_encoder": transformers.SiglipVisionModel(config).eval(), "feature_extractor": processor}


def hunyuan_words(prompts: list[int], width: int = WIDTH, pooled: int = 16) -> dict[str, Any]:
    """Embeddings of words, and one of the whole prompt."""
    return {
        **text(prompts, "prompt_attention_mask", (12, width), dtype=torch.bool),
        "pooled_prompt_embeds": noise(prompts, pooled),
        "negative_pooled_prompt_embeds": noise([more_pipelines.NEGATIVE] * len(prompts), pooled),
        "true_cfg_scale": 3.0,
    }


def hunyuan(pipeline: type, transformer: nn.Module, **parts: Any) -> Any:
    return build(pipeline, **{"transformer": transformer, "vae": hunyuan_vae(), "scheduler": flow(), **parts})


def hunyuan_call(**more: Any) -> Callable[[list[int]], dict[str, Any]]:
    return asked(
        lambda p: {**hunyuan_words(p), **SIZE, "num_frames": FRAMES, "image": each(p, picture()), **more}
    )


def hunyuan_15_image() -> Any:
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8), layers_per_block=1, spatial_compression_ratio=4
    )
    return build(
        diffusers.HunyuanVideo15ImageToVideoPipeline,
        transformer=variant("HunyuanVideo15", in_channels=9, target_size=32),
        vae=stirred(vae.eval()),
        scheduler=flow(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
        **siglip(16),
    )


def framepack(**more: Any) -> Exam:
    return Exam(
        lambda: hunyuan(
            diffusers.HunyuanVideoFramepackPipeline,
            classes.CASES["HunyuanVideoFramepackTransformer3DModel"].make(),
            scheduler=flow(shift=7.0, use_dynamic_shifting=True),
            **siglip(10),
        ),
        asked(
            lambda p: {
                **hunyuan_words(p, classes.TEXT_DIM, 14),
                **SIZE,
                "image": each(p, picture()),
                # Two sections of three latents.
                "num_frames": 13,
                "latent_window_size": 3,
                **more,
            }
        ),
    )


HUNYUAN: dict[str, Exam] = {
    "HunyuanVideoPipeline": family("hunyuan_video"),
    "HunyuanVideoImageToVideoPipeline": Exam(
        lambda: hunyuan(diffusers.HunyuanVideoImageToVideoPipeline, tiny("HunyuanVideo I2V")), hunyuan_call()
    ),
    "HunyuanVideoImageToVideoPipeline latent concat": Exam(
        lambda: hunyuan(
            diffusers.HunyuanVideoImageToVideoPipeline,
            variant("HunyuanVideo", in_channels=9, image_condition_type="latent_concat"),
        ),
        hunyuan_call(),
    ),
    "HunyuanSkyreelsImageToVideoPipeline": Exam(
        lambda: hunyuan(diffusers.HunyuanSkyreelsImageToVideoPipeline, variant("HunyuanVideo", in_channels=8)),
        hunyuan_call(),
    ),
    "HunyuanVideoFramepackPipeline": framepack(),
    "HunyuanVideoFramepackPipeline vanilla": framepack(sampling_type="vanilla"),
    "HunyuanVideo15Pipeline": family("hunyuan_video_15"),
    "HunyuanVideo15ImageToVideoPipeline": Exam(
        hunyuan_15_image,
        asked(
            lambda p: {
                **text(p, "prompt_embeds_mask"),
                **text(p, "prompt_embeds_mask", (5, 24), suffix="_2"),
                "image": picture(width=64, height=64),
                "num_frames": FRAMES,
            }
        ),
    ),
}


@cache
def cog_vae() -> nn.Module:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLCogVideoX(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2
    )
    return stirred(model.eval())


def cog(pipeline: type, beside: bool = True, **parts: Any) -> Any:
    """``beside``: latents of an image or of a guide stand beside the noise."""
    return build(
        pipeline,
        **{
            "transformer": variant("CogVideoX", in_channels=8) if beside else tiny("CogVideoX"),
            "vae": cog_vae(),
            "scheduler": diffusers.CogVideoXDPMScheduler(),
            **reads(),
            **parts,
        },
    )


def cog_call(**more: Any) -> Callable[[list[int]], dict[str, Any]]:
    return asked(lambda p: {**guided(p), **SIZE, "num_frames": FRAMES, "max_sequence_length": 24, **more})


COGVIDEO: dict[str, Exam] = {
    "CogVideoXPipeline": Exam(lambda: cog(diffusers.CogVideoXPipeline, False), cog_call()),
    "CogVideoXPipeline dynamic guidance": Exam(
        lambda: cog(diffusers.CogVideoXPipeline, False, scheduler=diffusers.CogVideoXDDIMScheduler()),
        cog_call(use_dynamic_cfg=True),
    ),
    "CogVideoXImageToVideoPipeline": Exam(
        lambda: cog(diffusers.CogVideoXImageToVideoPipeline), lambda p: cog_call(image=each(p, picture()))(p)
    ),
    "CogVideoXVideoToVideoPipeline": Exam(
        lambda: cog(diffusers.CogVideoXVideoToVideoPipeline, False),
        lambda p: cog_call(
            video=film() if len(p) == 1 else [film()] * len(p), num_frames=..., num_inference_steps=3
        )(p),
    ),
    "CogVideoXFunControlPipeline": Exam(
        lambda: cog(diffusers.CogVideoXFunControlPipeline), cog_call(control_video=film(), num_frames=...)
    ),
}


# --- SkyReels, Lucy, ChronoEdit --------------------------------------------------------------------------------------


def sky_reels(pipeline: type, case: str = "", **parts: Any) -> Any:
    make = others.CASES[f"SkyReelsV2Transformer3DModel{case}"].make
    changes = {"in_channels": 12} if "image" in case else {}
    return build(
        pipeline, **{"transformer": changed(make, **changes), "vae": wan_vae(), "scheduler": unipc(8.0), **parts}
    )


def sky_call(tokens: int = 24, **more: Any) -> Callable[[list[int]], dict[str, Any]]:
    return asked(lambda p: {**wan_words(p, others.TEXT_DIM, tokens), **SIZE, "num_frames": FRAMES, **more})


FORCING = " + diffusion forcing"

SKYREELS: dict[str, Exam] = {
    "SkyReelsV2Pipeline": Exam(lambda: sky_reels(diffusers.SkyReelsV2Pipeline), sky_call()),
    "SkyReelsV2ImageToVideoPipeline": Exam(
        lambda: sky_reels(diffusers.SkyReelsV2ImageToVideoPipeline, " + image", **looks(10)),
        sky_call(512, image=picture()),
    ),
    "SkyReelsV2DiffusionForcingPipeline": Exam(
        lambda: sky_reels(diffusers.SkyReelsV2DiffusionForcingPipeline, FORCING),
        sky_call(prompt=None, base_num_frames=FRAMES),
    ),
    "SkyReelsV2DiffusionForcingPipeline asynchronous": Exam(
        lambda: sky_reels(diffusers.SkyReelsV2DiffusionForcingPipeline, FORCING),
        sky_call(prompt=None, base_num_frames=FRAMES, ar_step=1, causal_block_size=1),
    ),
    "SkyReelsV2DiffusionForcingPipeline long": Exam(
        lambda: sky_reels(diffusers.SkyReelsV2DiffusionForcingPipeline, FORCING),
        sky_call(prompt=None, num_frames=13, base_num_frames=FRAMES, overlap_history=5, addnoise_condition=20),
    ),
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": Exam(
        lambda: sky_reels(diffusers.SkyReelsV2DiffusionForcingImageToVideoPipeline, FORCING),
        sky_call(image=picture(), base_num_frames=FRAMES),
    ),
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": Exam(
        lambda: sky_reels(diffusers.SkyReelsV2DiffusionForcingVideoToVideoPipeline, FORCING),
        sky_call(video=film(), num_frames=17, base_num_frames=FRAMES, overlap_history=5, addnoise_condition=20),
    ),
}

EDITS: dict[str, Exam] = {
    "LucyEditPipeline": Exam(
        lambda: build(
            diffusers.LucyEditPipeline,
            transformer=variant("Wan", in_channels=8),
            vae=wan_vae(),
            scheduler=unipc(),
        ),
        asked(lambda p: {**wan_words(p), **SIZE, "num_frames": FRAMES, "video": film()}),
    ),
    "ChronoEditPipeline": Exam(
        lambda: build(
            diffusers.ChronoEditPipeline,
            transformer=changed(classes.CASES["ChronoEditTransformer3DModel"].make, in_channels=12),
            vae=wan_vae(),
            scheduler=unipc(),
            **looks(10),
        ),
        asked(
            lambda p: {
                **wan_words(p, classes.TEXT_DIM, 512),
                **SIZE,
                "num_frames": 13,
                "image": picture(),
                "enable_temporal_reasoning": True,
                "num_temporal_reasoning_steps": 1,
            }
        ),
    ),
}

EXAMS: dict[str, Exam] = {**WAN, **LTX, **HUNYUAN, **COGVIDEO, **SKYREELS, **EDITS}
