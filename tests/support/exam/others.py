"""Pipelines for pictures beside the most known ones, for sound, for proteins, and modular ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import guiders, modular_pipelines
from PIL import Image
from torch import nn

from support import lora
from support.exam import (
    NARROW,
    NEGATIVE,
    TOKENS,
    WIDTH,
    Call,
    Exam,
    build,
    flow,
    latents,
    noise,
    one_generator,
    pooled,
    positive,
    texts,
    unipc,
)
from support.exam.images import OBLONG, PERTURBED
from support.models import component, fresh, stirred, tiny, variant
from support.more_pipelines import (
    FAMILIES,
    PLAIN,
    TWO_TEXTS,
    around,
    called,
    captions,
    family,
    sana_scheduler,
)


def picture(number: int, width: int = 112, height: int = 80) -> Image.Image:
    """A smooth picture that differs from number to number."""
    x, y = torch.arange(width) / width, torch.arange(height)[:, None] / height
    channels = [torch.sin(6 * x * (number + n + 1)) * torch.cos(5 * y * (n + 1)) for n in range(3)]
    return Image.fromarray(((torch.stack(channels, -1) + 1) * 127).to(torch.uint8).numpy())


# --- words -----------------------------------------------------------------------------------------------------------

PROMPTS = {1: "a fox in the snow", 2: "two ducks on a pond"}


def prompted(prompts: list[int]) -> dict[str, Any]:
    """Prompts of different lengths, as strings."""
    return {"prompt": [PROMPTS[number] for number in prompts]}


def letters(longest: int = 24, chat: str = "") -> Any:
    """A tokenizer that knows the letters and nothing else."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "</s>", "?", *(chr(code) for code in range(ord(" "), ord("~") + 1) if chr(code) != "?")]
    inner = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, unk_token="?"))
    inner.pre_tokenizer = Split(Regex("."), "isolated")
    marks = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "?"}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, **marks, model_max_length=longest, padding_side="right", chat_template=chat or None
    )


def clip() -> Any:
    """CLIP's encoder of text, with an embedding of all of it."""
    return variant("clip", vocab_size=100, max_position_embeddings=24, bos_token_id=0, eos_token_id=1)


# --- pictures --------------------------------------------------------------------------------------------------------

SANA = {"height": 160, "width": 224}
# As PixArt and Sana are called: masks of captions, no caption to clean.
CAPTIONS = called(texts("prompt_attention_mask"), OBLONG, PLAIN)
SPRINT = called(positive(texts("prompt_attention_mask")), SANA, use_resolution_binning=False)


def pag(pipeline: str, model: str, scheduler: Any, layer: str = "transformer_blocks.1", **parts: Any) -> Any:
    """A maker with perturbed attention guidance (arXiv:2403.17377), which swaps processors of its transformer."""
    return lambda: build(
        pipeline,
        transformer=copy.deepcopy(tiny(model)),
        scheduler=scheduler,
        pag_applied_layers=[layer],
        **parts,
    )


def ddpm() -> Any:
    return diffusers.DDPMScheduler(prediction_type="v_prediction", clip_sample=False)


def sprint(pipeline: str) -> Any:
    """Sana-Sprint: guidance is an input of the transformer."""
    return lambda: build(
        pipeline,
        transformer=variant("Sana", guidance_embeds=True, guidance_embeds_scale=0.1),
        scheduler=diffusers.SCMScheduler(),
        vae=variant("sana_vae"),
    )


def hunyuan_control() -> Any:
    model = variant("HunyuanDiT", pooled_projection_dim=16)
    config = dict(model.config)
    names = ("num_attention_heads", "attention_head_dim", "in_channels", "patch_size", "sample_size", "hidden_size")
    names += ("cross_attention_dim", "cross_attention_dim_t5", "pooled_projection_dim", "text_len", "text_len_t5")
    settings = {name: config[name] for name in names}
    return build(
        "HunyuanDiTControlNetPipeline",
        transformer=model,
        controlnet=fresh("HunyuanDiT2DControlNetModel", **settings),
        scheduler=ddpm(),
        vae=variant("image_vae"),
        requires_safety_checker=False,
    )


def glm() -> Any:
    autoencoder = fresh("image_vae")
    autoencoder.register_to_config(latents_mean=[0.1] * 4, latents_std=[0.9] * 4)
    return build("GlmImagePipeline", transformer=fresh("GlmImageTransformer2DModel"), scheduler=flow(), vae=autoencoder)


