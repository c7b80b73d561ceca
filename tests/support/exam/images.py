"""Pipelines that draw pictures from prompts, from other pictures, masks and control images."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial, reduce
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import torch
import transformers
from torch import nn

from support.exam import NARROW, NEGATIVE, TOKENS, WIDTH, Call, Exam, build, flow, latents, mask, noise, texts
from support.models import fresh, made, variant
from support.more_pipelines import captions, family

# Pixels; with two levels of the autoencoder and patches of 2 these are 5 x 7 tokens.
HEIGHT, WIDTH_PX = 20, 28
SIZE = {"height": HEIGHT, "width": WIDTH_PX}
PIL_SIZE = (WIDTH_PX, HEIGHT)
# Latents of 10 x 14 where an autoencoder shrinks by 8.
OBLONG = {"height": 80, "width": 112}
STRENGTH = {"strength": 0.9, "num_inference_steps": 3}

PROMPTS = ["blurry", "a red fox", "boats", "castle"]


# --- what users pass -------------------------------------------------------------------------------------------------


def picture(seed: int = 0, size: tuple[int, int] = PIL_SIZE, mode: str = "RGB") -> PIL.Image.Image:
    """A picture (width, height) of soft random blots."""
    drawn = torch.randint(256, (4, 5, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return PIL.Image.fromarray(drawn.numpy(), "RGBA").resize(size, PIL.Image.Resampling.BICUBIC).convert(mode)


def hole(size: tuple[int, int] = PIL_SIZE) -> PIL.Image.Image:
    """A mask, white where the picture is to be drawn anew: its right half."""
    drawn = PIL.Image.new("L", size, 0)
    drawn.paste(255, (size[0] // 2, 0, *size))
    return drawn


def prompted(prompts: list[int]) -> dict[str, Any]:
    """The prompts as strings."""
    return {"prompt": [PROMPTS[one] for one in prompts]}


def negative(prompts: list[int]) -> dict[str, Any]:
    """What guidance leads away from."""
    return {"negative_prompt": [PROMPTS[NEGATIVE]] * len(prompts)}


def picture_each(prompts: list[int]) -> list[PIL.Image.Image]:
    """A picture for every prompt."""
    return [picture(one) for one in prompts]


def strings(**more: Any) -> Call:
    """Prompts and negative prompts as strings."""
    return latents(SIZE, more, prompted, negative)


# --- parts -----------------------------------------------------------------------------------------------------------


def kl(channels: int = 4, levels: int = 2, kind: str = "kl") -> Any:
    """An image autoencoder that shrinks pictures by 2 for every level but one."""
    return variant(
        kind,
        latent_channels=channels,
        block_out_channels=(8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
    )


@cache
def letters(longest: int = TOKENS) -> Any:
    """A tokenizer that knows the letters and nothing else."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    marks = ["<|vision_start|>", "<|image_pad|>"]
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *marks, *(chr(code) for code in range(32, 127))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=marks,
        model_max_length=longest,
    )


def config_of(model: nn.Module, *left_out: str) -> dict[str, Any]:
    return {key: value for key, value in model.config.items() if key not in left_out}


# --- Flux ------------------------------------------------------------------------------------------------------------


def flux(pipeline: str, transformer: dict[str, Any] | None = None, **parts: Any) -> Callable[[], Any]:
    return lambda: build(
        pipeline,
        transformer=variant("Flux", **transformer or {}),
        scheduler=flow(),
        vae=kl(),
        text_encoder=variant("clip_plain"),
        tokenizer=letters(),
        text_encoder_2=variant("t5"),
        tokenizer_2=letters(),
        **{key: value() for key, value in parts.items()},
    )


