"""Pipelines that draw pictures from prompts, from other pictures, masks and control images."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache, reduce
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import torch
import transformers
from torch import nn

from support.classes import images, others
from support.exam import Exam, generators
from support.models import MAKERS, stirred, variant
from support.more_pipelines import FAMILIES, NEGATIVE, TOKENS, WIDTH, build, flow, mask, noise, text

CASES = {**images.CASES, **others.CASES}

Call = Callable[[list[int]], dict[str, Any]]

# Pixels; with two levels of the autoencoder and patches of 2 these are 5 x 7 tokens.
HEIGHT, WIDTH_PX = 20, 28
SIZE = {"height": HEIGHT, "width": WIDTH_PX}
PIL_SIZE = (WIDTH_PX, HEIGHT)

PROMPTS = ["blurry", "a red fox", "boats", "castle"]


# --- what users pass -------------------------------------------------------------------------------------------------


def picture(seed: int = 0, size: tuple[int, int] = PIL_SIZE, mode: str = "RGB") -> PIL.Image.Image:
    """A picture (width, height) of soft random blots."""
    drawn = torch.randint(256, (4, 5, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return PIL.Image.fromarray(drawn.numpy(), "RGBA").resize(size, PIL.Image.Resampling.BICUBIC).convert(mode)


def hole(size: tuple[int, int] = PIL_SIZE) -> PIL.Image.Image:
    """A mask, white where the picture is to be drawn anew: its right half."""
    made = PIL.Image.new("L", size, 0)
    made.paste(255, (size[0] // 2, 0, *size))
    return made


def asked(steps: int = 2, **more: Any) -> Call:
    """Arguments that all pipelines take, and ``more`` of them."""
    return lambda p: {"num_inference_steps": steps, "output_type": "latent", "generator": generators(p), **more}


def joined(*calls: Call) -> Call:
    """One call of the arguments of several."""
    return lambda p: {key: value for call in calls for key, value in call(p).items()}


def picture_each(prompts: list[int]) -> dict[str, Any]:
    """A picture for every prompt."""
    return {"image": [picture(one) for one in prompts]}


# --- parts -----------------------------------------------------------------------------------------------------------


def made(build_model: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same weights in every process, zero gates stirred."""
    torch.manual_seed(0)
    return stirred(build_model().eval())


@cache
def kl(channels: int = 4, levels: int = 2, kind: str = "AutoencoderKL", **changes: Any) -> nn.Module:
    """An image autoencoder that shrinks pictures by 2 for every level but one."""
    down, up = (("DownEncoderBlock2D",) * levels, ("UpDecoderBlock2D",) * levels)
    settings: dict[str, Any] = {
        "block_out_channels": (8,) * levels,
        "down_block_types": down,
        "up_block_types": up,
        "latent_channels": channels,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "sample_size": 32,
    }
    if kind == "AutoencoderKL":
        settings |= {"shift_factor": 0.1, "scaling_factor": 0.9}
    return made(lambda: getattr(diffusers, kind)(**{**settings, **changes}))


@cache
def letters() -> Any:
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
        model_max_length=TOKENS,
    )


