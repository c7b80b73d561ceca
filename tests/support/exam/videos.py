"""Pipelines that make videos, of tiny random parts, called as diffusers' documentation calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from torch import nn

from support import more_pipelines
from support.classes import others
from support.classes import videos as classes
from support.exam import Exam, generators
from support.models import stirred, tiny, variant
from support.more_pipelines import FAMILIES, Unguarded, build, flow, mask, noise, text

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
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


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
    """What Wan's text encoder makes of prompts, zeros behind the last word; its pipelines read none without ftfy."""
    given = text(prompts, shape=(tokens, width))
    for name, numbers in (
        ("prompt_embeds", prompts),
        ("negative_prompt_embeds", [more_pipelines.NEGATIVE] * len(prompts)),
    ):
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
    "WanImageToVideoPipeline": Exam(lambda: wan_image(transformer=i2v_wan(sees=True), **looks()), wan_image_call()),
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


# --- LTX, HunyuanVideo, CogVideoX ------------------------------------------------------------------------------------

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
    return build(pipeline, **{"transformer": tiny("LTX"), "vae": ltx_vae(), "scheduler": flow(), **reads(), **parts})


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
        lambda: ltx(diffusers.LTXConditionPipeline), alone(ltx_call(conditions=ltx_conditions())), several=False
    ),
    "LTXI2VLongMultiPromptPipeline": Exam(
        lambda: ltx(diffusers.LTXI2VLongMultiPromptPipeline, scheduler=diffusers.LTXEulerAncestralRFScheduler()),
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
    return asked(lambda p: {**hunyuan_words(p), **SIZE, "num_frames": FRAMES, "image": each(p, picture()), **more})


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
        lambda p: cog_call(video=each(p, film()), num_frames=..., num_inference_steps=3)(p),
    ),
    "CogVideoXFunControlPipeline": Exam(
        lambda: cog(diffusers.CogVideoXFunControlPipeline, scheduler=diffusers.CogVideoXDDIMScheduler()),
        cog_call(control_video=film(), num_frames=...),
        several=False,
    ),
}


# --- SkyReels, Lucy, ChronoEdit --------------------------------------------------------------------------------------


def sky_reels(pipeline: type, case: str = "", **parts: Any) -> Any:
    make = others.CASES[f"SkyReelsV2Transformer3DModel{case}"].make
    changes = {"in_channels": 12} if "image" in case else {"inject_sample_info": "forcing" in case}
    return build(
        pipeline, **{"transformer": changed(make, **changes), "vae": wan_vae(), "scheduler": unipc(8.0), **parts}
    )


def sky_call(tokens: int = 24, **more: Any) -> Callable[[list[int]], dict[str, Any]]:
    return asked(lambda p: {**wan_words(p, others.TEXT_DIM, tokens), **SIZE, "num_frames": FRAMES, **more})


def forced(pipeline: type, timed: bool = False, **more: Any) -> Exam:
    """``timed``: the model is told the number of frames a second, for which diffusers takes one prompt at a time."""
    return Exam(
        lambda: sky_reels(pipeline, " + diffusion forcing" if timed else ""),
        sky_call(base_num_frames=FRAMES, **{"prompt": None, **more}),
        several=not timed,
    )


SKYREELS: dict[str, Exam] = {
    "SkyReelsV2Pipeline": Exam(lambda: sky_reels(diffusers.SkyReelsV2Pipeline), sky_call()),
    "SkyReelsV2ImageToVideoPipeline": Exam(
        lambda: sky_reels(diffusers.SkyReelsV2ImageToVideoPipeline, " + image", **looks(10)),
        sky_call(512, image=picture()),
    ),
    "SkyReelsV2DiffusionForcingPipeline": forced(diffusers.SkyReelsV2DiffusionForcingPipeline),
    "SkyReelsV2DiffusionForcingPipeline frames a second": forced(
        diffusers.SkyReelsV2DiffusionForcingPipeline, True, fps=16
    ),
    "SkyReelsV2DiffusionForcingPipeline asynchronous": forced(
        diffusers.SkyReelsV2DiffusionForcingPipeline, ar_step=1, causal_block_size=1
    ),
    "SkyReelsV2DiffusionForcingPipeline long": forced(
        diffusers.SkyReelsV2DiffusionForcingPipeline, num_frames=13, overlap_history=5, addnoise_condition=20
    ),
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": forced(
        diffusers.SkyReelsV2DiffusionForcingImageToVideoPipeline, image=picture()
    ),
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": forced(
        diffusers.SkyReelsV2DiffusionForcingVideoToVideoPipeline,
        video=film(),
        num_frames=17,
        overlap_history=5,
        addnoise_condition=20,
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
        asked(
            lambda p: {
                **wan_words(p),
                **SIZE,
                "num_frames": FRAMES,
                "video": each(p, film()),
            }
        ),
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