def flux_adapted() -> Any:
    """Flux with an IP-Adapter, whose encoder of pictures is not loaded."""
    pipe = flux("FluxPipeline")()
    pipe.transformer = fresh("Flux")
    inner, joint = pipe.transformer.inner_dim, pipe.transformer.config.joint_attention_dim
    draw = torch.Generator().manual_seed(4)
    sizes = {"to_k_ip.weight": (inner, joint), "to_v_ip.weight": (inner, joint), "to_k_ip.bias": (inner,)}
    sizes["to_v_ip.bias"] = (inner,)
    adapter = {
        f"{block}.{name}": 0.2 * torch.randn(size, generator=draw)
        for block in range(len(pipe.transformer.transformer_blocks))
        for name, size in sizes.items()
    }
    projection = {
        "proj.weight": torch.randn(4 * joint, 10, generator=draw),
        "proj.bias": torch.randn(4 * joint, generator=draw),
        "norm.weight": torch.ones(joint),
        "norm.bias": torch.zeros(joint),
    }
    given = {"image_proj": projection, "ip_adapter": adapter}
    pipe.load_ip_adapter(given, weight_name="", subfolder="", image_encoder_pretrained_model_name_or_path=None)
    pipe.set_ip_adapter_scale(0.7)
    return pipe


def flux_controlnet(num_mode: int | None = None) -> nn.Module:
    config = config_of(variant("Flux")) | {"num_layers": 2, "num_single_layers": 1, "num_mode": num_mode}
    return made(lambda: diffusers.FluxControlNetModel.from_config(config))


def flux_call(**more: Any) -> Call:
    return latents(SIZE, prompted, {"max_sequence_length": TOKENS - 1, **more})


def guided(*given: Any, **more: Any) -> Call:
    return latents(flux_call(true_cfg_scale=3.0), negative, *given, **more)


def plain_flux(pipeline: str, channels: int = 16, controlnet: bool = False, **more: Any) -> Exam:
    """``channels``: of noise and of what stands beside it."""
    parts = {"controlnet": flux_controlnet} if controlnet else {}
    changes = {"in_channels": channels, "out_channels": 16} if channels > 16 else {}
    return Exam(flux(pipeline, changes, **parts), flux_call(**more), guidance=False)


def cloze(pipeline: str, **more: Any) -> Exam:
    """An example of a picture and what becomes of it, another picture, and a place for what is to become of that."""
    return Exam(
        flux(pipeline, {"in_channels": 48, "out_channels": 16}, resolution=lambda: 24),
        latents(
            max_sequence_length=160,
            task_prompt=lambda p: ["in, out"] * len(p),
            content_prompt=lambda p: [PROMPTS[one] for one in p],
            image=lambda p: [[[picture(1), picture(2)], [picture(3), None]]] * len(p),
            **{**more, "output_type": "pt"},
        ),
        guidance=False,
    )


PICTURE, PAINT = {"image": picture()}, {"image": picture(), "mask_image": hole()}
CONTROL = {"control_image": picture()}
BOTH = {"image": picture(), "control_image": picture(3)}
KONTEXT = {"_auto_resize": False, "max_area": HEIGHT * WIDTH_PX}

FLUX = {
    "FluxPipeline": plain_flux("FluxPipeline"),
    "FluxPipeline true guidance": Exam(flux("FluxPipeline"), guided()),
    "FluxPipeline IP-Adapter": Exam(
        flux_adapted,
        guided(ip_adapter_image_embeds=[noise([5], 1, 10)], negative_ip_adapter_image_embeds=[torch.zeros(1, 1, 10)]),
    ),
    "FluxImg2ImgPipeline": Exam(flux("FluxImg2ImgPipeline"), guided(PICTURE, STRENGTH)),
    "FluxInpaintPipeline": Exam(flux("FluxInpaintPipeline"), guided(PAINT, STRENGTH)),
    "FluxFillPipeline": plain_flux("FluxFillPipeline", 48, **PAINT),
    "FluxControlPipeline": plain_flux("FluxControlPipeline", 32, **CONTROL),
    "FluxControlImg2ImgPipeline": plain_flux("FluxControlImg2ImgPipeline", 32, **BOTH, **STRENGTH),
    "FluxControlInpaintPipeline": plain_flux("FluxControlInpaintPipeline", 32, **BOTH, mask_image=hole(), **STRENGTH),
    "FluxControlNetPipeline": Exam(flux("FluxControlNetPipeline", controlnet=flux_controlnet), guided(CONTROL)),
    "FluxControlNetPipeline union": Exam(
        flux("FluxControlNetPipeline", controlnet=lambda: flux_controlnet(3)), guided(CONTROL, control_mode=1)
    ),
    "FluxControlNetImg2ImgPipeline": plain_flux("FluxControlNetImg2ImgPipeline", controlnet=True, **BOTH, **STRENGTH),
    "FluxControlNetInpaintPipeline": plain_flux(
        "FluxControlNetInpaintPipeline", controlnet=True, **BOTH, mask_image=hole(), **STRENGTH
    ),
    "FluxKontextPipeline": Exam(flux("FluxKontextPipeline"), guided(KONTEXT, image=picture(size=(24, 24)))),
    "FluxKontextInpaintPipeline": Exam(
        flux("FluxKontextInpaintPipeline"), guided(PAINT, KONTEXT, STRENGTH, image_reference=picture(3, (24, 16)))
    ),
    "VisualClozeGenerationPipeline": cloze("VisualClozeGenerationPipeline"),
    "VisualClozePipeline": cloze(
        "VisualClozePipeline",
        upsampling_height=24,
        upsampling_width=40,
        upsampling_strength=0.9,
        num_inference_steps=3,
    ),
}