def tokens_of(prompts: list[int], count: int, seed: int) -> list[torch.Tensor]:
    """For every prompt, numbers of the entries of a codebook."""
    return [torch.randint(32, (count,), generator=torch.Generator().manual_seed(seed + one)) for one in prompts]


def glm_call(**more: Any) -> Call:
    tokens = {"prior_token_ids": lambda p: torch.stack(tokens_of(p, 60, 50))}
    return latents(texts(shape=(TOKENS, NARROW)), tokens, height=96, width=160, **more)


CHAT = "{% for m in messages %}user: {% for c in m['content'] %}{{ c['text'] }}{% endfor %} assistant:{% endfor %}"


def ideogram4() -> Any:
    changes = {"llm_features_dim": 13 * 8}
    return build(
        "Ideogram4Pipeline",
        transformer=fresh("Ideogram4Transformer2DModel", **changes),
        # With other weights.
        unconditional_transformer=stirred(component("Ideogram4Transformer2DModel", **changes).eval()),
        text_encoder=variant("qwen3_vl"),
        tokenizer=letters(chat=CHAT),
        scheduler=flow(),
    )


def listed(prompts: list[int]) -> dict[str, Any]:
    """Embeddings as lists, without padding."""
    return {
        "prompt_embeds": [noise([one], TOKENS - one, NARROW)[0] for one in prompts],
        "negative_prompt_embeds": [noise([NEGATIVE], 3, NARROW)[0] for _ in prompts],
    }


def unlisted(pipeline: str, model: str, scheduler: Any = flow, **parts: Any) -> Callable[[], Any]:
    """A maker of a pipeline around the tiny model of a class without a reviewed layout."""
    return lambda: build(pipeline, transformer=fresh(model), scheduler=scheduler(), **parts)


PRX = latents(
    texts("prompt_attention_mask", (TOKENS, NARROW), torch.bool),
    OBLONG,
    use_resolution_binning=False,
    negative_prompt=None,
)
# As Stable Diffusion 3 and Flux are called.
POOLED = called(texts(), pooled(), OBLONG)


def adapted(name: str, model: str, sizes: dict[str, Any]) -> Exam:
    """A pipeline with a LoRA."""

    def make() -> Any:
        pipe = FAMILIES[name].make()
        pipe.transformer = copy.deepcopy(pipe.transformer)
        pipe.load_lora_weights(lora.adapter(model, 7), adapter_name="a")
        return pipe

    return Exam(make, latents(FAMILIES[name].call, sizes, attention_kwargs={"scale": 0.6}))


def sd3(pipeline: str, **parts: Any) -> Any:
    # A model of its own: a call that is refused leaves processors of perturbed attention where they are.
    model = copy.deepcopy(variant("SD3", num_layers=4))
    return build(pipeline, transformer=model, scheduler=flow(shift=3.0), **parts)


def amused() -> Any:
    return build(
        "AmusedPipeline",
        transformer=variant("UVit2DModel"),
        vqvae=variant("VQModel"),
        text_encoder=clip(),
        tokenizer=letters(),
        scheduler=diffusers.AmusedScheduler(mask_token_id=39),
    )


def kandinsky_prior() -> Any:
    from transformers import CLIPImageProcessorPil

    return build(
        "KandinskyV22PriorPipeline",
        prior=fresh("PriorTransformer", num_embeddings=24),
        text_encoder=clip(),
        tokenizer=letters(),
        image_encoder=variant("clip_seen"),
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        scheduler=diffusers.UnCLIPScheduler(prediction_type="sample", variance_type="fixed_small_log"),
    )


# --- sound -----------------------------------------------------------------------------------------------------------


def ace_step() -> Any:
    return build(
        "AceStepPipeline",
        transformer=fresh("AceStepTransformer1DModel"),
        condition_encoder=variant("AceStepConditionEncoder"),
        text_encoder=variant("qwen3"),
        tokenizer=letters(64),
        vae=variant("AutoencoderOobleck"),
        scheduler=flow(num_train_timesteps=1, shift=1.0),
    )


def stable_audio_3(pipeline: str) -> Callable[[], Any]:
    return lambda: build(
        pipeline,
        transformer=fresh("StableAudio3DiTModel"),
        duration_embedder=variant("StableAudio3DurationEmbedder"),
        vae=variant("AutoencoderSAME"),
        scheduler=flow(stochastic_sampling=True),
    )


