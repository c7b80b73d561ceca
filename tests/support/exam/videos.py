"""Pipelines that make videos, of tiny random parts, called as diffusers' documentation calls them."""

from __future__ import annotations

import inspect
from functools import cache, partial
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
from support.exam import (
    NARROW,
    NEGATIVE,
    WIDTH,
    Call,
    Exam,
    build,
    each,
    flow,
    latents,
    mask,
    noise,
    one_generator,
    pooled,
    positive,
    text,
    texts,
    unipc,
)
from support.models import fresh, plain, tiny, variant
from support.more_pipelines import Unguarded, edm, family

# Two pictures high, three wide: the tokens of a video are an odd number.
HEIGHT, COLUMNS = 48, 80
SIZE = {"height": HEIGHT, "width": COLUMNS}
FRAMES = 9
FILM = {**SIZE, "num_frames": FRAMES}
PROMPTS = ("blurry", "a red kite over the sea", "two foxes in deep snow look up", "rain")


# --- parts -----------------------------------------------------------------------------------------------------------


def words(prompts: list[int]) -> str | list[str]:
    """The prompts as users write them: one, or several in a list."""
    strings = [PROMPTS[one] for one in prompts]
    return strings[0] if len(strings) == 1 else strings


def guided(prompts: list[int]) -> dict[str, Any]:
    """The prompts, and what to stay away from."""
    return {"prompt": words(prompts), "negative_prompt": words([0] * len(prompts))}


@cache
def tokenizer() -> Any:
    """A tokenizer that knows letters."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", "<unk>", *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=24
    )


@cache
def talker() -> Any:
    """A tokenizer of conversations."""
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    made.add_special_tokens({"additional_special_tokens": ["<|vision_start|>"]})
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return made


def reads() -> dict[str, Any]:
    """The parts of a pipeline that read a prompt."""
    return {"tokenizer": tokenizer(), "text_encoder": plain("umt5")}


def looks(width: int = 16) -> dict[str, Any]:
    """The parts of a pipeline that look at an image: 5 tokens."""
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return {"image_encoder": plain("clip_vision", hidden_size=width), "image_processor": processor}


def siglip(width: int) -> dict[str, Any]:
    """The parts of a pipeline that look at an image: 4 tokens."""
    processor = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    return {"image_encoder": plain("siglip_vision", hidden_size=width), "feature_extractor": processor}


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


# --- Wan and its kin -------------------------------------------------------------------------------------------------


def wan_words(width: int = WIDTH, tokens: int = 24) -> Call:
    """What Wan's text encoder makes of prompts, zeros behind the last word; its pipelines read none without ftfy."""

    def embedded(prompts: list[int]) -> dict[str, Any]:
        given = text(prompts, shape=(tokens, width))
        for name, numbers in (("prompt_embeds", prompts), ("negative_prompt_embeds", [NEGATIVE] * len(prompts))):
            given[name] = given[name] * mask(numbers, tokens)[..., None]
        return given

    return embedded


def wan(pipeline: str, transformer: nn.Module | None = None, **parts: Any) -> Any:
    parts = {"vae": variant("wan_vae"), "scheduler": unipc(), **parts}
    return build(pipeline, transformer=transformer or tiny("Wan"), **parts)


def wan_call(*given: Any, **more: Any) -> Call:
    return latents(wan_words(), FILM, *given, **more)


def wan_image(**more: Any) -> Call:
    # Blocks that see an image take the last 512 tokens for the prompt.
    return latents(wan_words(tokens=512), FILM, image=picture(), **more)


def i2v_wan(sees: bool = False, **changes: Any) -> nn.Module:
    """Latents, those of the image and a mask of four frames each."""
    return variant("Wan I2V" if sees else "Wan", in_channels=12, **changes)


def vace(**more: Any) -> Exam:
    return Exam(
        # Latents of what is kept and of what is painted, and 8x8 values of the mask.
        lambda: wan("WanVACEPipeline", fresh("WanVACETransformer3DModel", vace_in_channels=2 * 4 + 64)),
        latents(wan_words(NARROW), FILM, video=film(), mask=stencil(), generator=one_generator, **more),
        several=False,
    )