# --- Flux 2 ----------------------------------------------------------------------------------------------------------


def flux2(pipeline: str, **parts: Any) -> Callable[[], Any]:
    return lambda: build(pipeline, transformer=variant("Flux2"), scheduler=flow(), vae=kl(4, 3, "kl_flux2"), **parts)


def flux2_call(**more: Any) -> Call:
    return latents(height=40, width=56, prompt_embeds=lambda p: noise(p, TOKENS, WIDTH), **more)


def flux2_guided(**more: Any) -> Call:
    return flux2_call(negative_prompt_embeds=lambda p: noise([NEGATIVE] * len(p), TOKENS, WIDTH), **more)


# Flux 2 takes pictures to start from of at least 64 pixels.
LARGE = (64, 64)

FLUX2 = {
    "Flux2Pipeline": Exam(flux2("Flux2Pipeline"), flux2_call(), guidance=False),
    "Flux2Pipeline pictures": Exam(
        flux2("Flux2Pipeline"), flux2_call(image=[picture(0, LARGE), picture(1, LARGE)]), guidance=False
    ),
    "Flux2KleinPipeline": Exam(flux2("Flux2KleinPipeline"), flux2_guided()),
    "Flux2KleinPipeline pictures": Exam(flux2("Flux2KleinPipeline"), flux2_guided(image=picture(0, LARGE))),
    "Flux2KleinInpaintPipeline": Exam(
        flux2("Flux2KleinInpaintPipeline"),
        flux2_guided(image=picture(0, LARGE), mask_image=hole(LARGE), image_reference=picture(1, LARGE), **STRENGTH),
    ),
    "Flux2KleinKVPipeline": Exam(flux2("Flux2KleinKVPipeline", is_distilled=True), flux2_call(), guidance=False),
    "Flux2KleinKVPipeline pictures": Exam(
        flux2("Flux2KleinKVPipeline", is_distilled=True),
        flux2_call(image=picture(0, LARGE)),
        guidance=False,
        refused={"tokens": "kv_cache_mode", "data=2": "kv_cache"},
    ),
}


# --- Stable Diffusion 3 ----------------------------------------------------------------------------------------------


sd3_model = partial(variant, "SD3", pooled_projection_dim=32)


def sd3(pipeline: str, transformer: Callable[[], nn.Module] = sd3_model, channels: int = 4, **parts: Any) -> Any:
    def make() -> Any:
        encoders = {"text_encoder": variant("clip"), "text_encoder_2": variant("clip"), "text_encoder_3": variant("t5")}
        return build(
            pipeline,
            transformer=transformer(),
            scheduler=flow(shift=3.0),
            vae=kl(channels),
            **encoders,
            **{name.replace("text_encoder", "tokenizer"): letters() for name in encoders},
            **{key: value() if callable(value) else value for key, value in parts.items()},
        )

    return make


def sd3_call(*given: Any, **more: Any) -> Call:
    return latents(strings(max_sequence_length=TOKENS - 1), *given, **more)