def longcat_audio() -> Any:
    return build(
        "LongCatAudioDiTPipeline",
        transformer=fresh("LongCatAudioDiTTransformer"),
        text_encoder=variant("umt5", vocab_size=100, d_model=NARROW, tie_word_embeddings=False),
        tokenizer=letters(),
        vae=variant("LongCatAudioDiTVae"),
        scheduler=flow(shift=1.0, invert_sigmas=True),
    )


STABLE_AUDIO_3 = texts("encoder_attention_mask", (TOKENS, NARROW))


# --- modular pipelines -----------------------------------------------------------------------------------------------


def modular(blocks: str, *left_out: str, **components: Any) -> Any:
    """A modular pipeline without its encoders and decoders, to which their results are passed."""
    made = getattr(modular_pipelines, blocks)()
    for name in ("text_encoder", "decode", *left_out):
        made.sub_blocks.pop(name)
    pipe = made.init_pipeline()
    pipe.update_components(**{"scheduler": flow(), **components})
    return pipe


def shown(*given: Any, **more: Any) -> Call:
    """As `latents`, which a modular pipeline calls its output."""
    return latents(*given, {"output_type": ..., "output": "latents"}, **more)


def block(
    blocks: str, transformer: Callable[[], nn.Module], *given: Any, out: tuple[str, ...] = ("vae_encoder",), **more: Any
) -> Exam:
    """An exam of modular blocks around a transformer; without guidance if ``given`` has no negative prompt."""
    call = shown(*given, **more)
    guidance = any("negative" in key for key in call([1]))
    return Exam(lambda: modular(blocks, *out, transformer=transformer()), call, guidance=guidance)


# Without its autoencoder the pipeline takes latents to have 16 channels.
WAN = {"num_layers": 3, "in_channels": 16, "out_channels": 16}
FILM = {**OBLONG, "num_frames": 5}


def modular_wan(guider: Any = None) -> Any:
    given = {} if guider is None else {"guider": guider}
    return modular("WanBlocks", transformer=variant("Wan", **WAN), scheduler=unipc(), **given)


def modular_qwen(guider: Any = None) -> Any:
    return modular(
        "QwenImageAutoBlocks",
        "vae_encoder",
        "controlnet_vae_encoder",
        transformer=variant("QwenImage", num_layers=3, attention_head_dim=16),
        **({} if guider is None else {"guider": guider}),
    )


def skipped(**settings: Any) -> Any:
    """Which of the blocks are changed for a branch."""
    return diffusers.LayerSkipConfig(indices=[1], fqn="transformer_blocks", **settings)


FLUX = partial(variant, "Flux", num_layers=3)
KLEIN = partial(variant, "Flux2", num_layers=3, guidance_embeds=False)
FLUX2_WORDS = called(positive(texts()), OBLONG)
FLUX3 = partial(fresh, "Flux3Transformer2DModel")
KREA2_WORDS = texts("prompt_embeds_mask", (TOKENS, 2, WIDTH), torch.bool)
QWEN_WORDS = called(texts("prompt_embeds_mask"), OBLONG)