@cache
def clip(width: int = 16, projected: bool = False) -> nn.Module:
    """A CLIP text encoder."""
    config = transformers.CLIPTextConfig(
        vocab_size=len(letters()),
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        projection_dim=width,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return made(lambda: kind(config))


@cache
def t5(width: int = WIDTH) -> nn.Module:
    """A T5 text encoder."""
    config = transformers.T5Config(
        vocab_size=len(letters()), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2, tie_word_embeddings=False
    )
    return made(lambda: transformers.T5EncoderModel(config))


# --- Flux ------------------------------------------------------------------------------------------------------------


def flux(kind: str, transformer: dict[str, Any] | None = None, **parts: Any) -> Callable[[], Any]:
    def make() -> Any:
        return build(
            getattr(diffusers, kind),
            transformer=variant("Flux", **transformer or {}),
            scheduler=flow(),
            vae=kl(4),
            text_encoder=clip(),
            tokenizer=letters(),
            text_encoder_2=t5(),
            tokenizer_2=letters(),
            **{key: value() for key, value in parts.items()},
        )

    return make


def flux_adapted() -> Any:
    """Flux with an IP-Adapter, whose encoder of pictures is not loaded."""
    pipe = flux("FluxPipeline")()
    pipe.transformer = made(MAKERS["Flux"])
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
    config = dict(variant("Flux").config) | {"num_layers": 2, "num_single_layers": 1, "num_mode": num_mode}
    return made(lambda: diffusers.FluxControlNetModel.from_config(config))


def flux_call(**more: Any) -> Call:
    """Prompts as strings."""
    return joined(
        asked(**{"max_sequence_length": TOKENS - 1, **SIZE, **more}), lambda p: {"prompt": [PROMPTS[one] for one in p]}
    )


def guided(**more: Any) -> Call:
    return joined(flux_call(true_cfg_scale=3.0, **more), lambda p: {"negative_prompt": [PROMPTS[NEGATIVE]] * len(p)})


STRENGTH = {"strength": 0.9, "steps": 3}

FLUX = {
    "FluxPipeline": Exam(flux("FluxPipeline"), flux_call(), guidance=False),
    "FluxPipeline true guidance": Exam(flux("FluxPipeline"), guided()),
    "FluxPipeline IP-Adapter": Exam(
        flux_adapted,
        joined(
            guided(),
            lambda p: {
                "ip_adapter_image_embeds": [noise([5], 1, 10)],
                "negative_ip_adapter_image_embeds": [torch.zeros(1, 1, 10)],
            },
        ),
    ),
    "FluxImg2ImgPipeline": Exam(flux("FluxImg2ImgPipeline"), guided(image=picture(), **STRENGTH)),
    "FluxInpaintPipeline": Exam(flux("FluxInpaintPipeline"), guided(image=picture(), mask_image=hole(), **STRENGTH)),
    "FluxFillPipeline": Exam(
        flux("FluxFillPipeline", {"in_channels": 48, "out_channels": 16}),
        flux_call(image=picture(), mask_image=hole()),
        guidance=False,
    ),
    "FluxControlPipeline": Exam(
        flux("FluxControlPipeline", {"in_channels": 32, "out_channels": 16}),
        flux_call(control_image=picture()),
        guidance=False,
    ),
    "FluxControlImg2ImgPipeline": Exam(
        flux("FluxControlImg2ImgPipeline", {"in_channels": 32, "out_channels": 16}),
        flux_call(image=picture(), control_image=picture(3), **STRENGTH),
        guidance=False,
    ),
    "FluxControlInpaintPipeline": Exam(
        flux("FluxControlInpaintPipeline", {"in_channels": 32, "out_channels": 16}),
        flux_call(image=picture(), control_image=picture(3), mask_image=hole(), **STRENGTH),
        guidance=False,
    ),
    "FluxControlNetPipeline": Exam(
        flux("FluxControlNetPipeline", controlnet=flux_controlnet), guided(control_image=picture())
    ),
    "FluxControlNetPipeline union": Exam(
        flux("FluxControlNetPipeline", controlnet=lambda: flux_controlnet(3)),
        guided(control_image=picture(), control_mode=1),
    ),
    "FluxControlNetImg2ImgPipeline": Exam(
        flux("FluxControlNetImg2ImgPipeline", controlnet=flux_controlnet),
        flux_call(image=picture(), control_image=picture(3), **STRENGTH),
        guidance=False,
    ),
    "FluxControlNetInpaintPipeline": Exam(
        flux("FluxControlNetInpaintPipeline", controlnet=flux_controlnet),
        flux_call(image=picture(), control_image=picture(3), mask_image=hole(), **STRENGTH),
        guidance=False,
    ),
    "FluxKontextPipeline": Exam(
        flux("FluxKontextPipeline"),
        guided(image=picture(size=(24, 24)), _auto_resize=False, max_area=HEIGHT * WIDTH_PX),
    ),
    "FluxKontextInpaintPipeline": Exam(
        flux("FluxKontextInpaintPipeline"),
        guided(
            image=picture(),
            mask_image=hole(),
            image_reference=picture(3, (24, 16)),
            _auto_resize=False,
            max_area=HEIGHT * WIDTH_PX,
            **STRENGTH,
        ),
    ),
}

# --- Flux 2 ----------------------------------------------------------------------------------------------------------


def flux2(kind: str, **parts: Any) -> Callable[[], Any]:
    return lambda: build(
        getattr(diffusers, kind),
        transformer=variant("Flux2"),
        scheduler=flow(),
        vae=kl(4, 3, kind="AutoencoderKLFlux2"),
        **parts,
    )


def flux2_call(**more: Any) -> Call:
    return joined(asked(height=40, width=56, **more), lambda p: {"prompt_embeds": noise(p, TOKENS, WIDTH)})


def flux2_guided(**more: Any) -> Call:
    return joined(flux2_call(**more), lambda p: {"negative_prompt_embeds": noise([NEGATIVE] * len(p), TOKENS, WIDTH)})


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


def sd3_model(channels: int = 4) -> nn.Module:
    return variant("SD3", pooled_projection_dim=32, in_channels=channels, out_channels=channels)


def sd3(
    kind: str, transformer: Callable[[], nn.Module] | None = None, channels: int = 4, **parts: Any
) -> Callable[[], Any]:
    def make() -> Any:
        encoders = {"text_encoder": clip(16, True), "text_encoder_2": clip(16, True), "text_encoder_3": t5()}
        return build(
            getattr(diffusers, kind),
            transformer=transformer() if transformer else sd3_model(channels),
            scheduler=flow(shift=3.0),
            vae=kl(channels),
            **encoders,
            **{name.replace("text_encoder", "tokenizer"): letters() for name in encoders},
            **{key: value() if callable(value) else value for key, value in parts.items()},
        )

    return make


def sd3_call(**more: Any) -> Call:
    return joined(
        asked(**{"max_sequence_length": TOKENS - 1, **SIZE, **more}),
        lambda p: {"prompt": [PROMPTS[one] for one in p], "negative_prompt": [PROMPTS[NEGATIVE]] * len(p)},
    )


def sd3_controlnet(extra: int = 0) -> nn.Module:
    config = dict(sd3_model().config)
    config |= {"num_layers": 2, "dual_attention_layers": (), "extra_conditioning_channels": extra}
    return made(lambda: diffusers.SD3ControlNetModel.from_config(config))


def sd3_adapted() -> Any:
    """Stable Diffusion 3 with an IP-Adapter, whose encoder of pictures is not loaded."""
    from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
    from diffusers.models.embeddings import IPAdapterTimeImageProjection

    plain = sd3_model()
    pipe = sd3("StableDiffusion3Pipeline", lambda: made(lambda: type(plain).from_config(plain.config)))()
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
        sd3("StableDiffusion3Img2ImgPipeline"), joined(sd3_call(**STRENGTH), picture_each)
    ),
    "StableDiffusion3InpaintPipeline": Exam(
        sd3("StableDiffusion3InpaintPipeline", channels=16),
        joined(sd3_call(mask_image=hole(), **STRENGTH), picture_each),
    ),
    "StableDiffusion3ControlNetPipeline": Exam(
        sd3("StableDiffusion3ControlNetPipeline", controlnet=sd3_controlnet),
        sd3_call(control_image=picture(), height=24, width=40),
    ),
    "StableDiffusion3ControlNetInpaintingPipeline": Exam(
        sd3("StableDiffusion3ControlNetInpaintingPipeline", controlnet=lambda: sd3_controlnet(1)),
        sd3_call(control_image=picture(), height=24, width=40, control_mask=hole()),
    ),
    "StableDiffusion3PAGImg2ImgPipeline": Exam(
        # A refused call leaves its processors: not in the transformer of the others.
        sd3("StableDiffusion3PAGImg2ImgPipeline", lambda: deepcopy(sd3_model()), pag_applied_layers=["blocks.1"]),
        joined(sd3_call(pag_scale=2.0, **STRENGTH), picture_each),
        refused=PERTURBED,
    ),
}