# --- Cosmos ----------------------------------------------------------------------------------------------------------


def cosmos(pipeline: type, **parts: Any) -> Any:
    """Latents and a mask of the frames that are given."""
    given = {"transformer": variant("Cosmos", in_channels=5), "vae": wan_vae(), "safety_checker": Unguarded()}
    return build(pipeline, **{**given, "scheduler": flow(use_karras_sigmas=True), **parts})


def cosmos_call(**more: Any) -> Callable[[list[int]], dict[str, Any]]:
    return asked(lambda p: {**text(p), **SIZE, "num_frames": FRAMES, **more})


def cosmos_control() -> dict[str, Any]:
    """The parts of Cosmos-Transfer: a transformer that takes residuals, and what makes them."""
    module = import_module("diffusers.models.controlnets.controlnet_cosmos")
    if not hasattr(module, "transforms"):
        # The one function that it needs torchvision for.
        module.transforms = SimpleNamespace(
            functional=SimpleNamespace(resize=lambda image, size, interpolation: F.interpolate(image, size)),
            InterpolationMode=SimpleNamespace(NEAREST="nearest"),
        )
    torch.manual_seed(0)
    controlnet = diffusers.CosmosControlNetModel(
        n_controlnet_blocks=2,
        # Latents, a mask of given frames and padding; the control has as many.
        in_channels=6,
        latent_channels=6,
        model_channels=others.DIM,
        num_attention_heads=others.HEADS,
        attention_head_dim=others.HEAD_DIM,
        mlp_ratio=2,
        text_embed_dim=others.TEXT_DIM,
        adaln_lora_dim=8,
        max_size=(8, 32, 32),
        img_context_dim_in=10,
        img_context_dim_out=others.DIM,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=10,
        encoder_hidden_states_channels=others.TEXT_DIM,
    )
    return {
        "transformer": others.CASES["CosmosTransformer3DModel + ControlNet and image"].make(),
        "controlnet": stirred(controlnet.eval()),
    }


@cache
def cosmos_vae() -> nn.Module:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        latents_mean=None,
        latents_std=None,
    )
    return stirred(model.eval())


@cache
def talker() -> Any:
    """A tokenizer of conversations."""
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    made.add_special_tokens({"additional_special_tokens": ["<|vision_start|>"]})
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return made


