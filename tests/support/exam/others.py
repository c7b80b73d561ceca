"""Pipelines for pictures beside the most known ones, for sound, for proteins, and modular ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import guiders
from PIL import Image
from torch import nn

from support import lora
from support.classes import images as image_classes
from support.classes import others as other_classes
from support.exam import Exam, generators
from support.models import stirred, tiny, variant
from support.more_pipelines import FAMILIES, NEGATIVE, TOKENS, WIDTH, build, flow, noise, text

Call = Callable[[list[int]], dict[str, Any]]

# Latents of 10 x 14 where an autoencoder shrinks by 8: 5 x 7 tokens of 2 x 2.
OBLONG = {"height": 80, "width": 112}
# Channels of text of the tiny models of `support.classes`.
NARROW = image_classes.TEXT_DIM


def latents(call: Call, **more: Any) -> Call:
    """Two steps, latents, a generator for every prompt."""
    return lambda prompts: {
        "num_inference_steps": 2,
        "output_type": "latent",
        "generator": generators(prompts),
        **call(prompts),
        **more,
    }


def family(name: str, **more: Any) -> Exam:
    """A family that other tests run, too."""
    one = FAMILIES[name]
    return Exam(one.make, latents(one.call, **more), guidance=bool(one.guidance), several=one.several)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A component with the same random weights in every process."""
    torch.manual_seed(0)
    return stirred(make().eval())


def case(name: str) -> nn.Module:
    """A tiny transformer of a class without a reviewed layout."""
    return (image_classes.CASES.get(name) or other_classes.CASES[name]).make()


def picture(number: int, width: int = 112, height: int = 80) -> Image.Image:
    """A smooth picture that differs from number to number."""
    x, y = torch.arange(width) / width, torch.arange(height)[:, None] / height
    channels = [torch.sin(6 * x * (number + n + 1)) * torch.cos(5 * y * (n + 1)) for n in range(3)]
    return Image.fromarray(((torch.stack(channels, -1) + 1) * 127).to(torch.uint8).numpy())


def vae(channels: int = 4, levels: int = 4) -> nn.Module:
    """An autoencoder of pictures that shrinks by 8."""
    return seeded(
        lambda: diffusers.AutoencoderKL(
            block_out_channels=(8,) * levels,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            latent_channels=channels,
            norm_num_groups=4,
            layers_per_block=1,
        )
    )


def deep_vae(channels: int = 4) -> nn.Module:
    """Sana's autoencoder, which shrinks by 32."""
    return seeded(
        lambda: diffusers.AutoencoderDC(
            in_channels=3,
            latent_channels=channels,
            attention_head_dim=2,
            encoder_block_types=("ResBlock",) * 6,
            decoder_block_types=("ResBlock",) * 6,
            encoder_block_out_channels=(8,) * 6,
            decoder_block_out_channels=(8,) * 6,
            encoder_qkv_multiscales=((),) * 6,
            decoder_qkv_multiscales=((),) * 6,
            encoder_layers_per_block=(1,) * 6,
            decoder_layers_per_block=(1,) * 6,
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
        )
    )


# --- words -----------------------------------------------------------------------------------------------------------

PROMPTS = {1: "a fox in the snow", 2: "two ducks on a pond"}


def prompts_of(numbers: list[int]) -> list[str]:
    """Prompts of different lengths."""
    return [PROMPTS[number] for number in numbers]


def letters(longest: int = 24, side: str = "right", chat: str = "") -> Any:
    """A tokenizer that knows the letters and nothing else."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "</s>", "?", *(chr(code) for code in range(ord(" "), ord("~") + 1) if chr(code) != "?")]
    inner = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, unk_token="?"))
    inner.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="?",
        model_max_length=longest,
        padding_side=side,
        chat_template=chat or None,
    )


def t5(width: int, kind: str = "T5") -> Any:
    """A T5 encoder of one layer."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=100, d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2, tie_word_embeddings=False
    )
    return seeded(lambda: getattr(transformers, f"{kind}EncoderModel")(config))


def qwen3(width: int, layers: int = 1) -> Any:
    """A causal language model."""
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=100,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return seeded(lambda: Qwen3Model(config))


def qwen3_vl(width: int, layers: int) -> Any:
    """A language model that could look at pictures, too."""
    from transformers import Qwen3VLConfig, Qwen3VLModel

    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 100,
            "hidden_size": width,
            "intermediate_size": 16,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": width,
        },
    )
    return seeded(lambda: Qwen3VLModel(config))


