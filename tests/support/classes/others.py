"""Transformers for sound, video and the rest, and forms of calls beside the plain one, as their pipelines make them."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, IPAdapterTimeImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers import transformer_flux2 as flux2
from diffusers.models.transformers.t5_film_transformer import T5FilmDecoder
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from diffusers.models.transformers.transformer_rfd4_proteina import CONDITION_KEYS
from diffusers.models.transformers.transformer_temporal import TransformerTemporalModel
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch import Tensor, nn

from support.classes import Case
from support.classes import made as _made
from support.classes import noise as _noise
from support.classes import valid as _valid

HEADS, HEAD_DIM = 4, 12
DIM = HEADS * HEAD_DIM
TEXT_DIM = 20
# Tokens of an image with an odd number of rows and columns, of a video's frames, of the longest prompt and of a sound.
ROWS, COLS, FRAMES, TEXT, SOUND = 5, 7, 3, 9, 23
# The encoder of Wan's prompts always gives as many tokens.
WAN_TEXT = 512


def _whole(high: int, *shape: int, seed: int = 3) -> Tensor:
    """Random whole numbers below ``high``."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


# --- sound -----------------------------------------------------------------------------------------------------------


def _ace_step() -> nn.Module:
    return diffusers.AceStepTransformer1DModel(
        hidden_size=DIM,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        in_channels=24,
        audio_acoustic_hidden_dim=8,
        sliding_window=3,
        encoder_hidden_size=TEXT_DIM,
    )