COSMOS: dict[str, Exam] = {
    "CosmosTextToWorldPipeline": family("cosmos"),
    "CosmosVideoToWorldPipeline": Exam(
        lambda: cosmos(
            diffusers.CosmosVideoToWorldPipeline,
            vae=cosmos_vae(),
            scheduler=diffusers.EDMEulerScheduler(
                sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras", final_sigmas_type="sigma_min"
            ),
        ),
        lambda p: cosmos_call(video=each(p, film()), num_frames=17)(p),
    ),
    "Cosmos2TextToImagePipeline": family("cosmos2"),
    "Cosmos2VideoToWorldPipeline": Exam(
        lambda: cosmos(diffusers.Cosmos2VideoToWorldPipeline), lambda p: cosmos_call(image=each(p, picture()))(p)
    ),
    "Cosmos2_5_PredictBasePipeline": Exam(
        lambda: cosmos(diffusers.Cosmos2_5_PredictBasePipeline, scheduler=unipc()), cosmos_call()
    ),
    "Cosmos2_5_PredictBasePipeline video": Exam(
        lambda: cosmos(diffusers.Cosmos2_5_PredictBasePipeline, scheduler=unipc()),
        cosmos_call(video=film(), num_frames=13),
        several=False,
    ),
    "Cosmos2_5_TransferPipeline": Exam(
        lambda: cosmos(diffusers.Cosmos2_5_TransferPipeline, scheduler=unipc(), **cosmos_control()),
        asked(
            lambda p: {
                **text(p, shape=(12, 10)),
                **SIZE,
                "controls": film(),
                "num_frames": FRAMES,
                "num_frames_per_chunk": FRAMES,
            }
        ),
    ),
    "Cosmos3OmniPipeline": Exam(
        lambda: build(
            diffusers.Cosmos3OmniPipeline,
            transformer=changed(classes.CASES["Cosmos3OmniTransformer"].make, vocab_size=len(talker())),
            text_tokenizer=talker(),
            vae=wan_vae(),
            scheduler=unipc(),
            enable_safety_checker=False,
            default_use_system_prompt=False,
        ),
        asked(
            lambda p: {
                **guided(p),
                **SIZE,
                "image": picture(),
                "num_frames": FRAMES,
                "add_resolution_template": False,
                "add_duration_template": False,
            }
        ),
        several=False,
    ),
}


# --- pipelines whose transformers have no reviewed layout ------------------------------------------------------------


def of_class(
    pipeline: type, transformer: str, changes: dict[str, Any] | None = None, **parts: Any
) -> Callable[[], Any]:
    """A maker of a pipeline around the tiny transformer of a class."""
    make = classes.CASES[transformer].make
    return lambda: build(pipeline, transformer=changed(make, **changes) if changes else make(), **parts)


def class_words(prompts: list[int], masked: str = "", tokens: int = 12, **more: Any) -> dict[str, Any]:
    return text(prompts, masked, (tokens, classes.TEXT_DIM), **more)


def anyflow(pipeline: type, transformer: str, refused: dict[str, str] | None = None, **more: Any) -> Exam:
    return Exam(
        lambda: build(
            pipeline,
            transformer=classes.CASES[transformer].make(),
            vae=wan_vae(),
            scheduler=diffusers.FlowMapEulerDiscreteScheduler(),
        ),
        asked(
            lambda p: {
                **wan_words(p, classes.TEXT_DIM),
                **SIZE,
                "num_frames": FRAMES,
                "guidance_scale": 3.0,
                **more,
            }
        ),
        refused=refused or {},
    )


@cache
def magvit() -> nn.Module:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLMagvit(
        latent_channels=4, block_out_channels=[8, 8, 8, 8], layers_per_block=1, norm_num_groups=4
    )
    return stirred(model.eval())


def frames_of(prompts: list[int], channels: int = 3) -> torch.Tensor:
    """(P, C, F, H, W): a film for every prompt, values of 0 to 1."""
    values = torch.from_numpy(np.stack([np.asarray(frame) for frame in film()])).float() / 255
    return values.permute(3, 0, 1, 2)[None, :channels].repeat(len(prompts), 1, 1, 1, 1)


