"""Tiny transformers with random weights, one per class, and inputs for them. All float32, 8 heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import diffusers
import torch
from torch import nn

from ditmesh.layout.conventions import CallVariant, Conventions, Size

# B=1 with lengths that divide by nothing, B=2 with ragged masks where the model takes masks.
ODD = Size(rows=7, cols=7, text=13, batch=1)
RAGGED = Size(rows=8, cols=8, text=32, batch=2)


def _dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=8,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )


def _pixart() -> nn.Module:
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=8,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=64,
        caption_channels=32,
    )


def _sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=8,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=16,
        pos_embed_max_size=12,
        dual_attention_layers=(0,),  # as in SD3.5-medium
        qk_norm="rms_norm",
    )


def _flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=8,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )


def _flux2() -> nn.Module:
    return diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=8,
        joint_attention_dim=32,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )


def _hunyuan_dit() -> nn.Module:
    return diffusers.HunyuanDiT2DModel(
        num_attention_heads=8,
        attention_head_dim=8,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        hidden_size=64,
        num_layers=4,
        cross_attention_dim=32,
        cross_attention_dim_t5=24,
        pooled_projection_dim=16,
        text_len=6,
        text_len_t5=7,
    )


def _cogvideox() -> nn.Module:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=32,
        num_layers=2,
        sample_width=16,
        sample_height=16,
        sample_frames=5,
        use_rotary_positional_embeddings=True,
    )


def _hunyuan_video(image_condition_type: str | None = None) -> nn.Module:
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=8,
        attention_head_dim=8,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=32,
        pooled_projection_dim=16,
        rope_axes_dim=(2, 4, 2),
        image_condition_type=image_condition_type,
    )


def _hunyuan_video_15() -> nn.Module:
    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=8,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        patch_size=2,
        text_embed_dim=32,
        text_embed_2_dim=24,
        image_embed_dim=16,
        rope_axes_dim=(2, 4, 2),
    )


def _wan(image_dim: int | None = None) -> nn.Module:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
        image_dim=image_dim,
        added_kv_proj_dim=96 if image_dim else None,
        rope_max_seq_len=32,
    )


def _qwen_image(zero_cond_t: bool = False) -> nn.Module:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=8,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_cond_t,
    )


def _z_image() -> nn.Module:
    return diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=128,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=8,
        n_kv_heads=8,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
    )


def _ltx() -> nn.Module:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=8,
        attention_head_dim=8,
        cross_attention_dim=64,
        num_layers=2,
        caption_channels=32,
    )


def _ltx2(rope_type: str = "interleaved", perturbed_attn: bool = False) -> nn.Module:
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=8,
        attention_head_dim=16,
        cross_attention_dim=128,
        audio_in_channels=6,
        audio_out_channels=6,
        audio_num_attention_heads=8,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=64,
        num_layers=2,
        caption_channels=32,
        rope_type=rope_type,
        perturbed_attn=perturbed_attn,
    )


def _mochi() -> nn.Module:
    return diffusers.MochiTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=8,
        num_layers=3,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=32,
        time_embed_dim=16,
        max_sequence_length=32,
    )


def _auraflow() -> nn.Module:
    return diffusers.AuraFlowTransformer2DModel(
        sample_size=16,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=8,
        num_attention_heads=8,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pos_embed_max_size=256,
    )


def _cogview4() -> nn.Module:
    return diffusers.CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=8,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=8,
        pos_embed_max_size=16,
        sample_size=16,
        rope_axes_dim=(16, 16),
    )


def _lumina2() -> nn.Module:
    return diffusers.Lumina2Transformer2DModel(
        sample_size=16,
        in_channels=4,
        hidden_size=96,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=8,
        num_kv_heads=4,
        multiple_of=16,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(64, 32, 32),
        cap_feat_dim=32,
    )


def _chroma() -> nn.Module:
    return diffusers.ChromaTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=8,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )


def _stable_audio() -> nn.Module:
    return diffusers.StableAudioDiTModel(
        sample_size=64,
        in_channels=8,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=8,
        num_key_value_attention_heads=4,
        out_channels=8,
        cross_attention_dim=32,
        time_proj_dim=16,
        global_states_input_dim=24,
        cross_attention_input_dim=32,
    )


def _krea2() -> nn.Module:
    return diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=64,
        timestep_embed_dim=16,
        text_hidden_dim=32,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )


def _cosmos() -> nn.Module:
    return diffusers.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=8,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=32,
        adaln_lora_dim=8,
        max_size=(8, 32, 32),
        concat_padding_mask=False,  # resizing the padding mask needs torchvision
    )


def _sana() -> nn.Module:
    return diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=8,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=8,
        cross_attention_head_dim=8,
        cross_attention_dim=64,
        caption_channels=32,
        sample_size=8,
        qk_norm="rms_norm_across_heads",
    )


def _latte() -> nn.Module:
    return diffusers.LatteTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=64,
        sample_size=16,
        patch_size=2,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=32,
        video_length=2,
    )


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "DiT": _dit,
    "PixArt": _pixart,
    "SD3": _sd3,
    "Flux": _flux,
    "Flux2": _flux2,
    "HunyuanDiT": _hunyuan_dit,
    "CogVideoX": _cogvideox,
    "HunyuanVideo": _hunyuan_video,
    "HunyuanVideo I2V": lambda: _hunyuan_video("token_replace"),
    "HunyuanVideo15": _hunyuan_video_15,
    "Wan": _wan,
    "Wan I2V": lambda: _wan(16),
    "Wan TI2V": _wan,
    "QwenImage": _qwen_image,
    "QwenImage edit": lambda: _qwen_image(zero_cond_t=True),
    "ZImage": _z_image,
    "LTX": _ltx,
    "LTX I2V": _ltx,
    "LTX2": _ltx2,
    "LTX2 I2V": lambda: _ltx2("split"),
    "LTX2 STG": lambda: _ltx2(perturbed_attn=True),
    "Mochi": _mochi,
    "AuraFlow": _auraflow,
    "CogView4": _cogview4,
    "Lumina2": _lumina2,
    "Chroma": _chroma,
    "StableAudio": _stable_audio,
    "Krea2": _krea2,
    "Cosmos": _cosmos,
    "Cosmos V2W": _cosmos,
    "Sana": _sana,
    "Latte": _latte,
}

# Of each kind one: for tests that are long with all of them. Joint and cross-attention, none and ragged text, frames,
# tables of positions and of angles, modules that mix tokens.
KINDS = ("DiT", "PixArt", "SD3", "Flux", "Wan", "LTX2", "Mochi", "Sana")

# How the pipelines call the model, where that is not with (B, C, H, W) latents and without `attention_mask`.
WAYS = {
    "PixArt": CallVariant("bchw", masked="image"),
    "Flux": CallVariant("bsc"),
    "Flux2": CallVariant("bsc"),
    "CogVideoX": CallVariant("bfchw"),
    "HunyuanVideo": CallVariant("bcfhw"),
    "HunyuanVideo I2V": CallVariant("bcfhw"),
    "HunyuanVideo15": CallVariant("bcfhw"),
    "Wan": CallVariant("bcfhw"),
    "Wan I2V": CallVariant("bcfhw"),
    "Wan TI2V": CallVariant("bcfhw", per_token=True),
    "QwenImage": CallVariant("bsc"),
    "QwenImage edit": CallVariant("bsc"),
    "ZImage": CallVariant("list"),
    "LTX": CallVariant("bsc"),
    "LTX I2V": CallVariant("bsc", per_token=True),
    "LTX2": CallVariant("bsc"),
    "LTX2 I2V": CallVariant("bsc", per_token=True),
    "LTX2 STG": CallVariant("bsc"),
    "Mochi": CallVariant("bcfhw"),
    "CogView4": CallVariant("bchw", masked="text"),
    "Chroma": CallVariant("bsc", masked="joint"),
    "StableAudio": CallVariant("bcs"),
    "Krea2": CallVariant("bsc"),
    "Cosmos": CallVariant("bcfhw", masked="text"),
    "Cosmos V2W": CallVariant("bcfhw", masked="text", per_token=True),
    "Latte": CallVariant("bcfhw"),
}


@cache
def tiny(name: str) -> nn.Module:
    """The tiny model of a family, the same weights in every process."""
    torch.manual_seed(0)
    return stirred(MAKERS[name]().eval())


@cache
def variant(name: str, **changes: Any) -> nn.Module:
    """The tiny model of a family with some settings of its configuration changed."""
    base = MAKERS[name]()
    torch.manual_seed(0)
    return stirred(type(base).from_config(dict(base.config), **changes).eval())


def stirred(model: nn.Module) -> nn.Module:
    """Fresh models hold zeros and ones in places (biases, scale tables); a mistake there would not show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