def _ace_step_call(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(batch, 2 * SOUND - 1, 8),
        "timestep": torch.full((batch,), 0.6),
        "timestep_r": torch.full((batch,), 0.6),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "context_latents": _noise(batch, 2 * SOUND - 1, 16),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _longcat_audio() -> nn.Module:
    return diffusers.LongCatAudioDiTTransformer(
        dit_dim=DIM, dit_depth=2, dit_heads=HEADS, dit_text_dim=TEXT_DIM, latent_dim=8
    )


def _longcat_audio_call(lengths: list[int]) -> dict[str, Any]:
    batch = len(lengths)
    return {
        "hidden_states": _noise(batch, SOUND, 8),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "encoder_attention_mask": _valid(lengths, TEXT),
        "timestep": torch.full((batch,), 0.6),
        "attention_mask": torch.ones(batch, SOUND, dtype=torch.bool),
        "latent_cond": torch.zeros(batch, SOUND, 8),
        "return_dict": False,
    }


def _minimax_decoder() -> nn.Module:
    """The decoder of a frame's codes: a small causal language model over at most eight tokens, no denoiser."""
    return diffusers.MiniMaxMusic3RVQDepthDecoder(
        hidden_size=DIM, num_layers=2, num_attention_heads=HEADS, intermediate_size=64, audio_vocab_size=16
    )


def _minimax() -> nn.Module:
    return diffusers.MiniMaxMusic3Transformer1DModel(
        in_channels=8,
        condition_dim=10,
        num_layers=2,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        ff_inner_dim=64,
        rotary_dim=6,
        fourier_embedding_dim=16,
    )


def _minimax_call() -> dict[str, Any]:
    return {
        "hidden_states": _noise(1, 8, SOUND),
        "timestep": torch.tensor([0.6]),
        "encoder_hidden_states": _noise(1, SOUND, 10),
        "return_dict": False,
    }


def _stable_audio_3() -> nn.Module:
    return diffusers.StableAudio3DiTModel(
        io_channels=8,
        embed_dim=DIM,
        depth=2,
        num_heads=HEADS,
        cond_token_dim=TEXT_DIM,
        global_cond_dim=TEXT_DIM,
        local_add_cond_dim=9,
        timestep_features_dim=16,
        num_memory_tokens=5,
    )


def _stable_audio_3_call(lengths: list[int], inpaint: bool = False) -> dict[str, Any]:
    batch = len(lengths)
    given = {
        "hidden_states": _noise(batch, 8, SOUND),
        "timestep": torch.full((batch,), 0.6),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "global_hidden_states": _noise(batch, TEXT_DIM),
        "encoder_attention_mask": _valid(lengths, TEXT),
        "return_dict": False,
    }
    return given | {"local_add_cond": _noise(batch, 9, SOUND, seed=6)} if inpaint else given


def _t5_film() -> nn.Module:
    """The denoiser of spectrograms, whose blocks return a tuple of one."""
    return T5FilmDecoder(
        input_dims=10, targets_length=SOUND, d_model=DIM, num_layers=2, num_heads=HEADS, d_kv=HEAD_DIM, d_ff=64
    )


def _t5_film_call() -> dict[str, Any]:
    return {
        "encodings_and_masks": [
            (_noise(1, TEXT, DIM), _valid([4], TEXT)),
            (_noise(1, SOUND, DIM, seed=6), torch.ones(1, SOUND)),
        ],
        "decoder_input_tokens": _noise(1, SOUND, 10),
        "decoder_noise_time": torch.tensor([0.6]),
    }


# --- images ----------------------------------------------------------------------------------------------------------


def _prx() -> nn.Module:
    return diffusers.PRXTransformer2DModel(
        in_channels=4, context_in_dim=TEXT_DIM, hidden_size=DIM, mlp_ratio=2, num_heads=HEADS, depth=2, axes_dim=[6, 6]
    )


def _prx_pixels() -> nn.Module:
    return diffusers.PRXTransformer2DModel(
        in_channels=3,
        context_in_dim=TEXT_DIM,
        hidden_size=DIM,
        mlp_ratio=2,
        num_heads=HEADS,
        depth=2,
        axes_dim=[6, 6],
        bottleneck_size=8,
        resolution_embeds=True,
    )


def _prx_call(channels: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(2, channels, 2 * ROWS, 2 * COLS),
        "timestep": torch.tensor([0.6, 0.6]),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "attention_mask": _valid([4, TEXT], TEXT),
        "return_dict": False,
    }


def _prior() -> nn.Module:
    """Denoises one token, the embedding of an image, behind those of the prompt."""
    return diffusers.PriorTransformer(
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, num_layers=2, embedding_dim=16, num_embeddings=TEXT
    )


def _prior_call() -> dict[str, Any]:
    return {
        "hidden_states": _noise(2, 16),
        "timestep": torch.tensor(601),
        "proj_embedding": _noise(2, 16, seed=6),
        "encoder_hidden_states": _noise(2, TEXT, 16),
        "attention_mask": _valid([4, TEXT], TEXT),
        "return_dict": False,
    }


def _prior_shape() -> nn.Module:
    return diffusers.PriorTransformer(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=SOUND,
        additional_embeddings=0,
        time_embed_act_fn="gelu",
        norm_in_type="layer",
        embedding_proj_norm_type="layer",
        encoder_hid_proj_type=None,
        added_emb_type=None,
        time_embed_dim=64,
        embedding_proj_dim=10,
        clip_embed_dim=32,
    )


def _prior_shape_call() -> dict[str, Any]:
    return {
        "hidden_states": _noise(2, SOUND, 16),
        "timestep": torch.tensor(601),
        "proj_embedding": _noise(2, TEXT, 10),
        "return_dict": False,
    }


def _qwen21() -> nn.Module:
    return diffusers.QwenImage21Transformer2DModel(
        in_channels=8,
        out_channels=8,
        num_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        context_in_dim=TEXT_DIM,
        mlp_ratio=2,
        axes_dims_rope=(4, 4, 4),
    )


def _qwen21_call(
    lengths: list[int], edited: bool = False, mode: str | None = None, size: tuple[int, int] = (6, 10)
) -> dict[str, Any]:
    """``edited``: tokens 3 and 4 of the prompt stand for a 2x4 image; ``mode`` of the key and value caches."""
    batch, shapes = len(lengths), [(1, *size)]
    target = size[0] * size[1]
    slots = torch.zeros(batch, TEXT + target // 4, dtype=torch.bool)
    slots[:, TEXT:] = True
    if edited:
        shapes.insert(0, (1, 2, 4))
        slots[:, 3:5] = True
    tokens = target + 8 * edited
    caches = QwenImage21KVCache(2) if mode else None
    if caches is not None and mode == "cached":
        prefix = TEXT + 6 * edited
        for number, cache in enumerate(caches.layer_caches):
            made = (_noise(batch, prefix, HEADS, HEAD_DIM, seed=seed) for seed in (number, 9 + number))
            cache.store(*made)
    return {
        "hidden_states": _noise(batch, tokens, 8),
        "timestep": torch.full((batch,), 0.6),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "encoder_hidden_states_mask": _valid(lengths, TEXT),
        "img_shapes": [shapes] * batch,
        "img_mask": slots,
        "attention_kwargs": None,
        "kv_cache": caches,
        "kv_cache_mode": mode,
        "return_dict": False,
    }


def _unet_part() -> nn.Module:
    """As in the U-Nets of Stable Diffusion, for which it is a part and no denoiser of its own."""
    return diffusers.Transformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=16,
        num_layers=2,
        norm_num_groups=4,
        cross_attention_dim=TEXT_DIM,
    )


def _unet_part_call(masked: bool) -> dict[str, Any]:
    return {
        "hidden_states": _noise(2, 16, ROWS, COLS),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "cross_attention_kwargs": None,
        "attention_mask": None,
        "encoder_attention_mask": torch.where(_valid([TEXT, 4], TEXT), 0.0, -10000.0)[:, None] if masked else None,
        "return_dict": False,
    }


def _patches() -> nn.Module:
    """As in pipelines of PixArt that were saved before it had a class of its own."""
    return diffusers.Transformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=DIM,
        attention_bias=True,
        sample_size=16,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        caption_channels=TEXT_DIM,
    )