def right_half(prompts: list[int]) -> torch.Tensor:
    """(P, 1, F, H, W): 255 where the film is to be painted."""
    made = torch.zeros(len(prompts), 1, FRAMES, HEIGHT, COLUMNS)
    made[..., COLUMNS // 2 :] = 255
    return made


def easyanimate(pipeline: type, channels: int, given: Callable[[list[int]], dict[str, Any]]) -> Exam:
    return Exam(
        lambda: build(
            pipeline,
            transformer=changed(
                classes.CASES["EasyAnimateTransformer3DModel"].make,
                in_channels=channels,
                resize_inpaint_mask_directly=False,
            ),
            vae=magvit(),
            scheduler=flow(),
        ),
        asked(
            lambda p: {
                **class_words(p, "prompt_attention_mask"),
                **SIZE,
                "num_frames": FRAMES,
                **given(p),
            }
        ),
    )


HELIOS_HISTORY = {"num_latent_frames_per_chunk": 3, "history_sizes": [16, 2, 1]}


def helios_call(**more: Any) -> Callable[[list[int]], dict[str, Any]]:
    return asked(
        lambda p: {
            **wan_words(p, classes.TEXT_DIM),
            **SIZE,
            **HELIOS_HISTORY,
            # Two chunks.
            "num_frames": 13,
            **more,
        }
    )


def motif(pipeline: type, transformer: str, **parts: Any) -> Callable[[], Any]:
    return of_class(
        pipeline,
        transformer,
        vae=wan_vae(),
        scheduler=flow(use_dynamic_shifting=True),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
        **parts,
    )


def motif_call(**more: Any) -> Callable[[list[int]], dict[str, Any]]:
    return asked(lambda p: {**class_words(p, "prompt_attention_mask"), **SIZE, "num_frames": FRAMES, **more})


def sana_video(pipeline: type, **more: Any) -> Exam:
    return Exam(
        lambda: build(
            pipeline,
            transformer=classes.CASES["SanaVideoTransformer3DModel"].make(),
            vae=wan_vae(),
            scheduler=flow(shift=3.0),
        ),
        asked(
            lambda p: {
                **class_words(p, "prompt_attention_mask"),
                "height": 64,
                "width": 96,
                "negative_prompt": None,
                "frames": FRAMES,
                "use_resolution_binning": False,
                **more,
            }
        ),
        # Its feed-forward unfolds the tokens to frames, rows and columns.
        refused={"tokens": "Conv2d"},
    )


OTHERS: dict[str, Exam] = {
    "MochiPipeline": family("mochi"),
    "LattePipeline": family("latte"),
    "AllegroPipeline": Exam(
        of_class(
            diffusers.AllegroPipeline,
            "AllegroTransformer3DModel",
            scheduler=diffusers.EulerAncestralDiscreteScheduler(),
        ),
        asked(
            lambda p: {
                **class_words(p, "prompt_attention_mask"),
                **SIZE,
                "negative_prompt": None,
                "num_frames": 12,
            }
        ),
    ),
    "AnyFlowPipeline": anyflow(diffusers.AnyFlowPipeline, "AnyFlowTransformer3DModel"),
    "AnyFlowFARPipeline": anyflow(
        diffusers.AnyFlowFARPipeline,
        "AnyFlowFARTransformer3DModel",
        # Another backend; and caches whose second dimension is the batch.
        {"tokens": "queries", "cfg=2": "cannot be run apart", "data=2": "cannot be run apart"},
        num_frames=17,
        height=64,
        width=96,
    ),
    "EasyAnimatePipeline": easyanimate(diffusers.EasyAnimatePipeline, 4, lambda p: {}),
    # EasyAnimateControlPipeline of diffusers 0.42 gives its encode_prompt arguments that it does not take.
    "EasyAnimateInpaintPipeline": easyanimate(
        diffusers.EasyAnimateInpaintPipeline,
        12,
        lambda p: {"video": frames_of(p), "mask_video": right_half(p), "generator": generators(p)[0]},
    ),
    "HeliosPipeline": Exam(
        of_class(
            diffusers.HeliosPipeline,
            "HeliosTransformer3DModel",
            vae=wan_vae(),
            scheduler=diffusers.HeliosScheduler(stages=1, stage_range=[0, 1], gamma=1 / 3),
        ),
        helios_call(),
    ),
    "HeliosPyramidPipeline": Exam(
        of_class(
            diffusers.HeliosPyramidPipeline,
            "HeliosTransformer3DModel",
            vae=wan_vae(),
            # With the usual third the noise of a block has no variance in one direction, which rounding may make less.
            scheduler=diffusers.HeliosScheduler(gamma=0.3),
        ),
        # Three stages, each twice as large: the last is 8x16 latents.
        helios_call(
            height=64, width=128, num_frames=9, num_inference_steps=..., pyramid_num_inference_steps_list=[2, 2, 2]
        ),
    ),
    "MotifVideoPipeline": Exam(motif(diffusers.MotifVideoPipeline, "MotifVideoTransformer3DModel plain"), motif_call()),
    "MotifVideoPipeline decoders": Exam(
        motif(diffusers.MotifVideoPipeline, "MotifVideoTransformer3DModel"), motif_call()
    ),
    "MotifVideoImage2VideoPipeline": Exam(
        motif(diffusers.MotifVideoImage2VideoPipeline, "MotifVideoTransformer3DModel plain"),
        motif_call(prompt=None, image=picture()),
        several=False,
    ),
    "SanaVideoPipeline": sana_video(diffusers.SanaVideoPipeline),
    "SanaImageToVideoPipeline": sana_video(diffusers.SanaImageToVideoPipeline, image=picture()),
    "ConsisIDPipeline": Exam(
        of_class(
            # diffusers shows it only where OpenCV is, which finds the face.
            import_module("diffusers.pipelines.consisid.pipeline_consisid").ConsisIDPipeline,
            "ConsisIDTransformer3DModel",
            {
                "sample_width": 10,
                "sample_height": 6,
                "max_text_seq_length": 12,
                # A quarter of every head turns by the frame.
                "attention_head_dim": 16,
                "LFE_output_dim": 42,
            },
            vae=cog_vae(),
            scheduler=diffusers.CogVideoXDPMScheduler(),
        ),
        asked(
            lambda p: {
                **class_words(p),
                **SIZE,
                "num_frames": FRAMES,
                "image": each(p, picture()),
                # What is seen of a face.
                "id_vit_hidden": [noise([number], 6, 16) for number in range(2)],
                "id_cond": noise([3], 10),
            }
        ),
    ),
}


# --- Kandinsky -------------------------------------------------------------------------------------------------------


def kandinsky_words(prompts: list[int], tokens: int = 12) -> dict[str, Any]:
    """Embeddings of words, one of the whole prompt, and where prompts that stand one behind another begin."""
    made: dict[str, Any] = {}
    for prefix, numbers in (("", prompts), ("negative_", [more_pipelines.NEGATIVE] * len(prompts))):
        made[f"{prefix}prompt_embeds_qwen"] = noise(numbers, tokens, classes.TEXT_DIM)
        made[f"{prefix}prompt_embeds_clip"] = noise(numbers, 10)
        made[f"{prefix}prompt_cu_seqlens"] = tokens * torch.arange(len(prompts) + 1, dtype=torch.int32)
    return made


def kandinsky(pipeline: type, transformer: str = "Kandinsky5Transformer3DModel") -> Any:
    return of_class(pipeline, transformer, vae=hunyuan_vae(), scheduler=flow(shift=5.0))()


def kandinsky_picture(pipeline: type, edits: bool) -> Any:
    pipe = of_class(
        pipeline, "Kandinsky5Transformer3DModel", {"visual_cond": edits}, vae=image_vae(), scheduler=flow(shift=5.0)
    )()
    # The sizes that the model is made for.
    pipe.resolutions = [(COLUMNS, HEIGHT)]
    return pipe


@cache
def image_vae() -> nn.Module:
    """Eight pixels wide and high are one latent."""
    torch.manual_seed(0)
    model = diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
    )
    return stirred(model.eval())


