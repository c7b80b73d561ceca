"""The reviewed layouts: of each transformer class the positions of its tokens, as data."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from torch import nn

from ..core.library import is_published, library_name
from .types import (
    CONTROLNET,
    IP_ADAPTER,
    LOCAL,
    Attention,
    Count,
    Cut,
    Grid,
    Leaf,
    Region,
    Stream,
    Table,
    TokenLayout,
    image_and_text,
    joint,
    rotary,
)

# AuraFlow (Fal 2024): joint attention, then one stream, text (with its registers) before image.
AURAFLOW = TokenLayout(
    model="AuraFlowTransformer2DModel",
    regions=(
        Region("joint_transformer_blocks", image_and_text(image=1), (joint("text", "image"),), whole=("temb",)),
        Region("single_transformer_blocks", whole=("temb",)),
    ),
)

# Chroma (Lodestone 2025): FLUX.1 without guidance; the second block list runs on one stream, text first.
CHROMA = TokenLayout(
    model="ChromaTransformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=image_and_text(image=1),
            attention=(joint("text", "image"),),
            cuts=(*rotary("image_rotary_emb", 0, ("text", "image")), Cut("attention_mask", 1, ("text", "image"))),
            whole=("temb",),
        ),
        Region(
            blocks="single_transformer_blocks",
            cuts=(*rotary("image_rotary_emb", 0), Cut("attention_mask", 1)),
            whole=("temb",),
        ),
    ),
    unbatched=("img_ids", "txt_ids"),
    refused={
        "controlnet_block_samples": CONTROLNET,
        "controlnet_single_block_samples": CONTROLNET,
        "joint_attention_kwargs.ip_adapter_image_embeds": IP_ADAPTER,
    },
)

# CogVideoX (Yang et al. 2024, arXiv:2408.06072): video and text as one sequence in every attention.
COGVIDEOX_BLOCKS = Region(
    "transformer_blocks",
    streams=image_and_text(image=0, text_used_after=False),
    attention=(joint("text", "image"),),
    cuts=rotary("image_rotary_emb", 0),
    whole=("temb",),
)
ROTARY_PAIR = ("image_rotary_emb.0", "image_rotary_emb.1")
COGVIDEOX = TokenLayout("CogVideoXTransformer3DModel", (COGVIDEOX_BLOCKS,), unbatched=(*ROTARY_PAIR, "ofs"))

# CogView4 (Zhipu AI 2025; CogView3: Zheng et al. 2024, arXiv:2403.05121): joint attention, text first.
COGVIEW4 = TokenLayout(
    "CogView4Transformer2DModel",
    (replace(COGVIDEOX_BLOCKS, cuts=(*rotary("image_rotary_emb", 0), Cut("attention_mask", 1, ("text",)))),),
    unbatched=ROTARY_PAIR,
)

# Cosmos Predict (NVIDIA 2025, arXiv:2501.03575): text by cross-attention, positions added in every block.
COSMOS_BLOCKS = Region(
    "transformer_blocks",
    attention=(joint("image"), LOCAL),
    cuts=(
        *rotary("image_rotary_emb", 0),
        Cut("extra_pos_emb", 1),
        Cut("embedded_timestep", 1, ndim=3),
        Cut("temb", 1, ndim=3),
    ),
    whole=("encoder_hidden_states", "embedded_timestep", "temb", "attention_mask"),
)
COSMOS = TokenLayout(
    "CosmosTransformer3DModel",
    (COSMOS_BLOCKS,),
    unbatched=("padding_mask",),
    refused={"block_controlnet_hidden_states": CONTROLNET},
)

# DiT (Peebles & Xie 2022, arXiv:2212.09748): class-conditional, image tokens only.
DIT = TokenLayout(
    model="DiTTransformer2DModel",
    regions=(Region("transformer_blocks", whole=("timestep", "class_labels")),),
    # The last norm is modulated by the first block's embedding of timestep and class.
    kept=("transformer_blocks.0.norm1.emb",),
)

# FLUX.1 (Black Forest Labs 2024): two block lists, the second fed by the first unchanged.
FLUX_DOUBLE = Region(
    blocks="transformer_blocks",
    streams=image_and_text(image=1),
    attention=(joint("text", "image"),),
    cuts=(
        *rotary("image_rotary_emb", 0, ("text", "image")),
        Cut("joint_attention_kwargs.attention_mask", 3, ("text", "image")),
    ),
    whole=("temb",),
)
FLUX_SINGLE = replace(
    FLUX_DOUBLE,
    blocks="single_transformer_blocks",
    streams=image_and_text(image=1, text_used_after=False),
    chained=True,
)
FLUX = replace(CHROMA, model="FluxTransformer2DModel", regions=(FLUX_DOUBLE, FLUX_SINGLE))

# FLUX.2 (Black Forest Labs 2025): the second block list runs on one stream, text before image.
FLUX2 = TokenLayout(
    model="Flux2Transformer2DModel",
    regions=(
        replace(FLUX_DOUBLE, whole=("temb_mod_img", "temb_mod_txt")),
        Region(
            blocks="single_transformer_blocks",
            cuts=(*rotary("image_rotary_emb", 0), Cut("joint_attention_kwargs.attention_mask", 3)),
            whole=("temb_mod",),
        ),
    ),
    unbatched=("img_ids", "txt_ids"),
    refused=dict.fromkeys(("kv_cache", "kv_cache_mode"), "cached keys and values of reference pictures are not cut"),
)

# Hunyuan-DiT (Li et al. 2024, arXiv:2405.08748): text by cross-attention, long skips between blocks.
HUNYUAN_DIT_BLOCKS = Region(
    "blocks",
    attention=(joint("image"), LOCAL),
    cuts=rotary("image_rotary_emb", 0),
    whole=("temb", "encoder_hidden_states"),
    local=("skip",),
)
HUNYUAN_DIT = TokenLayout(
    "HunyuanDiT2DModel",
    (HUNYUAN_DIT_BLOCKS,),
    unbatched=ROTARY_PAIR,
    refused={"controlnet_block_samples": CONTROLNET},
)

# HunyuanVideo (Kong et al. 2024, arXiv:2412.03603): two block lists, the second fed by the first unchanged. The
# image-to-video model gives the first frame's tokens a modulation of their own and counts them (`num_tokens`); the
# blocks of the text-to-video model are passed the same two arguments and ignore them.
HUNYUAN_MASK = Cut("attention_mask", 3, ("image", "text"))
HUNYUAN_DOUBLE = Region(
    blocks="transformer_blocks",
    streams=image_and_text(image=0),
    attention=(joint("image", "text"),),
    cuts=(HUNYUAN_MASK, *rotary("freqs_cis", 0)),
    whole=("temb", "token_replace_emb", "*5"),
    counts=(Count("num_tokens", "image"), Count("*6", "image")),
)
HUNYUAN_SINGLE = replace(
    HUNYUAN_DOUBLE,
    blocks="single_transformer_blocks",
    streams=image_and_text(image=0, text_used_after=False),
    cuts=(HUNYUAN_MASK, *rotary("image_rotary_emb", 0)),
    chained=True,
)
HUNYUAN_VIDEO = TokenLayout(model="HunyuanVideoTransformer3DModel", regions=(HUNYUAN_DOUBLE, HUNYUAN_SINGLE))

# HunyuanVideo 1.5 (Tencent 2025, arXiv:2511.18870): text, glyph and image conditions as one text stream.
HUNYUAN_VIDEO_15_BLOCKS = replace(
    COGVIDEOX_BLOCKS,
    attention=(joint("image", "text"),),
    cuts=(Cut("attention_mask", 1, ("text",)), *rotary("freqs_cis", 0)),
)
HUNYUAN_VIDEO_15 = TokenLayout("HunyuanVideo15Transformer3DModel", (HUNYUAN_VIDEO_15_BLOCKS,))

# Krea 2 (Krea): one stream, text before image.
KREA2_BLOCKS = Region(
    "transformer_blocks", cuts=(*rotary("image_rotary_emb", 0), Cut("attention_mask", 3)), whole=("temb",)
)
KREA2 = TokenLayout("Krea2Transformer2DModel", (KREA2_BLOCKS,), unbatched=("position_ids",))

# Latte (Ma et al. 2024, arXiv:2401.03048): spatial and temporal blocks by turns. Spatial blocks see (batch · frames,
# tokens of a frame, C), temporal ones (batch · tokens of a frame, frames, C). A rank keeps its tokens of every frame
# through both: spatial attention mixes ranks, temporal attention does not.
LATTE = TokenLayout(
    model="LatteTransformer3DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            attention=(joint("image"), LOCAL),
            whole=("encoder_hidden_states", "encoder_attention_mask", "timestep"),
        ),
        Region(
            blocks="temporal_transformer_blocks",
            streams=(Stream("image", "hidden_states", dim=0, folded=True),),
            attention=(LOCAL,),
            cuts=(Cut("timestep", 0, folded=True),),
        ),
    ),
    alternating=True,
)

# LTX-Video (HaCohen et al. 2024, arXiv:2501.00103): text by cross-attention; a timestep per token in I2V.
LTX_BLOCKS = Region(
    "transformer_blocks",
    attention=(joint("image"), LOCAL),
    cuts=(*rotary("image_rotary_emb", 1), Cut("temb", 1)),
    whole=("encoder_hidden_states", "encoder_attention_mask"),
)
LTX = TokenLayout(
    "LTXVideoTransformer3DModel",
    (LTX_BLOCKS,),
    tables=(Table("LTXAttention", "image_rotary_emb", ndim=3, dim=2, width="queries"),),
)

# LTX-2 (Lightricks 2025): a video and an audio stream that attend to themselves, to text and to one another.
# Spatio-temporal guidance leaves the self-attention of some blocks out.
IMAGE, AUDIO = ("image",), ("audio",)
# Block argument -> the stream it has an entry per token of.
LTX2_ROTARY = {
    "video_rotary_emb": IMAGE,
    "audio_rotary_emb": AUDIO,
    "ca_video_rotary_emb": IMAGE,
    "ca_audio_rotary_emb": AUDIO,
}
LTX2_MODULATION = {
    "temb": IMAGE,
    "temb_audio": AUDIO,
    "temb_ca_scale_shift": IMAGE,
    "temb_ca_audio_scale_shift": AUDIO,
    "temb_ca_gate": IMAGE,
    "temb_ca_audio_gate": AUDIO,
}
LTX2_BLOCKS = Region(
    "transformer_blocks",
    streams=(Stream("image", "hidden_states", out=0), Stream("audio", "audio_hidden_states", out=1)),
    attention=(
        Attention(IMAGE, IMAGE, unless="all_perturbed"),
        Attention(AUDIO, AUDIO, unless="all_perturbed"),
        LOCAL,
        LOCAL,
        Attention(IMAGE, AUDIO, only_if="use_a2v_cross_attention"),
        Attention(AUDIO, IMAGE, only_if="use_v2a_cross_attention"),
    ),
    cuts=(
        *(cut for arg, tokens in LTX2_ROTARY.items() for cut in rotary(arg, 1, tokens, ndim=3)),
        *(Cut(arg, 1, tokens) for arg, tokens in LTX2_MODULATION.items()),
        *(cut for arg, tokens in LTX2_ROTARY.items() for cut in rotary(arg, 2, tokens, ndim=4)),
    ),
    whole=(
        *("encoder_hidden_states", "audio_encoder_hidden_states"),
        *("encoder_attention_mask", "audio_encoder_attention_mask"),
        *("perturbation_mask", "all_perturbed", "temb_prompt", "temb_prompt_audio"),
    ),
)
LTX2 = TokenLayout(
    "LTX2VideoTransformer3DModel",
    (LTX2_BLOCKS,),
    tables=(
        # One angle per channel before the heads are split, or one table per head.
        Table("LTX2Attention", "query_rotary_emb", ndim=3, dim=2, width="queries"),
        Table("LTX2Attention", "key_rotary_emb", ndim=3, dim=2, width="queries"),
        Table("LTX2Attention", "query_rotary_emb", ndim=4, dim=1, width="heads"),
        Table("LTX2Attention", "key_rotary_emb", ndim=4, dim=1, width="heads"),
    ),
    refused={"video_self_attention_mask": "a mask over pairs of video tokens is not cut"},
)

# Lumina-Image 2.0 (Qin et al. 2025, arXiv:2503.21758): one stream, each sample's text before its image. The text
# refiner (`context_refiner`) sees text only and runs whole on every rank.
LUMINA2 = TokenLayout(
    model="Lumina2Transformer2DModel",
    regions=(
        Region("noise_refiner", cuts=(Cut("image_rotary_emb", 1),), whole=("temb",)),
        Region("layers", cuts=(Cut("attention_mask", 1), Cut("image_rotary_emb", 1)), whole=("temb",)),
    ),
)

# MiniMax-H3 (MiniMax 2026): text, keyframes or references, sound and video in one sequence. Each token has a row in a
# table of modulation.
MINIMAX_H3 = TokenLayout(
    "MiniMaxH3Transformer3DModel",
    (
        Region(
            "transformer_blocks",
            attention=(joint("image"),),
            cuts=(Cut("adaln_indices", 0), *rotary("rotary_emb", 0)),
            whole=("temb",),
        ),
    ),
    unbatched=(
        *("timestep", "timestep_indices", "position_ids", "token_tags"),
        *("video_indices", "audio_indices", "text_indices"),
    ),
)

# Mochi 1 (Genmo 2024): joint attention with the valid text tokens only, one call for every sample.
MOCHI_BLOCKS = Region(
    "transformer_blocks",
    streams=(
        Stream("image", "hidden_states", out=0),
        Stream("text", "encoder_hidden_states", out=1, used_after=False, replicate=True),
    ),
    attention=(Attention(("image", "text"), ("image", "text"), ragged="text", per_sample=True),),
    cuts=(Cut("encoder_attention_mask", 1, ("text",)), *rotary("image_rotary_emb", 0)),
    whole=("temb",),
)
MOCHI = TokenLayout(
    "MochiTransformer3DModel",
    (MOCHI_BLOCKS,),
    tables=(Table("MochiAttention", "image_rotary_emb", ndim=3, dim=1, width="heads"),),
)

# PixArt-alpha and -sigma (Chen et al. 2023, arXiv:2310.00426): text by cross-attention.
PIXART_BLOCKS = Region(
    "transformer_blocks",
    attention=(joint("image"), LOCAL),
    # The processor pads a mask of another length than its own tokens: it must be cut with them.
    cuts=(Cut("attention_mask", 2),),
    whole=("timestep", "encoder_hidden_states", "encoder_attention_mask"),
)
PIXART = TokenLayout("PixArtTransformer2DModel", (PIXART_BLOCKS,))

# Qwen-Image and its edit models (Qwen Team 2025, arXiv:2508.02324): joint attention over text and image.
QWEN_IMAGE_BLOCKS = replace(
    COGVIDEOX_BLOCKS,
    streams=image_and_text(image=1, text_used_after=False),
    cuts=(
        Cut("encoder_hidden_states_mask", 1, ("text",)),
        Cut("image_rotary_emb.0", 0),
        Cut("image_rotary_emb.1", 0, ("text",)),
        Cut("modulate_index", 1),
    ),
)
QWEN_IMAGE = TokenLayout(
    "QwenImageTransformer2DModel",
    (QWEN_IMAGE_BLOCKS,),
    listed=("img_shapes",),
    refused={"controlnet_block_samples": CONTROLNET},
)

# Sana (Xie et al. 2024, arXiv:2410.10629): linear attention, and a feed-forward with a depthwise convolution. The only
# attention with a softmax is that of the image on the text. The convolution works on the image, so the tokens are cut
# between rows.
SANA_BLOCKS = Region(
    "transformer_blocks",
    attention=(LOCAL,),
    cuts=(Cut("attention_mask", 2),),
    whole=("encoder_hidden_states", "encoder_attention_mask", "timestep"),
    grid=Grid(rows="height", cols="width"),
    leaves=(
        Leaf("attn1", "linear_attention", processor="SanaLinearAttnProcessor2_0", args=(("hidden_states", 1),)),
        Leaf("ff.conv_depth", "conv_rows"),
    ),
)
SANA = TokenLayout("SanaTransformer2DModel", (SANA_BLOCKS,), between=("controlnet_block_samples",))

# Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv:2403.03206): joint attention over image and text. The last block
# returns no text (`context_pre_only`). The first blocks of SD3.5-medium attend once more, the image to itself.
SD3_BLOCKS = replace(
    QWEN_IMAGE_BLOCKS,
    attention=(joint("image", "text"), joint("image")),
    cuts=(Cut("joint_attention_kwargs.attention_mask", 3, ("image", "text")),),
)
SD3 = TokenLayout(
    "SD3Transformer2DModel",
    (SD3_BLOCKS,),
    refused={
        "block_controlnet_hidden_states": CONTROLNET,
        "joint_attention_kwargs.ip_adapter_image_embeds": IP_ADAPTER,
    },
)

# Stable Audio Open (Evans et al. 2024, arXiv:2407.14358): sound tokens after one global token. The stream is called
# image as in every layout: it is what the model generates.
STABLE_AUDIO_BLOCKS = Region(
    "transformer_blocks",
    attention=(joint("image"), LOCAL),
    cuts=(Cut("attention_mask", 1), *rotary("rotary_embedding", 0)),
    whole=("encoder_hidden_states", "encoder_attention_mask"),
)
STABLE_AUDIO = TokenLayout(
    "StableAudioDiTModel", (STABLE_AUDIO_BLOCKS,), unbatched=("rotary_embedding.0", "rotary_embedding.1")
)

# Wan 2.1 and 2.2 (Wan Team 2025, arXiv:2503.20314): text, and the first frame, by cross-attention. With a timestep per
# token (Wan 2.2 TI2V) the modulation is per token, too.
WAN_BLOCKS = Region(
    "blocks",
    attention=(joint("image"), LOCAL, LOCAL),
    cuts=(*rotary("rotary_emb", 1), Cut("temb", 1, ndim=4)),
    whole=("encoder_hidden_states", "temb"),
)
# Of a first and a last frame, two by two.
WAN = TokenLayout("WanTransformer3DModel", (WAN_BLOCKS,), grouped=("encoder_hidden_states_image",))

# Z-Image (Tongyi Lab 2025, arXiv:2511.22699): lists of images and captions, image before text in one stream. The text
# refiner (`context_refiner`) sees text only and runs whole on every rank.
SEVERAL_PICTURES = "sequences of several images are not in the layout"
Z_IMAGE_BLOCKS = Region(
    "layers",
    streams=(Stream("image", "x"),),
    cuts=(Cut("freqs_cis", 1), Cut("attn_mask", 1)),
    whole=("adaln_input",),
)
Z_IMAGE = TokenLayout(
    model="ZImageTransformer2DModel",
    regions=(replace(Z_IMAGE_BLOCKS, blocks="noise_refiner"), Z_IMAGE_BLOCKS),
    listed=("x", "cap_feats"),
    refused={
        "controlnet_block_samples": CONTROLNET,
        "siglip_feats": SEVERAL_PICTURES,
        "image_noise_mask": SEVERAL_PICTURES,
    },
)


@cache
def known_models() -> dict[str, TokenLayout]:
    """Name of every class of diffusers with a reviewed layout -> the layout; a model is looked up by `layout_of`."""
    return {layout.model: layout for layout in globals().values() if isinstance(layout, TokenLayout)}


@cache
def known_tables() -> tuple[Table, ...]:
    """Positional tables of all models: they go by the class of an attention, which several models may share."""
    return tuple(dict.fromkeys(table for layout in known_models().values() for table in layout.tables))


def layout_of(model: nn.Module) -> TokenLayout | None:
    """The reviewed layout of a model's class; None for a class that is not diffusers', and for blocks that are not."""
    layout = known_models().get(library_name(model))
    if layout is None or not is_published(model, [region.blocks for region in layout.regions]):
        return None
    return layout