def _patches_call() -> dict[str, Any]:
    return {
        "hidden_states": _noise(2, 4, 2 * ROWS, 2 * COLS),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "timestep": torch.tensor([601, 601]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "encoder_attention_mask": _valid([4, TEXT], TEXT).long(),
        "return_dict": False,
    }


def _vectors() -> nn.Module:
    return diffusers.Transformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        cross_attention_dim=TEXT_DIM,
        attention_bias=True,
        sample_size=ROWS,
        num_vector_embeds=12,
        activation_fn="geglu-approximate",
        num_embeds_ada_norm=100,
        norm_type="ada_norm",
    )


def _vectors_call() -> dict[str, Any]:
    return {
        "hidden_states": _whole(12, 2, ROWS * ROWS),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "timestep": torch.tensor(60),
        "return_dict": False,
    }


# --- molecules -------------------------------------------------------------------------------------------------------


def _proteina() -> nn.Module:
    """Denoises proteins; beside its tokens there is a square of pairs, which the tokens change between blocks."""
    return diffusers.RFD4ProteinaTransformer(
        nlayers=3,
        token_dim=DIM,
        nheads=HEADS,
        dim_cond=24,
        pair_repr_dim=16,
        latent_dim=8,
        token_type_emb_dim=6,
        cath_emb_dim=4,
        t_emb_dim=16,
        seq_sep_dim=8,
        xt_pair_dist_dim=6,
        tri_mult_c=12,
    )


def _proteina_call(lengths: list[int], passes: int = 0) -> dict[str, Any]:
    batch, longest = len(lengths), max(lengths)
    valid = _valid(lengths, longest)
    atoms = ("hbond", "pistack", "pication", "saltbridge", "hydrophobic", "metal_coord", "hotspot")
    conditioning = {CONDITION_KEYS[name]: _whole(4, batch, longest, 37, seed=n) for n, name in enumerate(atoms)}
    conditioning |= {
        CONDITION_KEYS["index_group"]: _whole(3, batch, longest),
        "is_in_context_conditioning": _whole(2, batch, longest, seed=1).bool(),
        "supports_local_latent": torch.ones(batch, longest, dtype=torch.bool),
        "token_bond_path_length": _whole(8, batch, longest, longest),
        "molecule_iid": _whole(2, batch, longest),
        "molecule_entity_id": _whole(2, batch, longest, seed=4),
    }
    return {
        "bb_ca": _noise(batch, longest, 3),
        "local_latents": _noise(batch, longest, 8, seed=6),
        "bb_ca_time": torch.full((batch,), 0.6),
        "local_latents_time": torch.full((batch,), 0.4),
        "padding_mask": valid,
        "token_type": _whole(7, batch, longest),
        "atom37_mask": _whole(2, batch, longest, 37, seed=8).bool(),
        "conditioning": conditioning,
        "recycle_depth": passes,
        "attention_kwargs": None,
        "return_dict": False,
    }