def kandinsky_call(**more: Any) -> Callable[[list[int]], dict[str, Any]]:
    return asked(lambda p: {**kandinsky_words(p), **SIZE, **more})


def kandinsky6_make() -> Any:
    torch.manual_seed(0)
    return of_class(
        diffusers.Kandinsky6TI2VAPipeline,
        "Kandinsky6Transformer3DModel",
        vae=hunyuan_vae(),
        scheduler=flow(shift=5.0),
        # A sound is drawn where there is what would decode it.
        audio_vae=diffusers.MMAudioVAE(mel_bins=8, latent_channels=6, hidden_channels=8, layers_per_block=1).eval(),
        vocoder=diffusers.MMAudioVocoder(
            num_mels=8, upsample_initial_channel=8, upsample_rates=(2, 2), upsample_kernel_sizes=(4, 4)
        ).eval(),
    )()


def kandinsky6(image: bool = False) -> Exam:
    return Exam(
        kandinsky6_make,
        asked(
            lambda p: {
                **class_words(p),
                "pooled_prompt_embeds": noise(p, 10),
                "negative_pooled_prompt_embeds": noise([more_pipelines.NEGATIVE] * len(p), 10),
                **SIZE,
                "num_frames": FRAMES,
                "image": each(p, picture()) if image else None,
            }
        ),
    )