def sd3_controlnet(extra: int = 0) -> nn.Module:
    config = config_of(sd3_model())
    config |= {"num_layers": 2, "dual_attention_layers": (), "extra_conditioning_channels": extra}
    return made(lambda: diffusers.SD3ControlNetModel.from_config(config))


def sd3_adapted() -> Any:
    """Stable Diffusion 3 with an IP-Adapter, whose encoder of pictures is not loaded."""
    from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
    from diffusers.models.embeddings import IPAdapterTimeImageProjection

    pipe = sd3("StableDiffusion3Pipeline", partial(fresh, "SD3", pooled_projection_dim=32))()
    heads, depth = 8, len(pipe.transformer.attn_processors)
    attention = [made(lambda: SD3IPAdapterJointAttnProcessor2_0(64, 64, heads, 16)) for _ in range(depth)]
    projection = made(
        lambda: IPAdapterTimeImageProjection(
            embed_dim=10, output_dim=64, hidden_dim=16, dim_head=64, heads=1, num_queries=3, timestep_in_dim=8
        )
    )
    pipe.transformer._load_ip_adapter_weights(
        {
            "image_proj": projection.state_dict(),
            "ip_adapter": {f"{n}.{key}": v for n, one in enumerate(attention) for key, v in one.state_dict().items()},
        },
        low_cpu_mem_usage=False,
    )
    pipe.set_ip_adapter_scale(0.7)
    return pipe


# Perturbed attention guidance takes the rows of a call apart in some blocks.
PERTURBED = {"tokens": "PAGCFGJointAttnProcessor2_0"}

SD3 = {
    "StableDiffusion3Pipeline": Exam(sd3("StableDiffusion3Pipeline"), sd3_call()),
    "StableDiffusion3Pipeline skipped layers": Exam(
        sd3("StableDiffusion3Pipeline"),
        sd3_call(skip_guidance_layers=[1], skip_layer_guidance_stop=1.0, skip_layer_guidance_start=0.0),
        several=False,
    ),
    "StableDiffusion3Pipeline IP-Adapter": Exam(sd3_adapted, sd3_call(ip_adapter_image_embeds=noise([4, 5], 6, 10))),
    "StableDiffusion3Img2ImgPipeline": Exam(
        sd3("StableDiffusion3Img2ImgPipeline"), sd3_call(STRENGTH, image=picture_each)
    ),
    "StableDiffusion3InpaintPipeline": Exam(
        sd3("StableDiffusion3InpaintPipeline", partial(sd3_model, in_channels=16, out_channels=16), 16),
        sd3_call(STRENGTH, image=picture_each, mask_image=hole()),
    ),
    "StableDiffusion3ControlNetPipeline": Exam(
        sd3("StableDiffusion3ControlNetPipeline", controlnet=sd3_controlnet), sd3_call(CONTROL, height=24, width=40)
    ),
    "StableDiffusion3ControlNetInpaintingPipeline": Exam(
        sd3("StableDiffusion3ControlNetInpaintingPipeline", controlnet=lambda: sd3_controlnet(1)),
        sd3_call(CONTROL, height=24, width=40, control_mask=hole()),
    ),
    "StableDiffusion3PAGImg2ImgPipeline": Exam(
        # A refused call leaves its processors: not in the transformer of the others.
        sd3("StableDiffusion3PAGImg2ImgPipeline", lambda: deepcopy(sd3_model()), pag_applied_layers=["blocks.1"]),
        sd3_call(STRENGTH, image=picture_each, pag_scale=2.0),
        refused=PERTURBED,
    ),
}


# --- Qwen-Image ------------------------------------------------------------------------------------------------------