# --- Qwen-Image ------------------------------------------------------------------------------------------------------


@cache
def qwen_vae(levels: int = 2, pixels: int = 3, channels: int = 4, kind: Any = None) -> nn.Module:
    means, deviations = torch.linspace(-0.2, 0.3, channels), torch.linspace(0.8, 1.2, channels)
    return made(
        lambda: (kind or diffusers.AutoencoderKLQwenImage)(
            base_dim=2,
            z_dim=channels,
            dim_mult=[1] * levels,
            num_res_blocks=1,
            temperal_downsample=[False] * (levels - 1),
            input_channels=pixels,
            latents_mean=means.tolist(),
            latents_std=deviations.tolist(),
        )
    )


def qwen(
    kind: str, transformer: dict[str, Any] | None = None, vae: tuple[Any, ...] = (2,), **parts: Any
) -> Callable[[], Any]:
    return lambda: build(
        getattr(diffusers, kind),
        transformer=variant("QwenImage", **transformer or {}),
        scheduler=flow(),
        vae=qwen_vae(*vae),
        **{key: value() for key, value in parts.items()},
    )


def qwen_call(**more: Any) -> Call:
    return joined(asked(**{"true_cfg_scale": 3.0, **SIZE, **more}), lambda p: text(p, "prompt_embeds_mask"))