def kandinsky6_sr() -> Any:
    torch.manual_seed(0)
    vae = diffusers.Kandinsky6SRVAE(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        layers_per_block=1,
    )
    transformer = changed(classes.CASES["Kandinsky6SRTransformer3DModel"].make, tile_sizes=[[64, 64]])
    return build(diffusers.Kandinsky6SRPipeline, transformer=transformer, vae=stirred(vae.eval()), scheduler=flow())


KANDINSKY: dict[str, Exam] = {
    "Kandinsky5T2VPipeline": Exam(lambda: kandinsky(diffusers.Kandinsky5T2VPipeline), kandinsky_call(num_frames=9)),
    "Kandinsky5I2VPipeline": Exam(
        lambda: kandinsky(diffusers.Kandinsky5I2VPipeline),
        lambda p: kandinsky_call(num_frames=17, image=each(p, picture()))(p),
    ),
    "Kandinsky5T2IPipeline": Exam(lambda: kandinsky_picture(diffusers.Kandinsky5T2IPipeline, False), kandinsky_call()),
    "Kandinsky5I2IPipeline": Exam(
        lambda: kandinsky_picture(diffusers.Kandinsky5I2IPipeline, True),
        lambda p: kandinsky_call(image=each(p, picture()))(p),
    ),
    "Kandinsky6TI2VAPipeline": kandinsky6(),
    "Kandinsky6TI2VAPipeline image": kandinsky6(True),
    "Kandinsky6SRPipeline": Exam(
        kandinsky6_sr,
        asked(
            lambda p: {
                "video": [film(1, 3 * one, 40, 32) for one in p],
                "resolution_scale": 2,
                "tiles_batch_size": 2,
                "output_type": "pt",
            }
        ),
        guidance=False,
    ),
}

# --- LTX-2, with sound -----------------------------------------------------------------------------------------------