# --- pictures --------------------------------------------------------------------------------------------------------

PLAIN = {"negative_prompt": None, "use_resolution_binning": False}


def captions(prompts: list[int], **more: Any) -> dict[str, Any]:
    """As PixArt and Sana are called: masks of captions, no caption to clean."""
    return {**text(prompts, "prompt_attention_mask"), **OBLONG, **PLAIN, **more}


def pixart_alpha() -> Any:
    return build(
        diffusers.PixArtAlphaPipeline,
        transformer=tiny("PixArt"),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
        tokenizer=letters(),
        text_encoder=t5(WIDTH),
    )


def pixart_alpha_call(prompts: list[int]) -> dict[str, Any]:
    return {
        "prompt": prompts_of(prompts),
        **OBLONG,
        "use_resolution_binning": False,
        "clean_caption": False,
        "max_sequence_length": 24,
    }


def pag(pipeline: type, model: str, scheduler: Any, layer: str) -> Any:
    """A pipeline with perturbed attention guidance (arXiv:2403.17377), which swaps processors of its transformer."""
    return build(pipeline, transformer=copy.deepcopy(tiny(model)), scheduler=scheduler, pag_applied_layers=[layer])


def two_texts(prompts: list[int]) -> dict[str, Any]:
    """As HunyuanDiT is called."""
    return {
        **text(prompts, "prompt_attention_mask", (6, 32)),
        **text(prompts, "prompt_attention_mask", (7, 24), suffix="_2"),
        **OBLONG,
        "use_resolution_binning": False,
    }


def sana_scheduler() -> Any:
    return diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


SANA = {"height": 160, "width": 224}


def sana_control() -> Any:
    return build(
        diffusers.SanaControlNetPipeline,
        transformer=tiny("Sana"),
        controlnet=seeded(
            lambda: diffusers.SanaControlNetModel(
                in_channels=4,
                out_channels=4,
                num_attention_heads=8,
                attention_head_dim=8,
                num_layers=1,
                num_cross_attention_heads=8,
                cross_attention_head_dim=8,
                cross_attention_dim=64,
                caption_channels=WIDTH,
                sample_size=8,
            )
        ),
        scheduler=sana_scheduler(),
        vae=deep_vae(),
    )


def sprint(pipeline: type) -> Any:
    """Sana-Sprint: guidance is an input of the transformer."""
    return build(
        pipeline,
        transformer=variant("Sana", guidance_embeds=True, guidance_embeds_scale=0.1),
        scheduler=diffusers.SCMScheduler(),
        vae=deep_vae(),
    )


def sprint_call(prompts: list[int]) -> dict[str, Any]:
    made = text(prompts, "prompt_attention_mask")
    return {
        **{name: value for name, value in made.items() if not name.startswith("negative")},
        **SANA,
        "use_resolution_binning": False,
    }


def hunyuan_control() -> Any:
    model = variant("HunyuanDiT", pooled_projection_dim=16)
    config = dict(model.config)
    names = ("num_attention_heads", "attention_head_dim", "in_channels", "patch_size", "sample_size", "hidden_size")
    names += ("cross_attention_dim", "cross_attention_dim_t5", "pooled_projection_dim", "text_len", "text_len_t5")
    controlnet = seeded(
        lambda: diffusers.HunyuanDiT2DControlNetModel(
            **{name: config[name] for name in names}, transformer_num_layers=4
        )
    )
    return build(
        diffusers.HunyuanDiTControlNetPipeline,
        transformer=model,
        controlnet=controlnet,
        scheduler=diffusers.DDPMScheduler(prediction_type="v_prediction", clip_sample=False),
        vae=vae(),
        requires_safety_checker=False,
    )


def cogview_control_call(prompts: list[int]) -> dict[str, Any]:
    return {**text(prompts), **OBLONG, "control_image": picture(3)}


def glm_call(prompts: list[int]) -> dict[str, Any]:
    prior = [torch.randint(32, (60,), generator=torch.Generator().manual_seed(50 + one)) for one in prompts]
    return {**text(prompts, shape=(TOKENS, NARROW)), "height": 96, "width": 160, "prior_token_ids": torch.stack(prior)}


def glm_image_call(prompts: list[int]) -> dict[str, Any]:
    """A picture of 4 x 6 tokens for every prompt, whose keys and values are kept in caches."""
    grid = torch.tensor([[1, 4, 6]])
    return {
        **glm_call(prompts),
        "image": [[picture(3 + one, 96, 64)] for one in prompts],
        "prior_token_image_ids": [
            torch.randint(32, (24,), generator=torch.Generator().manual_seed(70 + one)) for one in prompts
        ],
        "source_image_grid_thw": [grid for _ in prompts],
    }