def animate(mode: str, **more: Any) -> Exam:
    return Exam(
        lambda: wan("WanAnimatePipeline", fresh("WanAnimateTransformer3DModel"), **looks(10)),
        latents(
            wan_words(NARROW, 512),
            SIZE,
            image=picture(),
            # Two segments.
            pose_video=film(13, 2),
            face_video=film(13, 6, 16, 16),
            segment_frame_length=FRAMES,
            guidance_scale=3.0,
            mode=mode,
            **more,
        ),
    )


WAN: dict[str, Exam] = {
    "WanPipeline": Exam(lambda: wan("WanPipeline"), wan_call()),
    "WanPipeline two transformers": Exam(
        lambda: wan("WanPipeline", transformer_2=variant("Wan", ffn_dim=80), boundary_ratio=0.875),
        wan_call(guidance_scale_2=4.0, num_inference_steps=3),
    ),
    "WanPipeline expand_timesteps": Exam(lambda: wan("WanPipeline", expand_timesteps=True), wan_call()),
    "WanImageToVideoPipeline": Exam(lambda: wan("WanImageToVideoPipeline", i2v_wan(sees=True), **looks()), wan_image()),
    "WanImageToVideoPipeline two transformers": Exam(
        lambda: wan("WanImageToVideoPipeline", i2v_wan(), transformer_2=i2v_wan(ffn_dim=80), boundary_ratio=0.875),
        wan_image(num_inference_steps=3),
    ),
    "WanImageToVideoPipeline last image": Exam(
        lambda: wan("WanImageToVideoPipeline", i2v_wan(sees=True, pos_embed_seq_len=10), **looks()),
        wan_image(last_image=picture(1)),
    ),
    "WanImageToVideoPipeline expand_timesteps": Exam(
        lambda: wan("WanImageToVideoPipeline", expand_timesteps=True), wan_image()
    ),
    "WanVideoToVideoPipeline": Exam(
        lambda: wan("WanVideoToVideoPipeline"),
        latents(wan_words(), SIZE, video=film(), strength=0.7, num_inference_steps=3),
    ),
    "WanVACEPipeline": vace(),
    "WanVACEPipeline reference": vace(reference_images=[picture(7)]),
    "WanAnimatePipeline": animate("animate"),
    "WanAnimatePipeline replace": animate("replace", background_video=film(13, 4), mask_video=stencil(13)),
    "LucyEditPipeline": Exam(
        lambda: wan("LucyEditPipeline", variant("Wan", in_channels=8)), wan_call(video=each(film()))
    ),
    "ChronoEditPipeline": Exam(
        lambda: wan("ChronoEditPipeline", fresh("ChronoEditTransformer3DModel", in_channels=12), **looks(10)),
        latents(
            wan_words(NARROW, 512),
            SIZE,
            num_frames=13,
            image=picture(),
            enable_temporal_reasoning=True,
            num_temporal_reasoning_steps=1,
        ),
    ),
}


def sky_reels(pipeline: str, kind: str = "", **parts: Any) -> Any:
    changes = {"in_channels": 12} if "image" in kind else {"inject_sample_info": "forcing" in kind}
    return wan(pipeline, fresh(f"SkyReelsV2Transformer3DModel{kind}", **changes), scheduler=unipc(8.0), **parts)


def forced(pipeline: str, timed: bool = False, **more: Any) -> Exam:
    """``timed``: the model is told the number of frames a second, for which diffusers takes one prompt at a time."""
    return Exam(
        lambda: sky_reels(pipeline, " + diffusion forcing" if timed else ""),
        latents(wan_words(NARROW), FILM, **{"base_num_frames": FRAMES, "prompt": None, **more}),
        several=not timed,
    )