@cache
def ltx2_vae(channels: int) -> nn.Module:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLLTX2Video(
        latent_channels=channels,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    return stirred(model.eval())


def ltx2(pipeline: type, transformer: str = "LTX2", changes: dict[str, Any] | None = None, **more: Any) -> Any:
    """The parts of the tiny LTX-2 in another pipeline."""
    asked_for = inspect.signature(pipeline.__init__).parameters
    parts = {name: part for name, part in more_pipelines.ltx2().components.items() if name in asked_for}
    parts["vae"] = ltx2_vae(8)
    parts["transformer"] = variant(transformer, audio_in_channels=16, audio_out_channels=16, **(changes or {}))
    return build(pipeline, **{**parts, **more})


def ltx2_words(prompts: list[int]) -> dict[str, Any]:
    return text(prompts, "prompt_attention_mask", (12, 2 * WIDTH))


def ltx2_call(**more: Any) -> Callable[[list[int]], dict[str, Any]]:
    given = {**WIDE, "num_frames": 9, "stg_scale": 0.0, "audio_stg_scale": 0.0}
    return asked(lambda p: {**ltx2_words(p), **given, **more})


def ltx2_keyframes() -> list[Any]:
    """A picture at the beginning, another one at the second latent; not recompressed, which takes another package."""
    return [
        LTX2VideoCondition(frames=picture(width=160, height=96), index=0, crf=0),
        LTX2VideoCondition(frames=picture(1, 160, 96), index=1, strength=0.8, crf=0),
    ]


def dfr(pipeline: type, **more: Any) -> Any:
    """Distilled: without guidance; pictures in between are drawn along."""
    return ltx2(pipeline, changes={"use_keyframes_abs_pos_embedding": True}, **more)


def dfr_call(**more: Any) -> Callable[[list[int]], dict[str, Any]]:
    def made(prompts: list[int]) -> dict[str, Any]:
        words = {key: value for key, value in ltx2_words(prompts).items() if not key.startswith("negative")}
        return {**words, **WIDE, "num_frames": 17, "sigmas": [1.0, 0.5], **more}

    return asked(made, num_inference_steps=...)


@cache
def temporal_upsampler() -> nn.Module:
    torch.manual_seed(0)
    upsampler = import_module("diffusers.pipelines.ltx2").LTX2LatentUpsamplerModel
    model = upsampler(
        in_channels=8, mid_channels=32, num_blocks_per_stage=1, spatial_upsample=False, temporal_upsample=True
    )
    return stirred(model.eval())


LTX2: dict[str, Exam] = {
    "LTX2Pipeline": family("ltx2"),
    "LTX2Pipeline skipped attention": Exam(
        lambda: ltx2(diffusers.LTX2Pipeline, "LTX2 STG"),
        ltx2_call(stg_scale=1.0, audio_stg_scale=1.0, spatio_temporal_guidance_blocks=[1]),
    ),
    "LTX2ImageToVideoPipeline": Exam(
        lambda: ltx2(diffusers.LTX2ImageToVideoPipeline),
        lambda p: ltx2_call(image=each(p, picture(width=160, height=96)), image_crf=0)(p),
    ),
    "LTX2ConditionPipeline": Exam(
        lambda: ltx2(diffusers.LTX2ConditionPipeline), ltx2_call(conditions=ltx2_keyframes())
    ),
    "LTX2InContextPipeline": Exam(
        lambda: ltx2(diffusers.LTX2InContextPipeline),
        ltx2_call(
            reference_conditions=[LTX2ReferenceCondition(frames=film(9, 2, 160, 96))],
            conditioning_attention_strength=0.7,
        ),
    ),
    "LTX2HDRPipeline": Exam(
        lambda: ltx2(diffusers.LTX2HDRPipeline),
        ltx2_call(
            reference_conditions=[LTX2HDRReferenceCondition(frames=film(9, 2, 160, 96))],
            guidance_scale=3.0,
            audio_stg_scale=...,
        ),
    ),
    "LTX2DFRPipeline": Exam(lambda: dfr(diffusers.LTX2DFRPipeline), dfr_call(), guidance=False),
    "LTX2DFRTemporalRefinePipeline": Exam(
        lambda: dfr(
            diffusers.LTX2DFRTemporalRefinePipeline,
            scheduler=diffusers.LTXEulerAncestralRFScheduler(eta=0.5),
            temporal_latent_upsampler=temporal_upsampler(),
        ),
        lambda p: dfr_call(
            # What the pipeline before has drawn.
            latents=noise(p, 8, 3, 3, 5),
            keyframes_latents=noise(p, 8, 2, 3, 5),
            keyframe_positions=[8, 16],
            audio_latents=noise(p, 2, 18, 8),
        )(p),
        guidance=False,
    ),
}


# --- Sana's world model ----------------------------------------------------------------------------------------------


def walk(frames: int) -> np.ndarray:
    """(F, 4, 4): where the camera stands that goes ahead."""
    places = np.eye(4, dtype=np.float32)[None].repeat(frames, 0)
    places[:, 2, 3] = 0.05 * np.arange(frames)
    return places


SANA_WM: dict[str, Exam] = {
    "SanaWMPipeline": Exam(
        of_class(
            diffusers.SanaWMPipeline,
            "SanaWMTransformer3DModel",
            {"chunk_plucker_channels": 48},
            vae=ltx2_vae(4),
            scheduler=flow(shift=3.0),
        ),
        asked(
            lambda p: {
                "image": picture(width=160, height=96),
                "prompt": PROMPTS[p[0]],
                **text(p, "prompt_attention_mask", (1, 12, classes.TEXT_DIM)),
                "prompt_attention_mask": mask(p, 12),
                "negative_prompt_attention_mask": mask([more_pipelines.NEGATIVE], 12),
                **WIDE,
                "c2w": walk(17),
                "intrinsics": [80.0, 80.0, 80.0, 48.0],
                "num_frames": 17,
                "generator": generators(p)[0],
            }
        ),
        several=False,
        # Its attention unfolds the tokens to frames.
        refused={"tokens": "blocks.0"},
    ),
}

EXAMS: dict[str, Exam] = {
    **WAN,
    **LTX,
    **LTX2,
    **HUNYUAN,
    **COGVIDEO,
    **SKYREELS,
    **EDITS,
    **COSMOS,
    **OTHERS,
    **KANDINSKY,
    **SANA_WM,
}