# --- video -----------------------------------------------------------------------------------------------------------


def _sky_reels(forcing: bool = False, image: bool = False, causal: int = 1) -> nn.Module:
    return diffusers.SkyReelsV2Transformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
        image_dim=10 if image else None,
        added_kv_proj_dim=DIM if image else None,
        rope_max_seq_len=32,
        inject_sample_info=forcing,
        num_frame_per_block=causal,
    )


def _video_call(frames: int = FRAMES, text: int = TEXT) -> dict[str, Any]:
    return {
        "hidden_states": _noise(1, 4, frames, 2 * ROWS, 2 * COLS),
        "timestep": torch.tensor([601]),
        "encoder_hidden_states": _noise(1, text, TEXT_DIM),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _sky_reels_image() -> dict[str, Any]:
    return _video_call(text=WAN_TEXT) | {"encoder_hidden_states_image": _noise(1, 6, 10)}


def _sky_reels_forced(frames: int) -> dict[str, Any]:
    steps = 1000 - 100 * torch.arange(frames)[None]
    return _video_call(frames) | {"timestep": steps, "enable_diffusion_forcing": True, "fps": [1]}


def _temporal() -> nn.Module:
    """A part of video U-Nets: a place of the picture is a sample and its frames are the tokens."""
    return TransformerTemporalModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=16,
        num_layers=2,
        norm_num_groups=4,
        cross_attention_dim=TEXT_DIM,
    )


def _temporal_call() -> dict[str, Any]:
    frames = 5
    return {
        "hidden_states": _noise(2 * frames, 16, 3, 4),
        "num_frames": frames,
        "cross_attention_kwargs": None,
        "return_dict": False,
    }


def _animate() -> nn.Module:
    return diffusers.WanAnimateTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=12,
        latent_channels=4,
        out_channels=4,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=64,
        num_layers=4,
        image_dim=10,
        added_kv_proj_dim=DIM,
        rope_max_seq_len=32,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=16,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


def _animate_call(frames: int) -> dict[str, Any]:
    """A reference and ``frames`` frames; four pictures of the face for each but the first."""
    return {
        "hidden_states": _noise(1, 12, 1 + frames, 2 * ROWS, 2 * COLS),
        "timestep": torch.tensor([601]),
        "encoder_hidden_states": _noise(1, WAN_TEXT, TEXT_DIM),
        "encoder_hidden_states_image": _noise(1, 6, 10),
        "pose_hidden_states": _noise(1, 4, frames, 2 * ROWS, 2 * COLS),
        "face_pixel_values": _noise(1, 3, 4 * frames - 3, 16, 16),
        "motion_encode_batch_size": None,
        "attention_kwargs": None,
        "return_dict": False,
    }


def _animate_2() -> nn.Module:
    model = diffusers.WanAnimate2Transformer3DModel(
        text_len=12,
        in_dim=12,
        dim=DIM,
        ffn_dim=64,
        freq_dim=16,
        text_dim=TEXT_DIM,
        out_dim=4,
        num_heads=HEADS,
        num_layers=2,
    )
    with torch.compiler.set_stance("force_eager"):
        # To compile it, as the forward would, takes a minute.
        model.block_masks[FRAMES, ROWS * COLS] = model.create_mask(FRAMES, ROWS * COLS, "cpu")
    return model