MODULAR: dict[str, Exam] = {
    "FluxModularPipeline": block("FluxAutoBlocks", FLUX, positive(POOLED)),
    "Flux2ModularPipeline": block("Flux2AutoBlocks", partial(variant, "Flux2", num_layers=3), FLUX2_WORDS),
    "Flux2KleinBaseModularPipeline": block("Flux2KleinBaseAutoBlocks", KLEIN, texts(), OBLONG),
    "Flux3ModularPipeline": block(
        "Flux3AutoBlocks", FLUX3, texts(shape=(TOKENS, NARROW)), OBLONG, out=("vae_encoder", "prompt_upsampler")
    ),
    "StableDiffusion3ModularPipeline": block(
        "StableDiffusion3AutoBlocks", partial(variant, "SD3", num_layers=4), POOLED
    ),
    "QwenImageModularPipeline": Exam(modular_qwen, shown(QWEN_WORDS)),
    "ZImageModularPipeline": block("ZImageAutoBlocks", partial(variant, "ZImage", n_layers=3), captions, OBLONG),
    "WanModularPipeline": Exam(modular_wan, shown(texts(), FILM)),
    "Wan22ModularPipeline": Exam(
        lambda: modular(
            "Wan22Blocks",
            transformer=variant("Wan", **WAN),
            transformer_2=variant("Wan", **WAN, ffn_dim=80),
            scheduler=unipc(),
        ),
        shown(texts(), FILM, num_inference_steps=3),
    ),
    "LTXModularPipeline": block(
        "LTXAutoBlocks",
        partial(variant, "LTX", num_layers=3),
        texts("prompt_attention_mask"),
        SANA,
        num_frames=9,
    ),
    "Krea2ModularPipeline": block(
        "Krea2AutoBlocks", partial(variant, "Krea2", num_layers=3), KREA2_WORDS, OBLONG, out=()
    ),
    "ErnieImageModularPipeline": block(
        "ErnieImageAutoBlocks",
        partial(fresh, "ErnieImageTransformer2DModel"),
        listed,
        OBLONG,
        out=("prompt_enhancer",),
    ),
    "HunyuanVideo15ModularPipeline": block(
        "HunyuanVideo15AutoBlocks",
        partial(variant, "HunyuanVideo15", in_channels=65, out_channels=32),
        texts("prompt_embeds_mask"),
        texts("prompt_embeds_mask", (5, 24), suffix="_2"),
        out=("vae_encoder", "image_encoder"),
        batch_size=lambda p: len(p),
        height=96,
        width=160,
        num_frames=5,
    ),
    "FluxKontextModularPipeline": block(
        "FluxKontextAutoBlocks",
        FLUX,
        positive(POOLED),
        image_latents=lambda p: noise(p, 4, 8, 12),
        max_area=80 * 112,
    ),
    "Flux2KleinModularPipeline": block("Flux2KleinAutoBlocks", KLEIN, FLUX2_WORDS),
    "Flux3DistilledModularPipeline": block(
        "Flux3DistilledAutoBlocks",
        partial(FLUX3, flow_map=True),
        positive(texts(shape=(TOKENS, NARROW))),
        OBLONG,
        out=("vae_encoder", "prompt_upsampler"),
    ),
    "Krea2TurboModularPipeline": block(
        "Krea2TurboAutoBlocks", partial(variant, "Krea2", num_layers=3), positive(KREA2_WORDS), OBLONG, out=()
    ),
    "WanImage2VideoModularPipeline": Exam(
        lambda: modular(
            "WanImage2VideoAutoBlocks",
            "vae_encoder",
            "image_encoder",
            transformer=variant("Wan I2V", num_layers=3, in_channels=36, out_channels=16),
            scheduler=unipc(),
        ),
        shown(
            texts(shape=(512, WIDTH)),
            FILM,
            image_embeds=lambda p: noise([7 + one for one in p], 5, 16),
            image_condition_latents=lambda p: noise([8 + one for one in p], 20, 2, 10, 14),
        ),
    ),
    "QwenImageEditPlusModularPipeline": block(
        "QwenImageEditPlusAutoBlocks",
        partial(variant, "QwenImage edit", num_layers=3),
        QWEN_WORDS,
        image_latents=lambda p: [noise(p, 4, 1, 8, 12)],
    ),
}

# Guidance that only combines what the transformer returns, and guidance that changes it for a branch.
QWEN_GUIDERS: dict[str, dict[str, Any]] = {
    "AdaptiveProjectedGuidance": {"adaptive_projected_guidance_momentum": -0.5},
    "AdaptiveProjectedMixGuidance": {},
    "TangentialClassifierFreeGuidance": {},
    "MagnitudeAwareGuidance": {},
    "PerturbedAttentionGuidance": {
        "perturbed_guidance_config": skipped(skip_attention=False, skip_attention_scores=True, skip_ff=False),
        "perturbed_guidance_start": 0.0,
        "perturbed_guidance_stop": 1.0,
    },
    "SmoothedEnergyGuidance": {
        "seg_guidance_config": diffusers.SmoothedEnergyGuidanceConfig(indices=[1], fqn="transformer_blocks"),
    },
    "AutoGuidance": {"auto_guidance_config": skipped(skip_attention=False)},
}
# Of the first, the pipeline of Qwen-Image makes NaN; of skipped blocks its text and image are swapped.
WAN_GUIDERS: dict[str, dict[str, Any]] = {
    "ClassifierFreeZeroStarGuidance": {"zero_init_steps": 1},
    "SkipLayerGuidance": {
        "skip_layer_config": diffusers.LayerSkipConfig(indices=[0], fqn="blocks"),
        "skip_layer_guidance_start": 0.0,
        "skip_layer_guidance_stop": 1.0,
    },
}