def qwen_controlnet(extra: int = 0) -> nn.Module:
    config = {key: value for key, value in variant("QwenImage").config.items() if key != "zero_cond_t"}
    config |= {"num_layers": 2, "extra_condition_channels": extra}
    return made(lambda: diffusers.QwenImageControlNetModel.from_config(config))


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


# Pictures that are edited are always brought to a million pixels.
FAR = (2, 3, 4, Distant)

QWEN = {
    "QwenImagePipeline": Exam(qwen("QwenImagePipeline"), qwen_call()),
    "QwenImageImg2ImgPipeline": Exam(qwen("QwenImageImg2ImgPipeline"), qwen_call(image=picture(), **STRENGTH)),
    "QwenImageInpaintPipeline": Exam(
        qwen("QwenImageInpaintPipeline"), qwen_call(image=picture(), mask_image=hole(), **STRENGTH)
    ),
    "QwenImageEditPipeline": Exam(
        qwen("QwenImageEditPipeline", vae=FAR), qwen_call(image=picture(), height=512, width=768)
    ),
    "QwenImageEditPlusPipeline": Exam(
        qwen("QwenImageEditPlusPipeline", {"zero_cond_t": True}, FAR),
        qwen_call(image=[picture(), picture(1, (20, 20))], height=512, width=768),
        several=False,
    ),
    "QwenImageEditInpaintPipeline": Exam(
        qwen("QwenImageEditInpaintPipeline", vae=FAR),
        qwen_call(image=picture(), mask_image=hole(), height=None, width=None, **STRENGTH),
    ),
    "QwenImageControlNetPipeline": Exam(
        qwen("QwenImageControlNetPipeline", controlnet=qwen_controlnet), qwen_call(control_image=picture())
    ),
    "QwenImageControlNetInpaintPipeline": Exam(
        qwen("QwenImageControlNetInpaintPipeline", controlnet=lambda: qwen_controlnet(4)),
        qwen_call(control_image=picture(), control_mask=hole()),
    ),
    "QwenImageLayeredPipeline": Exam(
        qwen(
            "QwenImageLayeredPipeline",
            {"use_additional_t_cond": True, "use_layer3d_rope": True, "in_channels": 32, "out_channels": 8},
            (2, 4, 8, Distant),
            text_encoder=t5,
        ),
        lambda p: {
            **text(p, "prompt_embeds_mask"),
            **asked()(p),
            # Its latents cannot be had: the pipeline fails where they are asked for.
            "output_type": "pt",
            "prompt": [PROMPTS[one] for one in p],
            "image": picture(mode="RGBA"),
            "layers": 2,
            "true_cfg_scale": 3.0,
        },
    ),
}