def _animate_2_call(mode: str) -> dict[str, Any]:
    """The video that drives ("extract"), or the video that is made, a frame longer, with its caches ("cached")."""
    caches, frames = WanAnimate2KVCache(2), FRAMES + (mode == "cached")
    grid = torch.tensor([[FRAMES, ROWS, COLS]])
    given = {
        "hidden_states": [_noise(4, frames, 2 * ROWS, 2 * COLS)],
        "timestep": torch.tensor([601.0]),
        "encoder_hidden_states": [_noise(TEXT, TEXT_DIM)],
        "encoder_hidden_states_image": _noise(1, 6, 1280),
        "condition_latents": [_noise(8, frames, 2 * ROWS, 2 * COLS, seed=6)],
        "kv_cache": caches,
        "kv_cache_mode": mode,
        "seq_len": frames * ROWS * COLS,
        "return_dict": False,
    }
    if mode == "extract":
        return given | {"offset_grid_sizes": grid}
    for number, cache in enumerate(caches.layer_caches):
        made = (_noise(1, FRAMES * ROWS * COLS, HEADS, HEAD_DIM, seed=seed) for seed in (number, 9 + number))
        cache.store(*made)
    return given | {
        "reference_grid_sizes": grid,
        "origin_len": 4 * FRAMES - 3,
        "origin_area": [16 * ROWS, 16 * COLS],
        "is_uncondtion": False,
    }


def _vace() -> nn.Module:
    return diffusers.WanVACETransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=64,
        num_layers=3,
        rope_max_seq_len=32,
        vace_layers=[0, 2],
        vace_in_channels=10,
    )


def _vace_call(reference: bool) -> dict[str, Any]:
    """``reference``: a frame before those that are made, as the pipeline puts reference images."""
    frames = FRAMES + reference
    return _video_call(frames) | {
        "control_hidden_states": _noise(1, 10, frames, 2 * ROWS, 2 * COLS, seed=6),
        "control_hidden_states_scale": torch.tensor([1.0, 0.5]),
    }


# --- further forms of calls ------------------------------------------------------------------------------------------


def _ids(rows: int, cols: int, first: int = 0, columns: int = 3) -> Tensor:
    """(rows · cols, columns): a number that all tokens of an image share, row, column, zeros."""
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    ids = torch.stack([torch.full_like(row, first), row, col], -1).reshape(-1, 3).float()
    return nn.functional.pad(ids, (0, columns - 3))


def _flux_adapted() -> nn.Module:
    model = diffusers.FluxTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=10,
        axes_dims_rope=(4, 4, 4),
    )
    for block in model.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(DIM, TEXT_DIM, num_tokens=(4, 2), scale=[0.7, 0.4]))
    model.encoder_hid_proj = MultiIPAdapterImageProjection(
        [ImageProjection(10, TEXT_DIM, num_image_text_embeds=tokens) for tokens in (4, 2)]
    )
    return model


def _flux_adapted_call(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(batch, ROWS * COLS, 8),
        "timestep": torch.full((batch,), 0.6),
        "guidance": None,
        "pooled_projections": _noise(batch, 10),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "txt_ids": torch.zeros(TEXT, 3),
        "img_ids": _ids(ROWS, COLS),
        "joint_attention_kwargs": {"ip_adapter_image_embeds": [_noise(batch, 1, 10), _noise(batch, 1, 10, seed=6)]},
        "return_dict": False,
    }


def _sd3_adapted() -> nn.Module:
    model = diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=DIM,
        pooled_projection_dim=10,
        pos_embed_max_size=12,
        qk_norm="rms_norm",
    )
    for block in model.transformer_blocks:
        block.attn.set_processor(SD3IPAdapterJointAttnProcessor2_0(DIM, DIM, HEAD_DIM, timesteps_emb_dim=16))
    model.image_proj = IPAdapterTimeImageProjection(
        embed_dim=10, output_dim=DIM, hidden_dim=16, depth=1, dim_head=8, heads=2, num_queries=6, ffn_ratio=2
    )
    return model