SKYREELS: dict[str, Exam] = {
    "SkyReelsV2Pipeline": Exam(lambda: sky_reels("SkyReelsV2Pipeline"), latents(wan_words(NARROW), FILM)),
    "SkyReelsV2ImageToVideoPipeline": Exam(
        lambda: sky_reels("SkyReelsV2ImageToVideoPipeline", " + image", **looks(10)),
        latents(wan_words(NARROW, 512), FILM, image=picture()),
    ),
    "SkyReelsV2DiffusionForcingPipeline": forced("SkyReelsV2DiffusionForcingPipeline"),
    "SkyReelsV2DiffusionForcingPipeline frames a second": forced("SkyReelsV2DiffusionForcingPipeline", True, fps=16),
    "SkyReelsV2DiffusionForcingPipeline asynchronous": forced(
        "SkyReelsV2DiffusionForcingPipeline", ar_step=1, causal_block_size=1
    ),
    "SkyReelsV2DiffusionForcingPipeline long": forced(
        "SkyReelsV2DiffusionForcingPipeline", num_frames=13, overlap_history=5, addnoise_condition=20
    ),
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": forced(
        "SkyReelsV2DiffusionForcingImageToVideoPipeline", image=picture()
    ),
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": forced(
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        video=film(),
        num_frames=17,
        overlap_history=5,
        addnoise_condition=20,
    ),
}


# --- LTX, HunyuanVideo, CogVideoX ------------------------------------------------------------------------------------

WIDE = {"height": 96, "width": 160}  # LTX's latents are 32 pixels wide and high and 8 frames long
wide_picture = partial(picture, width=160, height=96)


def ltx(pipeline: str, **parts: Any) -> Any:
    vae = variant("AutoencoderKLLTXVideo", latent_channels=8)
    return build(pipeline, **{"transformer": tiny("LTX"), "vae": vae, "scheduler": flow(), **reads(), **parts})


def ltx_call(**more: Any) -> Call:
    return latents(guided, WIDE, num_frames=9, max_sequence_length=24, **more)


LTX: dict[str, Exam] = {
    "LTXPipeline": Exam(lambda: ltx("LTXPipeline"), latents(ltx_call(), num_frames=17)),
    "LTXImageToVideoPipeline": Exam(lambda: ltx("LTXImageToVideoPipeline"), ltx_call(image=each(wide_picture()))),
    # A picture at the beginning, another one later.
    "LTXConditionPipeline": Exam(
        lambda: ltx("LTXConditionPipeline"),
        ltx_call(
            conditions=[
                LTXVideoCondition(image=wide_picture(), frame_index=0),
                LTXVideoCondition(image=wide_picture(1), frame_index=8, strength=0.8),
            ],
            generator=one_generator,
        ),
        several=False,
    ),
    "LTXI2VLongMultiPromptPipeline": Exam(
        lambda: ltx("LTXI2VLongMultiPromptPipeline", scheduler=diffusers.LTXEulerAncestralRFScheduler()),
        latents(
            ltx_call(),
            prompt=lambda p: f"{words(p)} | sunset",
            cond_image=wide_picture(),
            guidance_scale=3.0,
            # Two windows, of three latents each.
            num_frames=33,
            temporal_tile_size=24,
            temporal_overlap=8,
            seed=None,
            num_inference_steps=3,
            generator=one_generator,
        ),
        several=False,
    ),
}


def hunyuan_words(width: int = WIDTH, whole: int = 16) -> Call:
    """Embeddings of words, and one of the whole prompt."""
    masked = texts("prompt_attention_mask", (12, width), dtype=torch.bool)
    return lambda p: {**masked(p), **pooled(whole)(p), "true_cfg_scale": 3.0}


def hunyuan(pipeline: str, transformer: nn.Module, **parts: Any) -> Any:
    return build(pipeline, **{"transformer": transformer, "vae": variant("hunyuan_vae"), "scheduler": flow(), **parts})


def framepack(**more: Any) -> Exam:
    return Exam(
        lambda: hunyuan(
            "HunyuanVideoFramepackPipeline",
            fresh("HunyuanVideoFramepackTransformer3DModel"),
            scheduler=flow(shift=7.0, use_dynamic_shifting=True),
            **siglip(10),
        ),
        # Two sections of three latents.
        latents(hunyuan_words(NARROW, 14), SIZE, image=each(picture()), num_frames=13, latent_window_size=3, **more),
    )