# --- Z-Image ---------------------------------------------------------------------------------------------------------


def z_image(kind: str, transformer: dict[str, Any] | None = None, **parts: Any) -> Callable[[], Any]:
    return lambda: build(
        getattr(diffusers, kind),
        transformer=variant("ZImage", **transformer or {}),
        scheduler=flow(),
        vae=kl(4),
        **{key: value() for key, value in parts.items()},
    )


def z_image_call(**more: Any) -> Call:
    """Captions of different lengths, as lists."""
    return joined(
        asked(**SIZE, **more),
        lambda p: {
            "prompt_embeds": [noise([one], TOKENS + one, WIDTH)[0] for one in p],
            "negative_prompt_embeds": [noise([NEGATIVE], 3, WIDTH)[0] for _ in p],
        },
    )


def z_image_controlnet(channels: int = 4) -> nn.Module:
    return made(
        lambda: diffusers.ZImageControlNetModel(
            control_layers_places=[0],
            control_refiner_layers_places=[0],
            control_in_dim=channels,
            add_control_noise_refiner="control_noise_refiner",
            dim=128,
            n_refiner_layers=1,
            n_heads=8,
            n_kv_heads=8,
        )
    )


def z_image_omni(pictures: bool) -> Exam:
    """Prompts around pictures, and what a second encoder sees in them."""

    def make() -> Any:
        # The pipeline encodes pictures in bfloat16.
        vae = made(lambda: type(kl(4)).from_config(kl(4).config)).bfloat16()
        config = transformers.Siglip2VisionConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_patches=16,
            patch_size=8,
        )
        return build(
            diffusers.ZImageOmniPipeline,
            transformer=made(lambda: z_image("ZImagePipeline", {"siglip_feat_dim": 16})().transformer),
            scheduler=flow(),
            vae=vae,
            siglip=made(lambda: transformers.Siglip2VisionModel(config)),
            siglip_processor=transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16),
        )

    def call(prompts: list[int]) -> dict[str, Any]:
        parts = 3 if pictures else 1
        return {
            **asked(**SIZE)(prompts),
            "prompt_embeds": [[noise([one + 10 * n], 4 + one + n, WIDTH)[0] for n in range(parts)] for one in prompts],
            "negative_prompt_embeds": [[noise([10 * n], 3, WIDTH)[0] for n in range(parts)] for _ in prompts],
            **({"image": [picture(3, LARGE)]} if pictures else {}),
        }

    return Exam(make, call)


Z_IMAGE = {
    "ZImagePipeline": Exam(z_image("ZImagePipeline"), z_image_call()),
    "ZImageImg2ImgPipeline": Exam(z_image("ZImageImg2ImgPipeline"), z_image_call(image=picture(), **STRENGTH)),
    "ZImageInpaintPipeline": Exam(
        z_image("ZImageInpaintPipeline"), z_image_call(image=picture(), mask_image=hole(), **STRENGTH)
    ),
    "ZImageControlNetPipeline": Exam(
        z_image("ZImageControlNetPipeline", controlnet=z_image_controlnet), z_image_call(control_image=picture())
    ),
    "ZImageControlNetInpaintPipeline": Exam(
        z_image("ZImageControlNetInpaintPipeline", controlnet=lambda: z_image_controlnet(9)),
        joined(z_image_call(image=picture(), control_image=picture(3)), lambda p: {"mask_image": [hole() for _ in p]}),
    ),
    "ZImageOmniPipeline": z_image_omni(False),
    "ZImageOmniPipeline pictures": z_image_omni(True),
}


# --- Chroma, VisualCloze ---------------------------------------------------------------------------------------------


def chroma(kind: str) -> Callable[[], Any]:
    transformer = made(MAKERS["Chroma"])
    # Which the pipeline for masks asks for.
    transformer.register_to_config(guidance_embeds=False)
    return lambda: build(
        getattr(diffusers, kind),
        transformer=transformer,
        scheduler=flow(),
        vae=kl(4),
        text_encoder=t5(),
        tokenizer=letters(),
    )