def _sd3_adapted_call() -> dict[str, Any]:
    return {
        "hidden_states": _noise(2, 4, 2 * ROWS, 2 * COLS),
        "timestep": torch.tensor([601.0, 601.0]),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "pooled_projections": _noise(2, 10),
        "joint_attention_kwargs": {"ip_adapter_image_embeds": _noise(2, 11, 10)},
        "return_dict": False,
    }


def _klein(caches: bool = False) -> nn.Module:
    model = diffusers.Flux2Transformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    if caches:
        for block in model.transformer_blocks:
            block.attn.set_processor(flux2.Flux2KVAttnProcessor())
        for block in model.single_transformer_blocks:
            block.attn.set_processor(flux2.Flux2KVParallelSelfAttnProcessor())
    return model


def _klein_call(mode: str | None) -> dict[str, Any]:
    """A 3x4 reference behind the image; with caches, before it ("extract"), or in the caches alone ("cached")."""
    image, reference = _ids(ROWS, COLS, columns=4), _ids(3, 4, 10, columns=4)
    parts = {None: [image, reference], "extract": [reference, image], "cached": [image]}[mode]
    text = nn.functional.pad(torch.arange(TEXT).float()[:, None], (3, 0))
    given = {
        "hidden_states": _noise(1, sum(len(part) for part in parts), 8),
        "timestep": torch.tensor([0.6]),
        "guidance": None,
        "encoder_hidden_states": _noise(1, TEXT, TEXT_DIM),
        "txt_ids": text[None],
        "img_ids": torch.cat(parts)[None],
        "joint_attention_kwargs": None,
        "return_dict": False,
    }
    if mode == "extract":
        given |= {"kv_cache_mode": mode, "num_ref_tokens": len(reference)}
    if mode == "cached":
        caches = flux2.Flux2KVCache(2, 2)
        caches.num_ref_tokens = len(reference)
        for number in range(2):
            for seed, cache in ((number, caches.get_double(number)), (4 + number, caches.get_single(number))):
                cache.store(*(_noise(1, len(reference), HEADS, 16, seed=at) for at in (seed, 9 + seed)))
        given |= {"kv_cache_mode": mode, "kv_cache": caches}
    return given


def _cosmos(context: bool = False) -> nn.Module:
    return diffusers.CosmosTransformer3DModel(
        in_channels=5,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=3,
        mlp_ratio=2,
        text_embed_dim=TEXT_DIM,
        adaln_lora_dim=8,
        max_size=(8, 32, 32),
        concat_padding_mask=False,  # resizing the padding mask needs torchvision
        extra_pos_embed_type=None,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=10,
        encoder_hidden_states_channels=TEXT_DIM,
        controlnet_block_every_n=2,
        img_context_dim_in=10 if context else None,
        img_context_num_tokens=6,
        img_context_dim_out=DIM,
    )


def _cosmos_call(context: bool = False) -> dict[str, Any]:
    tokens = FRAMES * ROWS * COLS
    first = (torch.arange(FRAMES) == 0).float()[None, None, :, None, None]
    text = _noise(1, TEXT, 10)
    return {
        "hidden_states": _noise(1, 4, FRAMES, 2 * ROWS, 2 * COLS),
        "timestep": 0.1 * first + 0.6 * (1 - first),
        "encoder_hidden_states": (text, _noise(1, 6, 10, seed=6)) if context else text,
        "block_controlnet_hidden_states": [_noise(1, tokens, DIM, seed=seed) for seed in (1, 2)],
        "condition_mask": first.expand(1, 1, FRAMES, 2 * ROWS, 2 * COLS),
        "return_dict": False,
    }


def _z_image() -> nn.Module:
    return diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=DIM,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=TEXT_DIM,
        axes_dims=[4, 4, 4],
        axes_lens=[256, 64, 64],
    )