class Distant(diffusers.AutoencoderKLQwenImage):
    """An autoencoder for pictures of a million pixels: between it and them, they are shrunk and widened 32 times."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.temperal_downsample = [False] * 6

    def encode(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().encode(nn.functional.avg_pool3d(x, (1, 32, 32)), *args, **kwargs)

    def decode(self, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        small = super().decode(z, *args, **kwargs)[0]
        return (nn.functional.interpolate(small, scale_factor=(1, 32, 32)),)


@cache
def qwen_vae(kind: type = diffusers.AutoencoderKLQwenImage, pixels: int = 3, channels: int = 4) -> nn.Module:
    means, deviations = torch.linspace(-0.2, 0.3, channels), torch.linspace(0.8, 1.2, channels)
    return made(
        lambda: kind(
            base_dim=2,
            z_dim=channels,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[False],
            input_channels=pixels,
            latents_mean=means.tolist(),
            latents_std=deviations.tolist(),
        )
    )


def qwen(pipeline: str, transformer: dict[str, Any] | None = None, vae: tuple[Any, ...] = (), **parts: Any) -> Any:
    return lambda: build(
        pipeline,
        transformer=variant("QwenImage", **transformer or {}),
        scheduler=flow(),
        vae=qwen_vae(*vae),
        **{key: value() for key, value in parts.items()},
    )


def qwen_call(*given: Any, **more: Any) -> Call:
    return latents(SIZE, texts("prompt_embeds_mask"), {"true_cfg_scale": 3.0}, *given, **more)


def qwen_controlnet(extra: int = 0) -> nn.Module:
    config = config_of(variant("QwenImage"), "zero_cond_t") | {"num_layers": 2, "extra_condition_channels": extra}
    return made(lambda: diffusers.QwenImageControlNetModel.from_config(config))


# Pictures that are edited are always brought to a million pixels.
FAR = {"height": 512, "width": 768}

QWEN = {
    "QwenImagePipeline": Exam(qwen("QwenImagePipeline"), qwen_call()),
    "QwenImageImg2ImgPipeline": Exam(qwen("QwenImageImg2ImgPipeline"), qwen_call(PICTURE, STRENGTH)),
    "QwenImageInpaintPipeline": Exam(qwen("QwenImageInpaintPipeline"), qwen_call(PAINT, STRENGTH)),
    "QwenImageEditPipeline": Exam(qwen("QwenImageEditPipeline", vae=(Distant,)), qwen_call(PICTURE, FAR)),
    "QwenImageEditPlusPipeline": Exam(
        qwen("QwenImageEditPlusPipeline", {"zero_cond_t": True}, (Distant,)),
        qwen_call(FAR, image=[picture(), picture(1, (20, 20))]),
        several=False,
    ),
    "QwenImageEditInpaintPipeline": Exam(
        qwen("QwenImageEditInpaintPipeline", vae=(Distant,)), qwen_call(PAINT, STRENGTH, height=None, width=None)
    ),
    "QwenImageControlNetPipeline": Exam(
        qwen("QwenImageControlNetPipeline", controlnet=qwen_controlnet), qwen_call(CONTROL)
    ),
    "QwenImageControlNetInpaintPipeline": Exam(
        qwen("QwenImageControlNetInpaintPipeline", controlnet=lambda: qwen_controlnet(4)),
        qwen_call(CONTROL, control_mask=hole()),
    ),
    "QwenImageLayeredPipeline": Exam(
        qwen(
            "QwenImageLayeredPipeline",
            {"use_additional_t_cond": True, "use_layer3d_rope": True, "in_channels": 32, "out_channels": 8},
            (Distant, 4, 8),
            text_encoder=partial(variant, "t5"),
        ),
        # Its latents cannot be had: the pipeline fails where they are asked for.
        latents(
            texts("prompt_embeds_mask"),
            prompted,
            output_type="pt",
            image=picture(mode="RGBA"),
            layers=2,
            true_cfg_scale=3.0,
        ),
    ),
}


# --- Z-Image ---------------------------------------------------------------------------------------------------------


def z_image(pipeline: str, channels: int = 0) -> Callable[[], Any]:
    """``channels``: of the pictures that a ControlNet sees."""
    return lambda: build(
        pipeline,
        transformer=variant("ZImage"),
        scheduler=flow(),
        vae=kl(),
        **({"controlnet": fresh("ZImageControlNetModel", control_in_dim=channels)} if channels else {}),
    )


def z_image_call(*given: Any, **more: Any) -> Call:
    return latents(SIZE, captions, *given, **more)


def z_image_omni(pictures: bool) -> Exam:
    """Prompts around pictures, and what a second encoder sees in them."""

    def make() -> Any:
        return build(
            "ZImageOmniPipeline",
            transformer=fresh("ZImage", siglip_feat_dim=16),
            scheduler=flow(),
            # The pipeline encodes pictures in bfloat16.
            vae=deepcopy(kl()).bfloat16(),
            siglip=fresh("siglip2"),
            siglip_processor=transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16),
        )

    parts = range(3 if pictures else 1)
    call = latents(
        SIZE,
        prompt_embeds=lambda p: [[noise([one + 10 * n], 4 + one + n, WIDTH)[0] for n in parts] for one in p],
        negative_prompt_embeds=lambda p: [[noise([10 * n], 3, WIDTH)[0] for n in parts] for _ in p],
        image=[picture(3, LARGE)] if pictures else ...,
    )
    return Exam(make, call)


Z_IMAGE = {
    "ZImagePipeline": Exam(z_image("ZImagePipeline"), z_image_call()),
    "ZImageImg2ImgPipeline": Exam(z_image("ZImageImg2ImgPipeline"), z_image_call(PICTURE, STRENGTH)),
    "ZImageInpaintPipeline": Exam(z_image("ZImageInpaintPipeline"), z_image_call(PAINT, STRENGTH)),
    "ZImageControlNetPipeline": Exam(z_image("ZImageControlNetPipeline", 4), z_image_call(CONTROL)),
    "ZImageControlNetInpaintPipeline": Exam(
        z_image("ZImageControlNetInpaintPipeline", 9), z_image_call(BOTH, mask_image=lambda p: [hole() for _ in p])
    ),
    "ZImageOmniPipeline": z_image_omni(False),
    "ZImageOmniPipeline pictures": z_image_omni(True),
}


# --- Chroma ----------------------------------------------------------------------------------------------------------


def chroma(pipeline: str, *given: dict[str, Any]) -> Exam:
    def make() -> Any:
        transformer = fresh("Chroma")
        # Which the pipeline for masks asks for.
        transformer.register_to_config(guidance_embeds=False)
        parts = {"vae": kl(), "text_encoder": variant("t5"), "tokenizer": letters()}
        return build(pipeline, transformer=transformer, scheduler=flow(), **parts)

    return Exam(make, latents(strings(max_sequence_length=TOKENS), *given))


CHROMA = {
    "ChromaPipeline": chroma("ChromaPipeline"),
    "ChromaImg2ImgPipeline": chroma("ChromaImg2ImgPipeline", PICTURE, STRENGTH),
    "ChromaInpaintPipeline": chroma("ChromaInpaintPipeline", PAINT, STRENGTH, {"true_cfg_scale": 3.0}),
}


# --- classes without a reviewed layout -------------------------------------------------------------------------------


class Reader(nn.Module):
    """A text encoder: embeds tokens, shifted by what it sees in pictures, in three layers."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(letters()), width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, pixel_values: Any = None, **_: Any
    ) -> SimpleNamespace:
        states = [self.embed(input_ids) + (0 if pixel_values is None else pixel_values.mean())]
        for layer in self.layers:
            states.append(torch.tanh(layer(states[-1])) + states[-1])
        return SimpleNamespace(hidden_states=tuple(states))