def guided(kind: str, make: Callable[[Any], Any], table: dict[str, dict[str, Any]], *given: Any) -> dict[str, Exam]:
    """Exams of a modular pipeline with other guiders."""
    call = shown(*given, num_inference_steps=4)
    return {
        f"{kind} {name}": Exam(
            partial(lambda kind, settings: make(kind(**settings)), getattr(guiders, name), each), call
        )
        for name, each in table.items()
    }


EXAMS: dict[str, Exam] = {
    "PixArtAlphaPipeline": Exam(
        around(
            "PixArtAlphaPipeline",
            "PixArt",
            diffusers.DPMSolverMultistepScheduler,
            tokenizer=letters(),
            text_encoder=variant("t5", vocab_size=100),
        ),
        latents(prompted, OBLONG, use_resolution_binning=False, clean_caption=False, max_sequence_length=24),
    ),
    "PixArtSigmaPipeline": family("pixart", **OBLONG),
    "PixArtSigmaPAGPipeline": Exam(
        pag("PixArtSigmaPAGPipeline", "PixArt", diffusers.DPMSolverMultistepScheduler()), latents(CAPTIONS)
    ),
    "HunyuanDiTPAGPipeline": Exam(
        pag("HunyuanDiTPAGPipeline", "HunyuanDiT", ddpm(), "blocks.1", requires_safety_checker=False),
        latents(TWO_TEXTS, OBLONG),
    ),
    "SanaPAGPipeline": Exam(pag("SanaPAGPipeline", "Sana", sana_scheduler()), latents(CAPTIONS, SANA)),
    "SanaPipeline": family("sana", **SANA),
    "SanaControlNetPipeline": Exam(
        lambda: build(
            "SanaControlNetPipeline",
            transformer=tiny("Sana"),
            controlnet=variant("SanaControlNetModel"),
            scheduler=sana_scheduler(),
            vae=variant("sana_vae"),
        ),
        latents(CAPTIONS, SANA, control_image=picture(3, 224, 160)),
    ),
    "SanaSprintPipeline": Exam(sprint("SanaSprintPipeline"), latents(SPRINT), guidance=False),
    "SanaSprintImg2ImgPipeline": Exam(
        sprint("SanaSprintImg2ImgPipeline"), latents(SPRINT, image=picture(3, 224, 160)), guidance=False
    ),
    "HunyuanDiTPipeline": family("hunyuan_dit", **OBLONG),
    "HunyuanDiTControlNetPipeline": Exam(hunyuan_control, latents(TWO_TEXTS, OBLONG, control_image=picture(3))),
    "DiTPipeline": family("dit"),
    "AuraFlowPipeline": family("auraflow", **OBLONG),
    "CogView3PlusPipeline": Exam(
        unlisted(
            "CogView3PlusPipeline",
            "CogView3PlusTransformer2DModel",
            partial(diffusers.CogVideoXDDIMScheduler, prediction_type="v_prediction", rescale_betas_zero_snr=True),
        ),
        latents(texts(shape=(TOKENS, NARROW)), OBLONG),
    ),
    "CogView4Pipeline": family("cogview4", **OBLONG),
    "CogView4ControlPipeline": Exam(
        lambda: build(
            "CogView4ControlPipeline",
            transformer=variant("CogView4", in_channels=8),
            scheduler=flow(),
            vae=variant("image_vae"),
        ),
        latents(texts(), OBLONG, control_image=picture(3)),
    ),
    "GlmImagePipeline": Exam(glm, glm_call()),
    # A picture of 4 x 6 tokens for every prompt, whose keys and values are kept in caches.
    "GlmImagePipeline image": Exam(
        glm,
        glm_call(
            image=lambda p: [[picture(3 + one, 96, 64)] for one in p],
            prior_token_image_ids=lambda p: tokens_of(p, 24, 70),
            source_image_grid_thw=lambda p: [torch.tensor([[1, 4, 6]]) for _ in p],
        ),
        # Keys and values of the picture it is made from are kept in an object, for all prompts in one.
        refused={"tokens": "kv_cache", "data=2": "cannot be run apart"},
    ),
    "Ideogram4Pipeline": Exam(
        ideogram4, latents(prompted, OBLONG, guidance_scale=4.0, guidance_schedule=None, max_sequence_length=48)
    ),
    "ErnieImagePipeline": Exam(unlisted("ErnieImagePipeline", "ErnieImageTransformer2DModel"), latents(listed, OBLONG)),
    "Krea2Pipeline": family("krea2", **OBLONG),
    "NucleusMoEImagePipeline": Exam(
        unlisted("NucleusMoEImagePipeline", "NucleusMoEImageTransformer2DModel"),
        latents(texts("prompt_embeds_mask", (TOKENS, NARROW)), OBLONG),
    ),
    # These two make two timesteps of one, however many prompts there are.
    "PRXPipeline": Exam(
        unlisted("PRXPipeline", "PRXTransformer2DModel", partial(flow, shift=3.0), vae=variant("image_vae")),
        PRX,
        several=False,
    ),
    "PRXPixelPipeline": Exam(
        unlisted("PRXPixelPipeline", "PRXTransformer2DModel + pixels", partial(flow, shift=3.0)),
        latents(PRX, height=10, width=14, output_type="pt"),
        several=False,
    ),
    "StableAudioPipeline": family("stable_audio"),
    "AceStepPipeline": Exam(
        ace_step,
        latents(
            prompted,
            lyrics=lambda p: ["la la", "ooh"][: len(p)],
            # 45 latents: 23 tokens of two, half of the last one padding.
            audio_duration=45 / 32,
            guidance_scale=4.0,
            max_text_length=20,
            max_lyric_length=20,
        ),
    ),
    "StableAudio3Pipeline": Exam(
        stable_audio_3("StableAudio3Pipeline"), latents(positive(STABLE_AUDIO_3), duration=1.0), guidance=False
    ),
    "StableAudio3Pipeline guidance": Exam(
        stable_audio_3("StableAudio3Pipeline"), latents(STABLE_AUDIO_3, duration=1.0, guidance_scale=4.0)
    ),
    "StableAudio3InpaintPipeline": Exam(
        stable_audio_3("StableAudio3InpaintPipeline"),
        latents(
            positive(STABLE_AUDIO_3),
            duration=1.0,
            audio=noise([7], 1, 92),
            mask_start_seconds=0.25,
            mask_end_seconds=0.5,
        ),
        guidance=False,
        # What is kept belongs to the tokens behind those of the memory.
        refused={"tokens": "transformer_blocks.0 cannot run on some of its tokens"},
    ),
    "LongCatAudioDiTPipeline": Exam(longcat_audio, latents(prompted, negative_prompt="noise", audio_duration_s=1.0)),
    # The pipeline knows sizes of a million pixels; latents may be smaller.
    "JoyImageEditPipeline": Exam(
        unlisted("JoyImageEditPipeline", "JoyImageEditTransformer3DModel", partial(flow, shift=4.0)),
        latents(texts("prompt_embeds_mask", (TOKENS, NARROW)), latents=lambda p: noise(p, 1, 4, 1, 10, 14)),
    ),
    "SanaPipeline LoRA": adapted("sana", "Sana", SANA),
    "CogView4Pipeline LoRA": adapted("cogview4", "CogView4", OBLONG),
    "StableDiffusion3Pipeline skip_guidance_layers": Exam(
        lambda: sd3("StableDiffusion3Pipeline"),
        latents(
            POOLED,
            num_inference_steps=4,
            skip_guidance_layers=[1],
            skip_layer_guidance_start=0.1,
            skip_layer_guidance_stop=0.9,
        ),
    ),
    # Perturbed rows attend by themselves, and their text to all of the picture.
    "StableDiffusion3PAGPipeline": Exam(
        lambda: sd3("StableDiffusion3PAGPipeline", pag_applied_layers=["transformer_blocks.1"]),
        latents(POOLED),
        refused=PERTURBED,
    ),
    "AmusedPipeline": Exam(amused, latents(prompted, height=96, width=96, generator=one_generator)),
    "KandinskyV22PriorPipeline": Exam(kandinsky_prior, latents(prompted, output_type="pt")),
    **MODULAR,
    **guided("QwenImageModularPipeline", modular_qwen, QWEN_GUIDERS, QWEN_WORDS),
    **guided("WanModularPipeline", modular_wan, WAN_GUIDERS, texts(), FILM),
}