def strings(**more: Any) -> Call:
    """Prompts, and what guidance leads away from, as strings."""
    return joined(
        asked(**{**SIZE, **more}),
        lambda p: {"prompt": [PROMPTS[one] for one in p], "negative_prompt": [PROMPTS[NEGATIVE]] * len(p)},
    )


def cloze_call(**more: Any) -> Call:
    """An example of a picture and what becomes of it, another picture, and a place for what is to become of that."""
    return joined(
        asked(max_sequence_length=160, **more),
        lambda p: {
            "task_prompt": ["in, out"] * len(p),
            "content_prompt": [PROMPTS[one] for one in p],
            "image": [[[picture(1), picture(2)], [picture(3), None]]] * len(p),
            "output_type": "pt",
        },
    )


CHROMA = {
    "ChromaPipeline": Exam(chroma("ChromaPipeline"), strings(max_sequence_length=TOKENS)),
    "ChromaImg2ImgPipeline": Exam(
        chroma("ChromaImg2ImgPipeline"), strings(max_sequence_length=TOKENS, image=picture(), **STRENGTH)
    ),
    "ChromaInpaintPipeline": Exam(
        chroma("ChromaInpaintPipeline"),
        strings(max_sequence_length=TOKENS, image=picture(), mask_image=hole(), true_cfg_scale=3.0, **STRENGTH),
    ),
    "VisualClozeGenerationPipeline": Exam(
        flux("VisualClozeGenerationPipeline", {"in_channels": 48, "out_channels": 16}, resolution=lambda: 24),
        cloze_call(),
        guidance=False,
    ),
    "VisualClozePipeline": Exam(
        flux("VisualClozePipeline", {"in_channels": 48, "out_channels": 16}, resolution=lambda: 24),
        cloze_call(upsampling_height=24, upsampling_width=40, upsampling_strength=0.9, steps=3),
        guidance=False,
    ),
}


# --- classes without a reviewed layout -------------------------------------------------------------------------------

TEXT = 20


def case(name: str, **changes: Any) -> nn.Module:
    """The tiny model of a class, with some settings of its configuration changed."""
    plain = CASES[name].make()
    return made(lambda: type(plain).from_config({**plain.config, **changes})) if changes else plain


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
    return joined(asked(**{**SIZE, **more}), lambda p: text(p, masked, (9, TEXT)))


def bria() -> Any:
    return build(
        diffusers.BriaPipeline,
        transformer=case("BriaTransformer2DModel"),
        scheduler=flow(use_dynamic_shifting=True),
        vae=kl(2),
    )