HUNYUAN_IMAGE = latents(hunyuan_words(), FILM, image=each(picture()))
HUNYUAN: dict[str, Exam] = {
    "HunyuanVideoPipeline": family("hunyuan_video"),
    "HunyuanVideoImageToVideoPipeline": Exam(
        lambda: hunyuan("HunyuanVideoImageToVideoPipeline", tiny("HunyuanVideo I2V")), HUNYUAN_IMAGE
    ),
    "HunyuanVideoImageToVideoPipeline latent concat": Exam(
        lambda: hunyuan(
            "HunyuanVideoImageToVideoPipeline",
            variant("HunyuanVideo", in_channels=9, image_condition_type="latent_concat"),
        ),
        HUNYUAN_IMAGE,
    ),
    "HunyuanSkyreelsImageToVideoPipeline": Exam(
        lambda: hunyuan("HunyuanSkyreelsImageToVideoPipeline", variant("HunyuanVideo", in_channels=8)), HUNYUAN_IMAGE
    ),
    "HunyuanVideoFramepackPipeline": framepack(),
    "HunyuanVideoFramepackPipeline vanilla": framepack(sampling_type="vanilla"),
    "HunyuanVideo15Pipeline": family("hunyuan_video_15"),
    "HunyuanVideo15ImageToVideoPipeline": Exam(
        lambda: build(
            "HunyuanVideo15ImageToVideoPipeline",
            transformer=variant("HunyuanVideo15", in_channels=9, target_size=32),
            vae=variant("AutoencoderKLHunyuanVideo15"),
            scheduler=flow(),
            guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
            **siglip(16),
        ),
        latents(
            texts("prompt_embeds_mask"),
            texts("prompt_embeds_mask", (5, 24), suffix="_2"),
            image=picture(width=64, height=64),
            num_frames=FRAMES,
        ),
    ),
}


def cog(pipeline: str, beside: bool = True, scheduler: Any = None) -> Any:
    """``beside``: latents of an image or of a guide stand beside the noise."""
    return build(
        pipeline,
        transformer=variant("CogVideoX", in_channels=8) if beside else tiny("CogVideoX"),
        vae=variant("AutoencoderKLCogVideoX"),
        scheduler=scheduler or diffusers.CogVideoXDPMScheduler(),
        **reads(),
    )


def cog_call(**more: Any) -> Call:
    return latents(guided, FILM, max_sequence_length=24, **more)


COGVIDEO: dict[str, Exam] = {
    "CogVideoXPipeline": Exam(lambda: cog("CogVideoXPipeline", False), cog_call()),
    "CogVideoXPipeline dynamic guidance": Exam(
        lambda: cog("CogVideoXPipeline", False, diffusers.CogVideoXDDIMScheduler()), cog_call(use_dynamic_cfg=True)
    ),
    "CogVideoXImageToVideoPipeline": Exam(
        lambda: cog("CogVideoXImageToVideoPipeline"), cog_call(image=each(picture()))
    ),
    "CogVideoXVideoToVideoPipeline": Exam(
        lambda: cog("CogVideoXVideoToVideoPipeline", False),
        latents(cog_call(), video=each(film()), num_frames=..., num_inference_steps=3),
    ),
    "CogVideoXFunControlPipeline": Exam(
        lambda: cog("CogVideoXFunControlPipeline", scheduler=diffusers.CogVideoXDDIMScheduler()),
        latents(cog_call(), control_video=film(), num_frames=...),
        several=False,
    ),
}


# --- Cosmos ----------------------------------------------------------------------------------------------------------


def cosmos(pipeline: str, **parts: Any) -> Any:
    """Latents and a mask of the frames that are given."""
    given = {"transformer": variant("Cosmos", in_channels=5), "vae": variant("wan_vae"), "safety_checker": Unguarded()}
    return build(pipeline, **{**given, "scheduler": flow(use_karras_sigmas=True), **parts})


def cosmos_control() -> dict[str, Any]:
    """The parts of Cosmos-Transfer: a transformer that takes residuals, and what makes them."""
    module = import_module("diffusers.models.controlnets.controlnet_cosmos")
    if not hasattr(module, "transforms"):
        # The one function that it needs torchvision for.
        module.transforms = SimpleNamespace(
            functional=SimpleNamespace(resize=lambda image, size, interpolation: F.interpolate(image, size)),
            InterpolationMode=SimpleNamespace(NEAREST="nearest"),
        )
    # Latents, a mask of given frames and padding; the control has as many.
    controlnet = fresh("CosmosControlNetModel")
    return {"transformer": fresh("CosmosTransformer3DModel + ControlNet and image"), "controlnet": controlnet}