def _z_image_call(lengths: list[int]) -> dict[str, Any]:
    """The image's 35 tokens and those of a caption are padded to multiples of 32 each."""
    batch = len(lengths)
    total = 64 + 32 * -(-max(lengths) // 32)
    return {
        "x": [_noise(4, 1, 2 * ROWS, 2 * COLS, seed=seed) for seed in range(batch)],
        "t": torch.full((batch,), 0.4),
        "cap_feats": [_noise(length, TEXT_DIM) for length in lengths],
        "controlnet_block_samples": {layer: _noise(batch, total, DIM, seed=layer) for layer in (0, 2)},
        "joint_attention_kwargs": None,
        "return_dict": False,
    }


def _ltx2() -> nn.Module:
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=HEADS,
        attention_head_dim=16,
        cross_attention_dim=64,
        audio_in_channels=6,
        audio_out_channels=6,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=32,
        num_layers=2,
        caption_channels=TEXT_DIM,
    )


def _ltx2_call() -> dict[str, Any]:
    """A reference of 12 tokens behind the video's, which a mask lets it be seen by half."""
    made, tokens, sound = FRAMES * ROWS * COLS, FRAMES * ROWS * COLS + 12, 11
    mask = torch.ones(1, tokens, tokens)
    mask[:, :made, made:] = mask[:, made:, :made] = 0.5
    starts = torch.stack(torch.meshgrid(torch.arange(FRAMES + 1), *map(torch.arange, (ROWS, COLS)), indexing="ij"))
    coords = starts.reshape(3, -1)[:, :tokens].float()
    audio = torch.arange(sound).float()[None]
    steps = torch.where(torch.arange(tokens) < made, 600.0, 0.0).expand(2, -1)
    return {
        "hidden_states": _noise(2, tokens, 8),
        "audio_hidden_states": _noise(2, sound, 6),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "audio_encoder_hidden_states": _noise(2, TEXT, TEXT_DIM, seed=6),
        "timestep": steps,
        "audio_timestep": torch.tensor([600.0, 600.0]),
        "sigma": torch.tensor([600.0, 600.0]),
        "audio_sigma": torch.tensor([600.0, 600.0]),
        "encoder_attention_mask": _valid([4, TEXT], TEXT).long(),
        "audio_encoder_attention_mask": _valid([4, TEXT], TEXT).long(),
        "video_self_attention_mask": mask.expand(2, -1, -1),
        "num_frames": FRAMES,
        "height": ROWS,
        "width": COLS,
        "fps": 24.0,
        "audio_num_frames": sound,
        "video_coords": torch.stack([coords, coords + 1], -1).expand(2, -1, -1, -1),
        "audio_coords": torch.stack([audio, audio + 1], -1).expand(2, -1, -1, -1),
        "isolate_modalities": False,
        "spatio_temporal_guidance_blocks": None,
        "perturbation_mask": None,
        "use_cross_timestep": False,
        "attention_kwargs": None,
        "return_dict": False,
    }