def glm() -> Any:
    autoencoder = vae()
    autoencoder.register_to_config(latents_mean=[0.1] * 4, latents_std=[0.9] * 4)
    return build(
        diffusers.GlmImagePipeline,
        transformer=case("GlmImageTransformer2DModel"),
        scheduler=flow(),
        vae=autoencoder,
    )


CHAT = "{% for m in messages %}user: {% for c in m['content'] %}{{ c['text'] }}{% endfor %} assistant:{% endfor %}"


def ideogram4() -> Any:
    from diffusers.models.transformers.transformer_ideogram4 import Ideogram4Transformer2DModel

    def transformer() -> nn.Module:
        return Ideogram4Transformer2DModel(
            in_channels=8,
            num_layers=2,
            attention_head_dim=12,
            num_attention_heads=4,
            intermediate_size=64,
            adaln_dim=16,
            llm_features_dim=13 * 8,
            mrope_section=(2, 2, 2),
        )

    torch.manual_seed(1)
    return build(
        diffusers.Ideogram4Pipeline,
        transformer=seeded(transformer),
        unconditional_transformer=stirred(transformer().eval()),
        text_encoder=qwen3_vl(8, 36),
        tokenizer=letters(chat=CHAT),
        scheduler=flow(),
    )


def ideogram4_call(prompts: list[int]) -> dict[str, Any]:
    return {
        "prompt": prompts_of(prompts),
        **OBLONG,
        "guidance_scale": 4.0,
        "guidance_schedule": None,
        "max_sequence_length": 48,
    }


def listed(prompts: list[int], width: int) -> dict[str, Any]:
    """Embeddings as lists, without padding."""
    return {
        "prompt_embeds": [noise([one], TOKENS - one, width)[0] for one in prompts],
        "negative_prompt_embeds": [noise([NEGATIVE], 3, width)[0] for _ in prompts],
    }


def prx_call(prompts: list[int]) -> dict[str, Any]:
    return {
        **text(prompts, "prompt_attention_mask", (TOKENS, NARROW), torch.bool),
        **OBLONG,
        "use_resolution_binning": False,
        "negative_prompt": None,
    }


def pooled(prompts: list[int]) -> dict[str, Any]:
    """As Stable Diffusion 3 and Flux are called."""
    return {
        **text(prompts),
        "pooled_prompt_embeds": noise(prompts, 16),
        "negative_pooled_prompt_embeds": noise([NEGATIVE] * len(prompts), 16),
        **OBLONG,
    }


def joy() -> Any:
    return build(
        diffusers.JoyImageEditPipeline, transformer=case("JoyImageEditTransformer3DModel"), scheduler=flow(shift=4.0)
    )


def joy_call(prompts: list[int]) -> dict[str, Any]:
    # The pipeline knows sizes of a million pixels; latents may be smaller.
    return {**text(prompts, "prompt_embeds_mask", (TOKENS, NARROW)), "latents": noise(prompts, 1, 4, 1, 10, 14)}


def adapted(make: Callable[[], Any], name: str) -> Any:
    """A pipeline with a LoRA."""
    pipe = make()
    pipe.transformer = copy.deepcopy(pipe.transformer)
    pipe.load_lora_weights(lora.adapter(name, 7), adapter_name="a")
    return pipe


def sd3(pipeline: type, **parts: Any) -> Any:
    # A model of its own: a call that is refused leaves processors of perturbed attention where they are.
    model = copy.deepcopy(variant("SD3", num_layers=4))
    return build(pipeline, transformer=model, scheduler=flow(shift=3.0), **parts)