def embeds(masked: str = "", **more: Any) -> Call:
    """Embeddings of prompts, and what else a call is given."""
    return latents(SIZE, more, texts(masked, (9, NARROW)))


def fibo(pipeline: str) -> Callable[[], Any]:
    return lambda: build(
        pipeline,
        transformer=fresh("BriaFiboTransformer2DModel", joint_attention_dim=32, text_encoder_dim=16),
        scheduler=flow(use_dynamic_shifting=True),
        vae=fresh("fibo_vae"),
        text_encoder=fresh("smollm3"),
        tokenizer=letters(),
    )


def fibo2() -> Any:
    pipe = build(
        "BriaFibo2Pipeline",
        transformer=fresh("BriaFibo2Transformer2DModel"),
        scheduler=flow(use_dynamic_shifting=True),
        vae=kl(kind="kl_flux2"),
    )
    # Pictures are brought to this size squared.
    pipe.default_sample_size = 12
    return pipe


def fibo2_call(**more: Any) -> Call:
    return latents(
        SIZE,
        texts(shape=(2, 9, NARROW)),
        prompt_embeds_mask=lambda p: mask(p, 9, torch.bool),
        negative_prompt_embeds_mask=lambda p: mask([NEGATIVE] * len(p), 9, torch.bool),
        **more,
    )