def fibo(kind: str) -> Callable[[], Any]:
    config = transformers.SmolLM3Config(
        vocab_size=len(letters()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return lambda: build(
        getattr(diffusers, kind),
        transformer=case("BriaFiboTransformer2DModel", joint_attention_dim=32, text_encoder_dim=16),
        scheduler=flow(use_dynamic_shifting=True),
        vae=made(
            lambda: diffusers.AutoencoderKLWan(
                base_dim=4,
                z_dim=8,
                dim_mult=[1] * 5,
                num_res_blocks=1,
                temperal_downsample=[False] * 4,
                latents_mean=[0.1] * 8,
                latents_std=[1.1] * 8,
                scale_factor_spatial=16,
            )
        ),
        text_encoder=made(lambda: transformers.SmolLM3ForCausalLM(config)),
        tokenizer=letters(),
    )


def fibo2() -> Any:
    pipe = build(
        diffusers.BriaFibo2Pipeline,
        transformer=case("BriaFibo2Transformer2DModel"),
        scheduler=flow(use_dynamic_shifting=True),
        vae=kl(4, kind="AutoencoderKLFlux2"),
    )
    # Pictures are brought to this size squared.
    pipe.default_sample_size = 12
    return pipe


def fibo2_call(**more: Any) -> Call:
    return joined(asked(**SIZE, **more), lambda p: text(p, "prompt_embeds_mask", (2, 9, TEXT)) | fibo2_masks(p))


def fibo2_masks(prompts: list[int]) -> dict[str, Any]:
    return {
        "prompt_embeds_mask": mask(prompts, 9, torch.bool),
        "negative_prompt_embeds_mask": mask([NEGATIVE] * len(prompts), 9, torch.bool),
    }


def hidream() -> Any:
    pipe = build(
        diffusers.HiDreamImagePipeline,
        transformer=case("HiDreamImageTransformer2DModel"),
        scheduler=flow(),
        vae=kl(4),
    )
    # Every size is brought to this one squared.
    pipe.default_sample_size = 12
    return pipe


def hidream_call(prompts: list[int]) -> dict[str, Any]:
    given = asked(**SIZE)(prompts)
    for prefix, numbers in (("", prompts), ("negative_", [NEGATIVE] * len(prompts))):
        given[f"{prefix}prompt_embeds_t5"] = noise(numbers, 9, TEXT)
        given[f"{prefix}prompt_embeds_llama3"] = noise(numbers, 5, 6, 10).transpose(0, 1)
        given[f"{prefix}pooled_prompt_embeds"] = noise(numbers, 14)
    return given


def longcat(kind: str, far: bool = False) -> Callable[[], Any]:
    def make() -> Any:
        pipe = build(
            getattr(diffusers, kind),
            transformer=case("LongCatImageTransformer2DModel", in_channels=64),
            scheduler=flow(),
            vae=DistantKL.of(kl(16)) if far else kl(16),
            text_encoder=made(lambda: Reader(TEXT)),
            tokenizer=letters(),
            text_processor=Sight(),
        )
        pipe.tokenizer_max_length = TOKENS
        if far:
            pipe.vae_scale_factor = 64
        return pipe

    return make


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

    @classmethod
    def of(cls, vae: Any) -> DistantKL:
        return made(lambda: cls.from_config(vae.config))

    def encode(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().encode(nn.functional.avg_pool2d(x, 32), *args, **kwargs)


def hunyuan_image() -> Any:
    return build(
        diffusers.HunyuanImagePipeline,
        transformer=case("HunyuanImageTransformer2DModel"),
        scheduler=flow(),
        guider=diffusers.AdaptiveProjectedMixGuidance(guidance_scale=3.0),
    )


def hunyuan_refiner() -> Any:
    return build(
        diffusers.HunyuanImageRefinerPipeline,
        transformer=case(
            "HunyuanImageTransformer2DModel",
            in_channels=16,
            out_channels=8,
            patch_size=(1, 1, 1),
            rope_axes_dim=(4, 4, 4),
            text_embed_2_dim=None,
        ),
        scheduler=flow(),
        vae=made(
            lambda: diffusers.AutoencoderKLHunyuanImageRefiner(
                latent_channels=4,
                block_out_channels=(8, 8, 8),
                layers_per_block=1,
                spatial_compression_ratio=4,
                temporal_compression_ratio=2,
            )
        ),
        guider=diffusers.AdaptiveProjectedMixGuidance(guidance_scale=3.0),
    )


class Templates:
    """Stands in for the processor of a model of vision and language, of which embeddings have no need."""

    def __init__(self) -> None:
        self.tokenizer = letters()

    def apply_chat_template(self, messages: Any, tokenize: bool, return_dict: bool) -> list[list[int]]:
        return [[1, 2]]


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
    return build(
        diffusers.OmniGenPipeline,
        transformer=case(
            "OmniGenTransformer2DModel",
            vocab_size=len(letters()),
            max_position_embeddings=1024,
            original_max_position_embeddings=512,
        ),
        scheduler=flow(invert_sigmas=True, num_train_timesteps=1),
        vae=kl(4, 4),
        tokenizer=letters(),
    )


def omnigen_call(words: str = "", **more: Any) -> Call:
    return joined(asked(height=80, width=112, **more), lambda p: {"prompt": [f"{PROMPTS[one]}{words}" for one in p]})


OTHERS = {
    "BriaPipeline": Exam(bria, embeds()),
    "BriaFiboPipeline": Exam(fibo("BriaFiboPipeline"), strings(height=80, width=112)),
    "BriaFiboEditPipeline": Exam(
        fibo("BriaFiboEditPipeline"),
        joined(
            strings(height=96, width=160, image=picture(1, (96, 64)), _auto_resize=False),
            lambda p: {"prompt": [json.dumps({"edit_instruction": PROMPTS[one]}) for one in p]},
        ),
    ),
    "BriaFibo2Pipeline": Exam(fibo2, fibo2_call()),
    "BriaFibo2Pipeline pictures": Exam(fibo2, fibo2_call(image=[picture(1), picture(2)])),
    "LuminaPipeline": Exam(
        lambda: build(diffusers.LuminaPipeline, transformer=case("LuminaNextDiT2DModel"), scheduler=flow(), vae=kl(4)),
        embeds(masked="prompt_attention_mask", height=80, width=112, clean_caption=False),
        refused={"tokens": "scales the scores"},
    ),
    "LuminaPipeline plain attention": Exam(
        lambda: build(diffusers.LuminaPipeline, transformer=case("LuminaNextDiT2DModel"), scheduler=flow(), vae=kl(4)),
        embeds(masked="prompt_attention_mask", height=80, width=112, clean_caption=False, proportional_attn=False),
    ),
    "Lumina2Pipeline": Exam(FAMILIES["lumina2"].make, joined(asked(), FAMILIES["lumina2"].call)),
    # Its transformer turns the positions of the first sample for all of them.
    "OmniGenPipeline": Exam(omnigen, omnigen_call(), refused={"cfg=2": "run apart", "data=2": "run apart"}),
    "OmniGenPipeline pictures": Exam(
        omnigen,
        joined(
            omnigen_call(" <img><|image_1|></img>"),
            lambda p: {"input_images": [[picture(one, (48, 32))] for one in p]},
        ),
        refused={"cfg=2": "run apart", "data=2": "run apart"},
    ),
    "HiDreamImagePipeline": Exam(hidream, hidream_call),
    "OvisImagePipeline": Exam(
        lambda: build(
            diffusers.OvisImagePipeline, transformer=case("OvisImageTransformer2DModel"), scheduler=flow(), vae=kl(2)
        ),
        embeds(negative_prompt=None),
    ),
    "LongCatImagePipeline": Exam(longcat("LongCatImagePipeline"), strings(enable_prompt_rewrite=False)),
    "LongCatImageEditPipeline": Exam(
        longcat("LongCatImageEditPipeline", far=True),
        lambda p: {
            **asked(image=picture(size=(20, 20)))(p),
            "prompt": PROMPTS[p[0]],
            "negative_prompt": PROMPTS[NEGATIVE],
        },
        several=False,
    ),
    "HunyuanImagePipeline": Exam(
        hunyuan_image,
        joined(
            embeds(masked="prompt_embeds_mask", height=160, width=224),
            lambda p: text(p, "prompt_embeds_mask", (6, 10), suffix="_2"),
        ),
    ),
    "HunyuanImageRefinerPipeline": Exam(
        hunyuan_refiner, embeds(masked="prompt_embeds_mask", image=picture(), height=24, width=40)
    ),
    "QwenImage21Pipeline": Exam(
        lambda: build(
            diffusers.QwenImage21Pipeline,
            transformer=case("QwenImage21Transformer2DModel"),
            scheduler=flow(),
            processor=Templates(),
        ),
        embeds(masked="prompt_embeds_mask", height=96, width=160, true_cfg_scale=3.0),
        refused={"tokens": "layer_cache", "data=2": "kv_cache_mode"},
    ),
    "QwenImage21Pipeline no cache": Exam(
        lambda: build(
            diffusers.QwenImage21Pipeline,
            transformer=case("QwenImage21Transformer2DModel"),
            scheduler=flow(),
            processor=Templates(),
        ),
        embeds(masked="prompt_embeds_mask", height=96, width=160, true_cfg_scale=3.0, use_kv_cache=False),
        refused={"tokens": "some of the tokens of image each"},
    ),
}


EXAMS: dict[str, Exam] = {**FLUX, **FLUX2, **SD3, **QWEN, **Z_IMAGE, **CHROMA, **OTHERS}