def clip(width: int) -> Any:
    """CLIP's encoder of text, with an embedding of all of it."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=100,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=24,
        projection_dim=width,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return seeded(lambda: CLIPTextModelWithProjection(config))


def amused() -> Any:
    return build(
        diffusers.AmusedPipeline,
        transformer=seeded(
            lambda: diffusers.UVit2DModel(
                hidden_size=32,
                cond_embed_dim=16,
                micro_cond_encode_dim=2,
                micro_cond_embed_dim=10,
                encoder_hidden_size=16,
                vocab_size=40,
                codebook_size=30,
                block_out_channels=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                block_num_heads=4,
                in_channels=32,
                intermediate_size=32,
                sample_size=16,
            )
        ),
        vqvae=seeded(
            lambda: diffusers.VQModel(
                block_out_channels=(8,) * 4,
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                latent_channels=8,
                num_vq_embeddings=30,
                norm_num_groups=4,
                layers_per_block=1,
                lookup_from_codebook=True,
            )
        ),
        text_encoder=clip(16),
        tokenizer=letters(),
        scheduler=diffusers.AmusedScheduler(mask_token_id=39),
    )


def kandinsky_prior() -> Any:
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    return build(
        diffusers.KandinskyV22PriorPipeline,
        prior=seeded(
            lambda: diffusers.PriorTransformer(
                num_attention_heads=4, attention_head_dim=12, num_layers=2, embedding_dim=16, num_embeddings=24
            )
        ),
        text_encoder=clip(16),
        tokenizer=letters(),
        image_encoder=seeded(lambda: CLIPVisionModelWithProjection(vision)),
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        scheduler=diffusers.UnCLIPScheduler(prediction_type="sample", variance_type="fixed_small_log"),
    )


# --- sound -----------------------------------------------------------------------------------------------------------


def oobleck(channels: int) -> nn.Module:
    """An autoencoder of sound: two samples make a latent."""
    return seeded(
        lambda: diffusers.AutoencoderOobleck(
            encoder_hidden_size=4,
            downsampling_ratios=[1, 2],
            channel_multiples=[1, 2],
            decoder_channels=4,
            decoder_input_channels=channels,
            sampling_rate=64,
        )
    )


def ace_step() -> Any:
    from diffusers.pipelines.ace_step.modeling_ace_step import AceStepConditionEncoder

    return build(
        diffusers.AceStepPipeline,
        transformer=case("AceStepTransformer1DModel"),
        condition_encoder=seeded(
            lambda: AceStepConditionEncoder(
                hidden_size=NARROW,
                intermediate_size=32,
                text_hidden_dim=16,
                timbre_hidden_dim=8,
                num_lyric_encoder_hidden_layers=2,
                num_timbre_encoder_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=10,
                sliding_window=8,
            )
        ),
        text_encoder=qwen3(16),
        tokenizer=letters(64),
        vae=oobleck(8),
        scheduler=flow(num_train_timesteps=1, shift=1.0),
    )


def ace_step_call(prompts: list[int]) -> dict[str, Any]:
    return {
        "prompt": prompts_of(prompts),
        "lyrics": ["la la", "ooh"][: len(prompts)],
        # 45 latents: 23 tokens of two, half of the last one padding.
        "audio_duration": 45 / 32,
        "guidance_scale": 4.0,
        "max_text_length": 20,
        "max_lyric_length": 20,
    }


def stable_audio_3(pipeline: type) -> Any:
    from diffusers.pipelines.stable_audio_3.modeling_stable_audio_3 import StableAudio3DurationEmbedder

    return build(
        pipeline,
        transformer=case("StableAudio3DiTModel"),
        duration_embedder=seeded(lambda: StableAudio3DurationEmbedder(output_dim=NARROW, fourier_dim=16)),
        vae=seeded(
            lambda: diffusers.AutoencoderSAME(
                audio_channels=1,
                patch_size=2,
                encoder_channels=16,
                encoder_c_mults=(1,),
                encoder_strides=(2,),
                encoder_transformer_depths=(1,),
                latent_dim=8,
                dim_heads=8,
                sampling_rate=92,
            )
        ),
        scheduler=flow(stochastic_sampling=True),
    )


def stable_audio_3_call(prompts: list[int]) -> dict[str, Any]:
    made = text(prompts, "encoder_attention_mask", (TOKENS, NARROW))
    return {name: value for name, value in made.items() if not name.startswith("negative")} | {"duration": 1.0}


def longcat_audio() -> Any:
    from diffusers.models.autoencoders.autoencoder_longcat_audio_dit import LongCatAudioDiTVae

    return build(
        diffusers.LongCatAudioDiTPipeline,
        transformer=case("LongCatAudioDiTTransformer"),
        text_encoder=t5(NARROW, "UMT5"),
        tokenizer=letters(),
        vae=seeded(
            lambda: LongCatAudioDiTVae(
                channels=4, c_mults=[1, 2], strides=[2], latent_dim=8, encoder_latent_dim=16, downsampling_ratio=2,
                sample_rate=46,
            )
        ),
        scheduler=flow(shift=1.0, invert_sigmas=True),
    )  # fmt: skip


# --- modular pipelines -----------------------------------------------------------------------------------------------


def modular(blocks: str, *left_out: str, **components: Any) -> Any:
    """A modular pipeline without its encoders and decoders, to which their results are passed."""
    from diffusers import modular_pipelines

    made = getattr(modular_pipelines, blocks)()
    for name in ("text_encoder", "decode", *left_out):
        made.sub_blocks.pop(name)
    pipe = made.init_pipeline()
    pipe.update_components(**components)
    return pipe


def modular_latents(call: Call, **more: Any) -> Call:
    """Two steps; what is asked for is the latents."""
    return lambda prompts: {
        "num_inference_steps": 2,
        "output": "latents",
        "generator": generators(prompts),
        **call(prompts),
        **more,
    }


def wan_scheduler() -> Any:
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


# Without its autoencoder the pipeline takes latents to have 16 channels.
WAN = {"num_layers": 3, "in_channels": 16, "out_channels": 16}
FILM = {"height": 80, "width": 112, "num_frames": 5}


def modular_wan(guider: Any = None) -> Any:
    given = {} if guider is None else {"guider": guider}
    return modular("WanBlocks", transformer=variant("Wan", **WAN), scheduler=wan_scheduler(), **given)


def modular_qwen(guider: Any = None) -> Any:
    return modular(
        "QwenImageAutoBlocks",
        "vae_encoder",
        "controlnet_vae_encoder",
        transformer=variant("QwenImage", num_layers=3, attention_head_dim=16),
        scheduler=flow(),
        **({} if guider is None else {"guider": guider}),
    )


def guided(name: str, **settings: Any) -> Exam:
    """A modular pipeline with another guider."""
    return Exam(
        lambda: modular_qwen(getattr(guiders, name)(**settings)),
        modular_latents(lambda p: {**text(p, "prompt_embeds_mask"), **OBLONG}, num_inference_steps=4),
    )


def skipped(**settings: Any) -> Any:
    """Which of the blocks are changed for a branch."""
    return diffusers.LayerSkipConfig(indices=[1], fqn="transformer_blocks", **settings)


def positive(made: dict[str, Any]) -> dict[str, Any]:
    """Without what guidance leads away from."""
    return {name: value for name, value in made.items() if not name.startswith("negative")}


MODULAR: dict[str, Exam] = {
    "FluxModularPipeline": Exam(
        lambda: modular("FluxAutoBlocks", "vae_encoder", transformer=variant("Flux", num_layers=3), scheduler=flow()),
        modular_latents(lambda p: positive(pooled(p))),
        guidance=False,
    ),
    "Flux2ModularPipeline": Exam(
        lambda: modular("Flux2AutoBlocks", "vae_encoder", transformer=variant("Flux2", num_layers=3), scheduler=flow()),
        modular_latents(lambda p: {"prompt_embeds": noise(p, TOKENS, WIDTH), **OBLONG}),
        guidance=False,
    ),
    "Flux2KleinBaseModularPipeline": Exam(
        lambda: modular(
            "Flux2KleinBaseAutoBlocks",
            "vae_encoder",
            transformer=variant("Flux2", num_layers=3, guidance_embeds=False),
            scheduler=flow(),
        ),
        modular_latents(lambda p: {**text(p), **OBLONG}),
    ),
    "Flux3ModularPipeline": Exam(
        lambda: modular(
            "Flux3AutoBlocks",
            "vae_encoder",
            "prompt_upsampler",
            transformer=case("Flux3Transformer2DModel"),
            scheduler=flow(),
        ),
        modular_latents(lambda p: {**text(p, shape=(TOKENS, NARROW)), **OBLONG}),
    ),
    "StableDiffusion3ModularPipeline": Exam(
        lambda: modular(
            "StableDiffusion3AutoBlocks", "vae_encoder", transformer=variant("SD3", num_layers=4), scheduler=flow()
        ),
        modular_latents(pooled),
    ),
    "QwenImageModularPipeline": Exam(
        modular_qwen, modular_latents(lambda p: {**text(p, "prompt_embeds_mask"), **OBLONG})
    ),
    "ZImageModularPipeline": Exam(
        lambda: modular("ZImageAutoBlocks", "vae_encoder", transformer=variant("ZImage", n_layers=3), scheduler=flow()),
        modular_latents(FAMILIES["z_image"].call, **OBLONG),
    ),
    "WanModularPipeline": Exam(modular_wan, modular_latents(lambda p: {**text(p), **FILM})),
    "Wan22ModularPipeline": Exam(
        lambda: modular(
            "Wan22Blocks",
            transformer=variant("Wan", **WAN),
            transformer_2=variant("Wan", **WAN, ffn_dim=80),
            scheduler=wan_scheduler(),
        ),
        modular_latents(lambda p: {**text(p), **FILM}, num_inference_steps=3),
    ),
    "LTXModularPipeline": Exam(
        lambda: modular("LTXAutoBlocks", "vae_encoder", transformer=variant("LTX", num_layers=3), scheduler=flow()),
        modular_latents(lambda p: {**text(p, "prompt_attention_mask"), "height": 160, "width": 224, "num_frames": 9}),
    ),
    "Krea2ModularPipeline": Exam(
        lambda: modular("Krea2AutoBlocks", transformer=variant("Krea2", num_layers=3), scheduler=flow()),
        modular_latents(lambda p: {**text(p, "prompt_embeds_mask", (TOKENS, 2, WIDTH), torch.bool), **OBLONG}),
    ),
    "ErnieImageModularPipeline": Exam(
        lambda: modular(
            "ErnieImageAutoBlocks",
            "prompt_enhancer",
            transformer=case("ErnieImageTransformer2DModel"),
            scheduler=flow(),
        ),
        modular_latents(lambda p: {**listed(p, NARROW), **OBLONG}),
    ),
    "HunyuanVideo15ModularPipeline": Exam(
        lambda: modular(
            "HunyuanVideo15AutoBlocks",
            "vae_encoder",
            "image_encoder",
            transformer=variant("HunyuanVideo15", in_channels=65, out_channels=32),
            scheduler=flow(),
        ),
        modular_latents(
            lambda p: {
                **text(p, "prompt_embeds_mask"),
                **text(p, "prompt_embeds_mask", (5, 24), suffix="_2"),
                "batch_size": len(p),
                "height": 96,
                "width": 160,
                "num_frames": 5,
            }
        ),
    ),
    "FluxKontextModularPipeline": Exam(
        lambda: modular(
            "FluxKontextAutoBlocks", "vae_encoder", transformer=variant("Flux", num_layers=3), scheduler=flow()
        ),
        modular_latents(lambda p: {**positive(pooled(p)), "image_latents": noise(p, 4, 8, 12), "max_area": 80 * 112}),
        guidance=False,
    ),
    "Flux2KleinModularPipeline": Exam(
        lambda: modular(
            "Flux2KleinAutoBlocks",
            "vae_encoder",
            transformer=variant("Flux2", num_layers=3, guidance_embeds=False),
            scheduler=flow(),
        ),
        modular_latents(lambda p: {"prompt_embeds": noise(p, TOKENS, WIDTH), **OBLONG}),
        guidance=False,
    ),
    "Flux3DistilledModularPipeline": Exam(
        lambda: modular(
            "Flux3DistilledAutoBlocks",
            "vae_encoder",
            "prompt_upsampler",
            transformer=seeded(
                lambda: diffusers.Flux3Transformer2DModel.from_config(
                    dict(case("Flux3Transformer2DModel").config), flow_map=True
                )
            ),
            scheduler=flow(),
        ),
        modular_latents(lambda p: {"prompt_embeds": noise(p, TOKENS, NARROW), **OBLONG}),
        guidance=False,
    ),
    "Krea2TurboModularPipeline": Exam(
        lambda: modular("Krea2TurboAutoBlocks", transformer=variant("Krea2", num_layers=3), scheduler=flow()),
        modular_latents(
            lambda p: positive({**text(p, "prompt_embeds_mask", (TOKENS, 2, WIDTH), torch.bool), **OBLONG})
        ),
        guidance=False,
    ),
    "WanImage2VideoModularPipeline": Exam(
        lambda: modular(
            "WanImage2VideoAutoBlocks",
            "vae_encoder",
            "image_encoder",
            transformer=variant("Wan I2V", num_layers=3, in_channels=36, out_channels=16),
            scheduler=wan_scheduler(),
        ),
        modular_latents(
            lambda p: {
                **text(p, shape=(512, WIDTH)),
                **FILM,
                "image_embeds": noise([7 + one for one in p], 5, 16),
                "image_condition_latents": noise([8 + one for one in p], 20, 2, 10, 14),
            }
        ),
    ),
    "QwenImageEditPlusModularPipeline": Exam(
        lambda: modular(
            "QwenImageEditPlusAutoBlocks",
            "vae_encoder",
            transformer=variant("QwenImage edit", num_layers=3),
            scheduler=flow(),
        ),
        modular_latents(
            lambda p: {
                **text(p, "prompt_embeds_mask"),
                **OBLONG,
                "image_latents": [noise(p, 4, 1, 8, 12)],
            }
        ),
    ),
}

# Guidance that only combines what the transformer returns, and guidance that changes it for a branch.
GUIDED: dict[str, Exam] = {
    f"QwenImageModularPipeline {name}": guided(name, **settings)
    for name, settings in {
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
    }.items()
}
# Of the first, the pipeline of Qwen-Image makes NaN; of skipped blocks its text and image are swapped.
WAN_GUIDED = {
    f"WanModularPipeline {guider}": Exam(
        partial(lambda guider, settings: modular_wan(getattr(guiders, guider)(**settings)), guider, settings),
        modular_latents(lambda p: {**text(p), **FILM}, num_inference_steps=4),
    )
    for guider, settings in {
        "ClassifierFreeZeroStarGuidance": {"zero_init_steps": 1},
        "SkipLayerGuidance": {
            "skip_layer_config": diffusers.LayerSkipConfig(indices=[0], fqn="blocks"),
            "skip_layer_guidance_start": 0.0,
            "skip_layer_guidance_stop": 1.0,
        },
    }.items()
}

EXAMS: dict[str, Exam] = {
    "PixArtAlphaPipeline": Exam(pixart_alpha, latents(pixart_alpha_call)),
    "PixArtSigmaPipeline": family("pixart", **OBLONG),
    "PixArtSigmaPAGPipeline": Exam(
        partial(
            pag,
            diffusers.PixArtSigmaPAGPipeline,
            "PixArt",
            diffusers.DPMSolverMultistepScheduler(),
            "transformer_blocks.1",
        ),
        latents(captions),
    ),
    "HunyuanDiTPAGPipeline": Exam(
        lambda: build(
            diffusers.HunyuanDiTPAGPipeline,
            transformer=copy.deepcopy(tiny("HunyuanDiT")),
            scheduler=diffusers.DDPMScheduler(prediction_type="v_prediction", clip_sample=False),
            requires_safety_checker=False,
            pag_applied_layers=["blocks.1"],
        ),
        latents(two_texts),
    ),
    "SanaPAGPipeline": Exam(
        partial(pag, diffusers.SanaPAGPipeline, "Sana", sana_scheduler(), "transformer_blocks.1"),
        latents(captions, **SANA),
    ),
    "SanaPipeline": family("sana", **SANA),
    "SanaControlNetPipeline": Exam(
        sana_control, latents(lambda p: captions(p, control_image=picture(3, 224, 160)), **SANA)
    ),
    "SanaSprintPipeline": Exam(partial(sprint, diffusers.SanaSprintPipeline), latents(sprint_call), guidance=False),
    "SanaSprintImg2ImgPipeline": Exam(
        partial(sprint, diffusers.SanaSprintImg2ImgPipeline),
        latents(lambda p: {**sprint_call(p), "image": picture(3, 224, 160)}),
        guidance=False,
    ),
    "HunyuanDiTPipeline": family("hunyuan_dit", **OBLONG),
    "HunyuanDiTControlNetPipeline": Exam(
        hunyuan_control, latents(lambda p: {**two_texts(p), "control_image": picture(3)})
    ),
    "DiTPipeline": Exam(
        FAMILIES["dit"].make,
        lambda p: {"class_labels": p, "output_type": "np", "generator": generators(p), "num_inference_steps": 2},
    ),
    "AuraFlowPipeline": family("auraflow", **OBLONG),
    "CogView3PlusPipeline": Exam(
        lambda: build(
            diffusers.CogView3PlusPipeline,
            transformer=case("CogView3PlusTransformer2DModel"),
            scheduler=diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True),
        ),
        latents(lambda p: {**text(p, shape=(TOKENS, NARROW)), **OBLONG}),
    ),
    "CogView4Pipeline": family("cogview4", **OBLONG),
    "CogView4ControlPipeline": Exam(
        lambda: build(
            diffusers.CogView4ControlPipeline,
            transformer=variant("CogView4", in_channels=8),
            scheduler=flow(),
            vae=vae(),
        ),
        latents(cogview_control_call),
    ),
    "GlmImagePipeline": Exam(glm, latents(glm_call)),
    "GlmImagePipeline image": Exam(
        glm,
        latents(glm_image_call),
        # Keys and values of the picture it is made from are kept in an object, for all prompts in one.
        refused={"tokens": "kv_cache", "data=2": "cannot be run apart"},
    ),
    "Ideogram4Pipeline": Exam(ideogram4, latents(ideogram4_call)),
    "ErnieImagePipeline": Exam(
        lambda: build(diffusers.ErnieImagePipeline, transformer=case("ErnieImageTransformer2DModel"), scheduler=flow()),
        latents(lambda p: {**listed(p, NARROW), **OBLONG}),
    ),
    "Krea2Pipeline": family("krea2", **OBLONG),
    "NucleusMoEImagePipeline": Exam(
        lambda: build(
            diffusers.NucleusMoEImagePipeline,
            transformer=case("NucleusMoEImageTransformer2DModel"),
            scheduler=flow(),
        ),
        latents(lambda p: {**text(p, "prompt_embeds_mask", (TOKENS, NARROW)), **OBLONG}),
    ),
    "PRXPipeline": Exam(
        lambda: build(
            diffusers.PRXPipeline, transformer=case("PRXTransformer2DModel"), scheduler=flow(shift=3.0), vae=vae()
        ),
        latents(prx_call),
        # The pipeline makes two timesteps of one, however many prompts there are.
        several=False,
    ),
    "PRXPixelPipeline": Exam(
        lambda: build(
            diffusers.PRXPixelPipeline, transformer=case("PRXTransformer2DModel + pixels"), scheduler=flow(shift=3.0)
        ),
        latents(prx_call, height=10, width=14, output_type="pt"),
        several=False,
    ),
    "StableAudioPipeline": family("stable_audio"),
    "AceStepPipeline": Exam(ace_step, latents(ace_step_call)),
    "StableAudio3Pipeline": Exam(
        partial(stable_audio_3, diffusers.StableAudio3Pipeline), latents(stable_audio_3_call), guidance=False
    ),
    "StableAudio3Pipeline guidance": Exam(
        partial(stable_audio_3, diffusers.StableAudio3Pipeline),
        latents(
            lambda p: text(p, "encoder_attention_mask", (TOKENS, NARROW)) | {"duration": 1.0, "guidance_scale": 4.0}
        ),
    ),
    "StableAudio3InpaintPipeline": Exam(
        partial(stable_audio_3, diffusers.StableAudio3InpaintPipeline),
        latents(
            lambda p: (
                stable_audio_3_call(p)
                | {"audio": noise([7], 1, 92), "mask_start_seconds": 0.25, "mask_end_seconds": 0.5}
            )
        ),
        guidance=False,
        # What is kept belongs to the tokens behind those of the memory.
        refused={"tokens": "transformer_blocks.0 cannot run on some of its tokens"},
    ),
    "LongCatAudioDiTPipeline": Exam(
        longcat_audio, latents(lambda p: {"prompt": prompts_of(p), "negative_prompt": "noise", "audio_duration_s": 1.0})
    ),
    "JoyImageEditPipeline": Exam(joy, latents(joy_call)),
    "SanaPipeline LoRA": Exam(
        lambda: adapted(FAMILIES["sana"].make, "Sana"),
        latents(FAMILIES["sana"].call, **SANA, attention_kwargs={"scale": 0.6}),
    ),
    "CogView4Pipeline LoRA": Exam(
        lambda: adapted(FAMILIES["cogview4"].make, "CogView4"),
        latents(FAMILIES["cogview4"].call, **OBLONG, attention_kwargs={"scale": 0.6}),
    ),
    "StableDiffusion3Pipeline skip_guidance_layers": Exam(
        lambda: sd3(diffusers.StableDiffusion3Pipeline),
        latents(
            pooled,
            num_inference_steps=4,
            skip_guidance_layers=[1],
            skip_layer_guidance_start=0.1,
            skip_layer_guidance_stop=0.9,
        ),
    ),
    "StableDiffusion3PAGPipeline": Exam(
        lambda: sd3(diffusers.StableDiffusion3PAGPipeline, pag_applied_layers=["transformer_blocks.1"]),
        latents(pooled),
        # Perturbed rows attend by themselves, and their text to all of the picture.
        refused={"tokens": "PAGCFGJointAttnProcessor2_0"},
    ),
    "AmusedPipeline": Exam(
        amused, latents(lambda p: {"prompt": prompts_of(p), "height": 96, "width": 96, "generator": generators(p)[0]})
    ),
    "KandinskyV22PriorPipeline": Exam(
        kandinsky_prior,
        lambda p: {"prompt": prompts_of(p), "num_inference_steps": 2, "generator": generators(p), "output_type": "pt"},
    ),
    **MODULAR,
    **GUIDED,
    **WAN_GUIDED,
}