def hidream() -> Any:
    transformer = fresh("HiDreamImageTransformer2DModel")
    pipe = build("HiDreamImagePipeline", transformer=transformer, scheduler=flow(), vae=kl())
    # Every size is brought to this one squared.
    pipe.default_sample_size = 12
    return pipe


def hidream_words(prompts: list[int]) -> dict[str, Any]:
    given = {}
    for prefix, numbers in (("", prompts), ("negative_", [NEGATIVE] * len(prompts))):
        given[f"{prefix}prompt_embeds_t5"] = noise(numbers, 9, NARROW)
        given[f"{prefix}prompt_embeds_llama3"] = noise(numbers, 5, 6, 10).transpose(0, 1)
        given[f"{prefix}pooled_prompt_embeds"] = noise(numbers, 14)
    return given


class Pixels:
    """Stands in for the picture processor of a model of vision and language."""

    merge_size = 2

    def __call__(self, images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
        seen = torch.from_numpy(np.asarray(images, dtype=np.float32) / 255)
        return {"pixel_values": seen, "image_grid_thw": torch.tensor([[1, 2, 4]])}


class Sight:
    """Stands in for the processor of a model of vision and language."""

    image_processor = Pixels()


class DistantKL(diffusers.AutoencoderKL):
    """An autoencoder for pictures of a million pixels, which it shrinks 32 times before it encodes them."""

    def encode(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().encode(nn.functional.avg_pool2d(x, 32), *args, **kwargs)


def longcat(pipeline: str, far: bool = False) -> Any:
    vae = kl(16)
    pipe = build(
        pipeline,
        transformer=fresh("LongCatImageTransformer2DModel", in_channels=64),
        scheduler=flow(),
        vae=made(lambda: DistantKL.from_config(vae.config)) if far else vae,
        text_encoder=made(lambda: Reader(NARROW)),
        tokenizer=letters(),
        text_processor=Sight(),
    )
    pipe.tokenizer_max_length = TOKENS
    if far:
        pipe.vae_scale_factor = 64
    return pipe


def hunyuan_image(pipeline: str, **parts: Any) -> Any:
    guider = diffusers.AdaptiveProjectedMixGuidance(guidance_scale=3.0)
    return build(pipeline, scheduler=flow(), guider=guider, **parts)


def hunyuan_refiner() -> Any:
    changes = {"in_channels": 16, "out_channels": 8, "patch_size": (1, 1, 1), "rope_axes_dim": (4, 4, 4)}
    return hunyuan_image(
        "HunyuanImageRefinerPipeline",
        transformer=fresh("HunyuanImageTransformer2DModel", text_embed_2_dim=None, **changes),
        vae=fresh("AutoencoderKLHunyuanImageRefiner"),
    )


class Templates:
    """Stands in for the processor of a model of vision and language, of which embeddings have no need."""

    def __init__(self) -> None:
        self.tokenizer = letters()

    def apply_chat_template(self, messages: Any, tokenize: bool, return_dict: bool) -> list[list[int]]:
        return [[1, 2]]


def qwen21(refused: dict[str, str], **more: Any) -> Exam:
    return Exam(
        lambda: build(
            "QwenImage21Pipeline",
            transformer=fresh("QwenImage21Transformer2DModel"),
            scheduler=flow(),
            processor=Templates(),
        ),
        embeds("prompt_embeds_mask", height=96, width=160, true_cfg_scale=3.0, **more),
        refused=refused,
    )


def lumina(refused: dict[str, str] | None = None, **more: Any) -> Exam:
    return Exam(
        lambda: build("LuminaPipeline", transformer=fresh("LuminaNextDiT2DModel"), scheduler=flow(), vae=kl()),
        embeds("prompt_attention_mask", **OBLONG, clean_caption=False, **more),
        refused=refused or {},
    )


def omnigen() -> Any:
    from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen

    # What diffusers imports with torchvision only.
    pipeline_omnigen.OmniGenMultiModalProcessor = processor_omnigen.OmniGenMultiModalProcessor
    processor_omnigen.transforms = SimpleNamespace(
        Compose=lambda steps: lambda image: reduce(lambda made, step: step(made), steps, image),
        Lambda=lambda function: function,
        ToTensor=lambda: lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255,
        Normalize=lambda mean, std, inplace: lambda image: (image - mean[0]) / std[0],
    )
    sizes = {"max_position_embeddings": 1024, "original_max_position_embeddings": 512}
    return build(
        "OmniGenPipeline",
        transformer=fresh("OmniGenTransformer2DModel", vocab_size=len(letters()), **sizes),
        scheduler=flow(invert_sigmas=True, num_train_timesteps=1),
        vae=kl(4, 4),
        tokenizer=letters(),
    )


# Its transformer turns the positions of the first sample for all of them.
APART = {"cfg=2": "run apart", "data=2": "run apart"}

OTHERS = {
    "BriaPipeline": Exam(
        lambda: build(
            "BriaPipeline",
            transformer=fresh("BriaTransformer2DModel"),
            scheduler=flow(use_dynamic_shifting=True),
            vae=kl(2),
        ),
        embeds(),
    ),
    "BriaFiboPipeline": Exam(fibo("BriaFiboPipeline"), strings(**OBLONG)),
    "BriaFiboEditPipeline": Exam(
        fibo("BriaFiboEditPipeline"),
        latents(
            strings(height=96, width=160),
            image=picture(1, (96, 64)),
            _auto_resize=False,
            prompt=lambda p: [json.dumps({"edit_instruction": PROMPTS[one]}) for one in p],
        ),
    ),
    "BriaFibo2Pipeline": Exam(fibo2, fibo2_call()),
    "BriaFibo2Pipeline pictures": Exam(fibo2, fibo2_call(image=[picture(1), picture(2)])),
    "LuminaPipeline": lumina({"tokens": "scales the scores"}),
    "LuminaPipeline plain attention": lumina(proportional_attn=False),
    "Lumina2Pipeline": family("lumina2"),
    "OmniGenPipeline": Exam(omnigen, latents(OBLONG, prompted), refused=APART),
    "OmniGenPipeline pictures": Exam(
        omnigen,
        latents(
            OBLONG,
            prompt=lambda p: [f"{PROMPTS[one]} <img><|image_1|></img>" for one in p],
            input_images=lambda p: [[picture(one, (48, 32))] for one in p],
        ),
        refused=APART,
    ),
    "HiDreamImagePipeline": Exam(hidream, latents(SIZE, hidream_words)),
    "OvisImagePipeline": Exam(
        lambda: build(
            "OvisImagePipeline", transformer=fresh("OvisImageTransformer2DModel"), scheduler=flow(), vae=kl(2)
        ),
        embeds(negative_prompt=None),
    ),
    "LongCatImagePipeline": Exam(lambda: longcat("LongCatImagePipeline"), strings(enable_prompt_rewrite=False)),
    "LongCatImageEditPipeline": Exam(
        lambda: longcat("LongCatImageEditPipeline", far=True),
        latents(image=picture(size=(20, 20)), prompt=lambda p: PROMPTS[p[0]], negative_prompt=PROMPTS[NEGATIVE]),
        several=False,
    ),
    "HunyuanImagePipeline": Exam(
        lambda: hunyuan_image("HunyuanImagePipeline", transformer=fresh("HunyuanImageTransformer2DModel")),
        latents(embeds("prompt_embeds_mask", height=160, width=224), texts("prompt_embeds_mask", (6, 10), suffix="_2")),
    ),
    "HunyuanImageRefinerPipeline": Exam(
        hunyuan_refiner, embeds("prompt_embeds_mask", image=picture(), height=24, width=40)
    ),
    "QwenImage21Pipeline": qwen21({"tokens": "layer_cache", "data=2": "kv_cache_mode"}),
    "QwenImage21Pipeline no cache": qwen21({"tokens": "some of the tokens of image each"}, use_kv_cache=False),
}


EXAMS: dict[str, Exam] = {**FLUX, **FLUX2, **SD3, **QWEN, **Z_IMAGE, **CHROMA, **OTHERS}