COSMOS: dict[str, Exam] = {
    "CosmosTextToWorldPipeline": family("cosmos"),
    "CosmosVideoToWorldPipeline": Exam(
        lambda: cosmos("CosmosVideoToWorldPipeline", vae=variant("AutoencoderKLCosmos"), scheduler=edm()),
        latents(texts(), SIZE, video=each(film()), num_frames=17),
    ),
    "Cosmos2TextToImagePipeline": family("cosmos2"),
    "Cosmos2VideoToWorldPipeline": Exam(
        lambda: cosmos("Cosmos2VideoToWorldPipeline"), latents(texts(), FILM, image=each(picture()))
    ),
    "Cosmos2_5_PredictBasePipeline": Exam(
        lambda: cosmos("Cosmos2_5_PredictBasePipeline", scheduler=unipc()), latents(texts(), FILM)
    ),
    "Cosmos2_5_PredictBasePipeline video": Exam(
        lambda: cosmos("Cosmos2_5_PredictBasePipeline", scheduler=unipc()),
        latents(texts(), SIZE, video=film(), num_frames=13),
        several=False,
    ),
    "Cosmos2_5_TransferPipeline": Exam(
        lambda: cosmos("Cosmos2_5_TransferPipeline", scheduler=unipc(), **cosmos_control()),
        latents(texts(shape=(12, 10)), FILM, controls=film(), num_frames_per_chunk=FRAMES),
    ),
    "Cosmos3OmniPipeline": Exam(
        lambda: build(
            "Cosmos3OmniPipeline",
            transformer=fresh("Cosmos3OmniTransformer", vocab_size=len(talker())),
            text_tokenizer=talker(),
            vae=variant("wan_vae"),
            scheduler=unipc(),
            enable_safety_checker=False,
            default_use_system_prompt=False,
        ),
        latents(guided, FILM, image=picture(), add_resolution_template=False, add_duration_template=False),
        several=False,
    ),
}


# --- pipelines whose transformers have no reviewed layout ------------------------------------------------------------


def class_words(masked: str = "prompt_attention_mask") -> Call:
    return texts(masked, (12, NARROW))


def anyflow(pipeline: str, transformer: str, refused: dict[str, str] | None = None, **more: Any) -> Exam:
    return Exam(
        lambda: wan(pipeline, fresh(transformer), scheduler=diffusers.FlowMapEulerDiscreteScheduler()),
        latents(wan_words(NARROW), FILM, guidance_scale=3.0, **more),
        refused=refused or {},
    )


def frames_of(prompts: list[int]) -> torch.Tensor:
    """(P, C, F, H, W): a film for every prompt, values of 0 to 1."""
    values = torch.from_numpy(np.stack([np.asarray(frame) for frame in film()])).float() / 255
    return values.permute(3, 0, 1, 2)[None].repeat(len(prompts), 1, 1, 1, 1)