CASES: dict[str, Case] = {
    "AceStepTransformer1DModel": Case(
        _made(_ace_step), {"guidance": lambda: _ace_step_call(2), "plain": lambda: _ace_step_call(1)}
    ),
    "CosmosTransformer3DModel + ControlNet": Case(_made(_cosmos), {"video": _cosmos_call}),
    "CosmosTransformer3DModel + ControlNet and image": Case(
        _made(lambda: _cosmos(context=True)), {"video": lambda: _cosmos_call(context=True)}
    ),
    "Flux2Transformer2DModel + reference": Case(_made(_klein), {"prompt": lambda: _klein_call(None)}),
    "Flux2Transformer2DModel + caches": Case(
        _made(lambda: _klein(caches=True)),
        {"caches filled": lambda: _klein_call("extract"), "caches read": lambda: _klein_call("cached")},
    ),
    "FluxTransformer2DModel + IP-Adapter": Case(
        _made(_flux_adapted), {"prompt": lambda: _flux_adapted_call(1), "prompts": lambda: _flux_adapted_call(2)}
    ),
    "LTX2VideoTransformer3DModel + mask": Case(_made(_ltx2), {"guidance": _ltx2_call}),
    "LongCatAudioDiTTransformer": Case(
        _made(_longcat_audio),
        {"prompt": lambda: _longcat_audio_call([TEXT]), "padded prompts": lambda: _longcat_audio_call([TEXT, 4])},
    ),
    "MiniMaxMusic3RVQDepthDecoder": Case(
        _made(_minimax_decoder),
        {
            "first code": lambda: {"inputs_embeds": _noise(2, 2, DIM)},
            "last code": lambda: {"inputs_embeds": _noise(2, 8, DIM)},
        },
    ),
    "MiniMaxMusic3Transformer1DModel": Case(_made(_minimax), {"song": _minimax_call}),
    "PRXTransformer2DModel": Case(_made(_prx), {"guidance": lambda: _prx_call(4)}),
    "PRXTransformer2DModel + pixels": Case(_made(_prx_pixels), {"guidance": lambda: _prx_call(3)}),
    "PriorTransformer": Case(_made(_prior), {"guidance": _prior_call}),
    "PriorTransformer + shapes": Case(_made(_prior_shape), {"guidance": _prior_shape_call}),
    "QwenImage21Transformer2DModel": Case(
        _made(_qwen21),
        {
            "prompt": lambda: _qwen21_call([TEXT]),
            "padded prompts": lambda: _qwen21_call([TEXT, 6]),
            "edit": lambda: _qwen21_call([TEXT], edited=True),
            "caches filled": lambda: _qwen21_call([TEXT], edited=True, mode="extract"),
            "caches read": lambda: _qwen21_call([TEXT, 6], edited=True, mode="cached"),
        },
    ),
    "RFD4ProteinaTransformer": Case(
        _made(_proteina),
        {"design": lambda: _proteina_call([13]), "padded designs": lambda: _proteina_call([13, 9], passes=2)},
    ),
    "SD3Transformer2DModel + IP-Adapter": Case(_made(_sd3_adapted), {"guidance": _sd3_adapted_call}),
    "SkyReelsV2Transformer3DModel": Case(_made(_sky_reels), {"video": _video_call}),
    "SkyReelsV2Transformer3DModel + image": Case(_made(lambda: _sky_reels(image=True)), {"video": _sky_reels_image}),
    "SkyReelsV2Transformer3DModel + diffusion forcing": Case(
        _made(lambda: _sky_reels(forcing=True)), {"video": lambda: _sky_reels_forced(FRAMES)}
    ),
    "SkyReelsV2Transformer3DModel + causal blocks": Case(
        _made(lambda: _sky_reels(forcing=True, causal=2)), {"video": lambda: _sky_reels_forced(4)}
    ),
    "StableAudio3DiTModel": Case(
        _made(_stable_audio_3),
        {
            "guidance": lambda: _stable_audio_3_call([TEXT, 4]),
            "inpaint": lambda: _stable_audio_3_call([4], inpaint=True),
        },
    ),
    "T5FilmDecoder": Case(_made(_t5_film), {"spectrogram": _t5_film_call}),
    "Transformer2DModel": Case(
        _made(_unet_part),
        {"guidance": lambda: _unet_part_call(masked=False), "padded prompts": lambda: _unet_part_call(masked=True)},
    ),
    "Transformer2DModel + patches": Case(_made(_patches), {"guidance": _patches_call}),
    "Transformer2DModel + vectors": Case(_made(_vectors), {"guidance": _vectors_call}),
    "TransformerTemporalModel": Case(_made(_temporal), {"video": _temporal_call}),
    "WanAnimate2Transformer3DModel": Case(
        _made(_animate_2),
        {"driving video": lambda: _animate_2_call("extract"), "caches read": lambda: _animate_2_call("cached")},
    ),
    "WanAnimateTransformer3DModel": Case(_made(_animate), {"segment": lambda: _animate_call(3)}),
    "WanVACETransformer3DModel": Case(
        _made(_vace), {"control": lambda: _vace_call(reference=False), "reference": lambda: _vace_call(reference=True)}
    ),
    "ZImageTransformer2DModel + ControlNet": Case(
        _made(_z_image), {"prompt": lambda: _z_image_call([TEXT]), "prompts": lambda: _z_image_call([TEXT, 40])}
    ),
}