# Latte's own forward fails with a mask and more than one frame; its pipeline passes none.
MASKLESS = {"Latte"}


def sizes(name: str) -> dict[str, Size]:
    """The two sizes of the parity matrix for a model: `ODD` and `RAGGED`, two frames for videos."""
    found = {"B=1": ODD, "B=2 ragged": RAGGED}
    if WAYS.get(name, CallVariant("bchw")).form in ("bcfhw", "bfchw") or name.startswith("LTX"):
        found = {key: replace(size, frames=2, audio=size.rows + 4) for key, size in found.items()}
    if name == "Wan I2V":
        # The block takes the last 512 tokens for text, whatever comes.
        found = {key: replace(size, text=512) for key, size in found.items()}
    return found


def inputs(name: str, size: Size, masks: bool = True) -> dict[str, Any]:
    """Arguments of the model's forward; with B=2 every mask (or list of captions) is ragged."""
    way = replace(WAYS.get(name, CallVariant("bchw")), optional=masks and name not in MASKLESS)
    made = Conventions(tiny(name), way).inputs(size)
    for key, value in [*made.items(), *made.get("joint_attention_kwargs", {}).items()]:
        if "mask" in key and isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            value.fill_(True)
            if size.batch > 1 and masks:
                value[0, ..., -5 if value.shape[-1] > 5 else -1 :] = False
    if size.batch > 1 and masks and "cap_feats" in made:
        made["cap_feats"][0] = torch.cat([made["cap_feats"][0]] * 2)
    if name == "QwenImage edit":
        # The picture and, in its last three rows, the picture it is to be made from.
        made["img_shapes"] = [[(1, size.rows - 3, size.cols), (1, 3, size.cols)]] * size.batch
    if name == "LTX2 STG":
        # Spatio-temporal guidance: the second block leaves its self-attention out; for one sample of two only,
        # it computes it and drops it.
        made["spatio_temporal_guidance_blocks"] = [1]
        made["perturbation_mask"] = torch.tensor([0.0, 1.0][: size.batch])
    return made


def run(model: nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    """One forward without gradients; several outputs (a list of pictures, video and audio) as one vector."""
    with torch.no_grad():
        output = model(**arguments)
    outputs = [part for item in output for part in (item if isinstance(item, (list, tuple)) else [item])]
    return outputs[0] if len(outputs) == 1 else torch.cat([part.flatten() for part in outputs])


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of the truth."""
    return float((value - truth).abs().max() / truth.abs().max())