def right_half(prompts: list[int]) -> torch.Tensor:
    """(P, 1, F, H, W): 255 where the film is to be painted."""
    made = torch.zeros(len(prompts), 1, FRAMES, HEIGHT, COLUMNS)
    made[..., COLUMNS // 2 :] = 255
    return made


def easyanimate(pipeline: str, channels: int) -> Any:
    transformer = fresh("EasyAnimateTransformer3DModel", in_channels=channels, resize_inpaint_mask_directly=False)
    return build(pipeline, transformer=transformer, vae=variant("AutoencoderKLMagvit"), scheduler=flow())


def helios(pipeline: str, scheduler: Any) -> Any:
    return wan(pipeline, fresh("HeliosTransformer3DModel"), scheduler=scheduler)


def helios_call(**more: Any) -> Call:
    # Two chunks.
    history = {"num_latent_frames_per_chunk": 3, "history_sizes": [16, 2, 1], "num_frames": 13}
    return latents(wan_words(NARROW), SIZE, history, more)


def motif(pipeline: str, transformer: str = "MotifVideoTransformer3DModel plain") -> Any:
    return wan(
        pipeline,
        fresh(transformer),
        scheduler=flow(use_dynamic_shifting=True),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
    )


def sana_video(pipeline: str, **more: Any) -> Exam:
    sizes = {"height": 64, "width": 96, "frames": FRAMES, "negative_prompt": None, "use_resolution_binning": False}
    return Exam(
        lambda: wan(pipeline, fresh("SanaVideoTransformer3DModel"), scheduler=flow(shift=3.0)),
        latents(class_words(), sizes, **more),
        # Its feed-forward unfolds the tokens to frames, rows and columns.
        refused={"tokens": "Conv2d"},
    )


def consisid() -> Any:
    transformer = fresh(
        "ConsisIDTransformer3DModel",
        sample_width=10,
        sample_height=6,
        max_text_seq_length=12,
        # A quarter of every head turns by the frame.
        attention_head_dim=16,
        LFE_output_dim=42,
    )
    return build(
        # diffusers shows it only where OpenCV is, which finds the face.
        import_module("diffusers.pipelines.consisid.pipeline_consisid").ConsisIDPipeline,
        transformer=transformer,
        vae=variant("AutoencoderKLCogVideoX"),
        scheduler=diffusers.CogVideoXDPMScheduler(),
    )


def walk(frames: int) -> np.ndarray:
    """(F, 4, 4): where the camera stands that goes ahead."""
    places = np.eye(4, dtype=np.float32)[None].repeat(frames, 0)
    places[:, 2, 3] = 0.05 * np.arange(frames)
    return places


def ltx2_vae(channels: int) -> nn.Module:
    return variant("AutoencoderKLLTX2Video", latent_channels=channels, decoder_block_out_channels=(8, 8, 8))


OTHERS: dict[str, Exam] = {
    "MochiPipeline": family("mochi"),
    "LattePipeline": family("latte"),
    "AllegroPipeline": Exam(
        lambda: build(
            "AllegroPipeline",
            transformer=fresh("AllegroTransformer3DModel"),
            scheduler=diffusers.EulerAncestralDiscreteScheduler(),
        ),
        latents(class_words(), SIZE, negative_prompt=None, num_frames=12),
    ),
    "AnyFlowPipeline": anyflow("AnyFlowPipeline", "AnyFlowTransformer3DModel"),
    "AnyFlowFARPipeline": anyflow(
        "AnyFlowFARPipeline",
        "AnyFlowFARTransformer3DModel",
        # Another backend; and caches whose second dimension is the batch.
        {"tokens": "queries", "cfg=2": "cannot be run apart", "data=2": "cannot be run apart"},
        num_frames=17,
        height=64,
        width=96,
    ),
    "EasyAnimatePipeline": Exam(lambda: easyanimate("EasyAnimatePipeline", 4), latents(class_words(), FILM)),
    # EasyAnimateControlPipeline of diffusers 0.42 gives its encode_prompt arguments that it does not take.
    "EasyAnimateInpaintPipeline": Exam(
        lambda: easyanimate("EasyAnimateInpaintPipeline", 12),
        latents(class_words(), FILM, video=frames_of, mask_video=right_half, generator=one_generator),
    ),
    "HeliosPipeline": Exam(
        lambda: helios("HeliosPipeline", diffusers.HeliosScheduler(stages=1, stage_range=[0, 1], gamma=1 / 3)),
        helios_call(),
    ),
    "HeliosPyramidPipeline": Exam(
        # With the usual third the noise of a block has no variance in one direction, which rounding may make less.
        lambda: helios("HeliosPyramidPipeline", diffusers.HeliosScheduler(gamma=0.3)),
        # Three stages, each twice as large: the last is 8x16 latents.
        helios_call(
            height=64, width=128, num_frames=9, num_inference_steps=..., pyramid_num_inference_steps_list=[2, 2, 2]
        ),
    ),
    "MotifVideoPipeline": Exam(lambda: motif("MotifVideoPipeline"), latents(class_words(), FILM)),
    "MotifVideoPipeline decoders": Exam(
        lambda: motif("MotifVideoPipeline", "MotifVideoTransformer3DModel"), latents(class_words(), FILM)
    ),
    "MotifVideoImage2VideoPipeline": Exam(
        lambda: motif("MotifVideoImage2VideoPipeline"),
        latents(class_words(), FILM, prompt=None, image=picture()),
        several=False,
    ),
    "SanaVideoPipeline": sana_video("SanaVideoPipeline"),
    "SanaImageToVideoPipeline": sana_video("SanaImageToVideoPipeline", image=picture()),
    "ConsisIDPipeline": Exam(
        consisid,
        # What is seen of a face.
        latents(
            class_words(""),
            FILM,
            image=each(picture()),
            id_vit_hidden=[noise([number], 6, 16) for number in range(2)],
            id_cond=noise([3], 10),
        ),
    ),
    "SanaWMPipeline": Exam(
        lambda: build(
            "SanaWMPipeline",
            transformer=fresh("SanaWMTransformer3DModel", chunk_plucker_channels=48),
            vae=ltx2_vae(4),
            scheduler=flow(shift=3.0),
        ),
        latents(
            texts(shape=(1, 12, NARROW)),
            WIDE,
            image=wide_picture(),
            prompt=lambda p: PROMPTS[p[0]],
            prompt_attention_mask=lambda p: mask(p, 12),
            negative_prompt_attention_mask=mask([NEGATIVE], 12),
            c2w=walk(17),
            intrinsics=[80.0, 80.0, 80.0, 48.0],
            num_frames=17,
            generator=one_generator,
        ),
        several=False,
        # Its attention unfolds the tokens to frames.
        refused={"tokens": "blocks.0"},
    ),
}


# --- Kandinsky -------------------------------------------------------------------------------------------------------


def kandinsky_words(prompts: list[int], tokens: int = 12) -> dict[str, Any]:
    """Embeddings of words, one of the whole prompt, and where prompts that stand one behind another begin."""
    made: dict[str, Any] = {}
    for prefix, numbers in (("", prompts), ("negative_", [NEGATIVE] * len(prompts))):
        made[f"{prefix}prompt_embeds_qwen"] = noise(numbers, tokens, NARROW)
        made[f"{prefix}prompt_embeds_clip"] = noise(numbers, 10)
        made[f"{prefix}prompt_cu_seqlens"] = tokens * torch.arange(len(prompts) + 1, dtype=torch.int32)
    return made


def kandinsky(pipeline: str, vae: str = "hunyuan_vae", **changes: Any) -> Any:
    transformer = fresh("Kandinsky5Transformer3DModel", **changes)
    pipe = build(pipeline, transformer=transformer, vae=variant(vae), scheduler=flow(shift=5.0))
    if vae == "image_vae":
        # The sizes that the model is made for.
        pipe.resolutions = [(COLUMNS, HEIGHT)]
    return pipe


def kandinsky6() -> Any:
    return build(
        "Kandinsky6TI2VAPipeline",
        transformer=fresh("Kandinsky6Transformer3DModel"),
        vae=variant("hunyuan_vae"),
        scheduler=flow(shift=5.0),
        # A sound is drawn where there is what would decode it.
        audio_vae=variant("MMAudioVAE"),
        vocoder=variant("MMAudioVocoder"),
    )


def kandinsky6_call(**more: Any) -> Call:
    return latents(class_words(""), pooled(10), FILM, **more)


KANDINSKY: dict[str, Exam] = {
    "Kandinsky5T2VPipeline": Exam(lambda: kandinsky("Kandinsky5T2VPipeline"), latents(kandinsky_words, FILM)),
    "Kandinsky5I2VPipeline": Exam(
        lambda: kandinsky("Kandinsky5I2VPipeline"),
        latents(kandinsky_words, SIZE, num_frames=17, image=each(picture())),
    ),
    "Kandinsky5T2IPipeline": Exam(
        lambda: kandinsky("Kandinsky5T2IPipeline", "image_vae", visual_cond=False), latents(kandinsky_words, SIZE)
    ),
    "Kandinsky5I2IPipeline": Exam(
        lambda: kandinsky("Kandinsky5I2IPipeline", "image_vae"),
        latents(kandinsky_words, SIZE, image=each(picture())),
    ),
    "Kandinsky6TI2VAPipeline": Exam(kandinsky6, kandinsky6_call(image=None)),
    "Kandinsky6TI2VAPipeline image": Exam(kandinsky6, kandinsky6_call(image=each(picture()))),
    "Kandinsky6SRPipeline": Exam(
        lambda: build(
            "Kandinsky6SRPipeline",
            transformer=fresh("Kandinsky6SRTransformer3DModel", tile_sizes=[[64, 64]]),
            vae=fresh("Kandinsky6SRVAE"),
            scheduler=flow(),
        ),
        latents(
            video=lambda p: [film(1, 3 * one, 40, 32) for one in p],
            resolution_scale=2,
            tiles_batch_size=2,
            output_type="pt",
        ),
        guidance=False,
    ),
}

# --- LTX-2, with sound -----------------------------------------------------------------------------------------------


def ltx2(pipeline: str, transformer: str = "LTX2", changes: dict[str, Any] | None = None, **more: Any) -> Any:
    """The parts of the tiny LTX-2 in another pipeline."""
    known = inspect.signature(getattr(diffusers, pipeline).__init__).parameters
    parts = {name: part for name, part in more_pipelines.ltx2().components.items() if name in known}
    parts["vae"] = ltx2_vae(8)
    parts["transformer"] = variant(transformer, audio_in_channels=16, audio_out_channels=16, **(changes or {}))
    return build(pipeline, **{**parts, **more})


LTX2_WORDS = texts("prompt_attention_mask", (12, 2 * WIDTH))


def ltx2_call(*given: Any, **more: Any) -> Call:
    return latents(LTX2_WORDS, WIDE, {"num_frames": 9, "stg_scale": 0.0, "audio_stg_scale": 0.0}, *given, **more)


def ltx2_keyframes() -> list[Any]:
    """A picture at the beginning, another one at the second latent; not recompressed, which takes another package."""
    return [
        LTX2VideoCondition(frames=wide_picture(), index=0, crf=0),
        LTX2VideoCondition(frames=wide_picture(1), index=1, strength=0.8, crf=0),
    ]


def dfr(pipeline: str, **more: Any) -> Any:
    """Distilled: without guidance; pictures in between are drawn along."""
    return ltx2(pipeline, changes={"use_keyframes_abs_pos_embedding": True}, **more)


def dfr_call(**more: Any) -> Call:
    return latents(positive(LTX2_WORDS), WIDE, num_frames=17, sigmas=[1.0, 0.5], num_inference_steps=..., **more)


LTX2: dict[str, Exam] = {
    "LTX2Pipeline": family("ltx2"),
    "LTX2Pipeline skipped attention": Exam(
        lambda: ltx2("LTX2Pipeline", "LTX2 STG"),
        ltx2_call({"stg_scale": 1.0, "audio_stg_scale": 1.0}, spatio_temporal_guidance_blocks=[1]),
    ),
    "LTX2ImageToVideoPipeline": Exam(
        lambda: ltx2("LTX2ImageToVideoPipeline"), ltx2_call(image=each(wide_picture()), image_crf=0)
    ),
    "LTX2ConditionPipeline": Exam(lambda: ltx2("LTX2ConditionPipeline"), ltx2_call(conditions=ltx2_keyframes())),
    "LTX2InContextPipeline": Exam(
        lambda: ltx2("LTX2InContextPipeline"),
        ltx2_call(
            reference_conditions=[LTX2ReferenceCondition(frames=film(9, 2, 160, 96))],
            conditioning_attention_strength=0.7,
        ),
    ),
    "LTX2HDRPipeline": Exam(
        lambda: ltx2("LTX2HDRPipeline"),
        ltx2_call(
            {"audio_stg_scale": ...},
            reference_conditions=[LTX2HDRReferenceCondition(frames=film(9, 2, 160, 96))],
            guidance_scale=3.0,
        ),
    ),
    "LTX2DFRPipeline": Exam(lambda: dfr("LTX2DFRPipeline"), dfr_call(), guidance=False),
    "LTX2DFRTemporalRefinePipeline": Exam(
        lambda: dfr(
            "LTX2DFRTemporalRefinePipeline",
            scheduler=diffusers.LTXEulerAncestralRFScheduler(eta=0.5),
            temporal_latent_upsampler=variant("LTX2LatentUpsamplerModel"),
        ),
        dfr_call(
            # What the pipeline before has drawn.
            latents=lambda p: noise(p, 8, 3, 3, 5),
            keyframes_latents=lambda p: noise(p, 8, 2, 3, 5),
            keyframe_positions=[8, 16],
            audio_latents=lambda p: noise(p, 2, 18, 8),
        ),
        guidance=False,
    ),
}


EXAMS: dict[str, Exam] = {**WAN, **LTX, **LTX2, **HUNYUAN, **COGVIDEO, **SKYREELS, **COSMOS, **OTHERS, **KANDINSKY}
