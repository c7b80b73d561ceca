"""Transformers that draw videos: tiny ones with random weights, called as their pipelines call them."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from torch import Tensor, nn

from support.classes import Case
from support.classes import made as _made
from support.classes import noise as _noise
from support.classes import valid as _valid

HEADS, HEAD_DIM = 4, 12
DIM = HEADS * HEAD_DIM
ROPE = (4, 4, 4)
TEXT_DIM = 20
# Tokens of a video: frames, rows and columns, all odd; and of the longest prompt.
FRAMES, ROWS, COLS, TEXT = 3, 5, 7, 9


def _turns(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine (length, width) of a rotary embedding, each value twice in a row."""
    speeds = 1 / 100 ** (torch.arange(0, width, 2) / width)
    angles = (torch.arange(length).float()[:, None] * speeds).repeat_interleave(2, 1)
    return angles.cos(), angles.sin()


# --- text that is attended to --------------------------------------------------------------------------------------


def _allegro() -> nn.Module:
    return diffusers.AllegroTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=3,
        cross_attention_dim=DIM,
        sample_height=2 * ROWS,
        sample_width=2 * COLS,
        sample_frames=FRAMES,
        caption_channels=TEXT_DIM,
    )


def _allegro_call(lengths: list[int]) -> dict[str, Any]:
    # A third of every head turns by the token's frame, row or column.
    turns = tuple(part[:, [0, 2, 1, 3]] for part in _turns(40, HEAD_DIM // 3))
    grid = torch.meshgrid(torch.arange(FRAMES), torch.arange(ROWS), torch.arange(COLS), indexing="ij")
    return {
        "hidden_states": _noise(len(lengths), 4, FRAMES, 2 * ROWS, 2 * COLS),
        "encoder_hidden_states": _noise(len(lengths), TEXT, TEXT_DIM),
        "encoder_attention_mask": _valid(lengths, TEXT).long(),
        "timestep": torch.full((len(lengths),), 601),
        "image_rotary_emb": ((turns, turns, turns), tuple(axis.reshape(1, -1) for axis in grid)),
        "return_dict": False,
    }


def _anyflow() -> nn.Module:
    return diffusers.AnyFlowTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
    )


def _anyflow_call(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(batch, FRAMES, 4, 2 * ROWS, 2 * COLS),
        "timestep": torch.full((batch, FRAMES), 601.0),
        "r_timestep": torch.full((batch, FRAMES), 400.0),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "attention_kwargs": None,
        "return_dict": False,
    }


# Frames of every chunk of a video; the last is drawn, the ones before it are remembered.
CHUNKS = [1, 2, 2]


def _anyflow_far() -> nn.Module:
    return diffusers.AnyFlowFARTransformer3DModel(
        full_chunk_limit=2,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
        chunk_partition=tuple(CHUNKS),
    )


def _anyflow_far_call(writes: bool, batch: int = 2, rows: int = 8, cols: int = 12) -> dict[str, Any]:
    """The last chunk drawn with what is known of the ones before; or, ``writes``, these ones noted."""
    tokens = rows * cols // 4
    caches = {
        block: {
            "full_cache": _noise(2, batch, 2, 2 * max(CHUNKS) * tokens, 16, seed=block),
            "compressed_cache": _noise(2, batch, 2, 2 * max(CHUNKS) * tokens // 4, 16, seed=block + 10),
        }
        for block in range(2)
    }
    frames = sum(CHUNKS[:-1]) if writes else CHUNKS[-1]
    return {
        "hidden_states": _noise(batch, frames, 4, rows, cols),
        "timestep": torch.full((batch, frames), 0.0 if writes else 601.0),
        "r_timestep": torch.full((batch, frames), 0.0 if writes else 400.0),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "attention_kwargs": None,
        "return_dict": False,
        "chunk_partition": CHUNKS[:-1] if writes else CHUNKS,
        "kv_cache": caches,
        "kv_cache_flag": {"num_cached_chunks": 1 if writes else 2, "is_cache_step": writes},
    }


def _chronoedit() -> nn.Module:
    return diffusers.ChronoEditTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=9,
        out_channels=4,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
        image_dim=10,
        added_kv_proj_dim=DIM,
        rope_max_seq_len=32,
    )


def _chronoedit_call(frames: int) -> dict[str, Any]:
    """Two frames: the image and the edited one; more: those between them, too."""
    return {
        "hidden_states": _noise(1, 9, frames, 2 * ROWS, 2 * COLS),
        "timestep": torch.tensor([601]),
        # The blocks take the last 512 tokens for the prompt.
        "encoder_hidden_states": _noise(1, 512, TEXT_DIM),
        "encoder_hidden_states_image": _noise(1, 11, 10),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _helios() -> nn.Module:
    return diffusers.HeliosTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=64,
        num_layers=3,
        rope_dim=ROPE,
        is_amplify_history=True,
    )


def _helios_call(batch: int) -> dict[str, Any]:
    first, far, mid, near, now = torch.arange(16 + 2 + 1 + 1 + FRAMES).split([1, 16, 2, 1, FRAMES])
    return {
        "hidden_states": _noise(batch, 4, FRAMES, 2 * ROWS, 2 * COLS),
        "timestep": torch.full((batch,), 601),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "indices_hidden_states": now[None],
        "indices_latents_history_short": torch.cat([first, near])[None],
        "indices_latents_history_mid": mid[None],
        "indices_latents_history_long": far[None],
        "latents_history_short": _noise(batch, 4, 2, 2 * ROWS, 2 * COLS, seed=6),
        "latents_history_mid": _noise(batch, 4, 2, 2 * ROWS, 2 * COLS, seed=7),
        "latents_history_long": _noise(batch, 4, 16, 2 * ROWS, 2 * COLS, seed=8),
        "attention_kwargs": None,
        "return_dict": False,
    }


# --- text among the tokens -----------------------------------------------------------------------------------------


def _consisid() -> nn.Module:
    return diffusers.ConsisIDTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=8,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=TEXT_DIM,
        # A face is looked at behind every other block.
        num_layers=4,
        sample_width=2 * COLS,
        sample_height=2 * ROWS,
        sample_frames=9,
        max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        cross_attn_dim_head=8,
        cross_attn_num_heads=2,
        LFE_id_dim=10,
        LFE_vit_dim=16,
        LFE_depth=2,
        LFE_dim_head=8,
        LFE_num_heads=2,
        LFE_num_id_token=3,
        LFE_num_querie=5,
        LFE_output_dim=32,
        LFE_ff_mult=2,
        LFE_num_scale=2,
    )


def _consisid_call(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(batch, FRAMES, 8, 2 * ROWS, 2 * COLS),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "timestep": torch.full((batch,), 601),
        "image_rotary_emb": _turns(FRAMES * ROWS * COLS, HEAD_DIM),
        "attention_kwargs": None,
        "return_dict": False,
        "id_vit_hidden": [_noise(1, 6, 16, seed=n) for n in range(2)],
        "id_cond": _noise(1, 10),
    }


def _easyanimate() -> nn.Module:
    return diffusers.EasyAnimateTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=16,
        in_channels=9,
        out_channels=4,
        patch_size=2,
        num_layers=3,
        mmdit_layers=2,
        time_embed_dim=16,
        add_norm_text_encoder=True,
        text_embed_dim=TEXT_DIM,
    )


def _easyanimate_call(part: str) -> dict[str, Any]:
    """``part``: what the noise is put beside, a video and a mask ("inpaint_latents") or a guide ("control_latents")."""
    return {
        "hidden_states": _noise(2, 4, FRAMES, 2 * ROWS, 2 * COLS),
        "timestep": torch.tensor([601.0, 601.0]),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        part: _noise(2, 5, FRAMES, 2 * ROWS, 2 * COLS, seed=6),
        "return_dict": False,
    }


def _framepack() -> nn.Module:
    return diffusers.HunyuanVideoFramepackTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        num_single_layers=3,
        num_refiner_layers=2,
        text_embed_dim=TEXT_DIM,
        pooled_projection_dim=14,
        rope_axes_dim=ROPE,
        has_image_proj=True,
        image_proj_dim=10,
        has_clean_x_embedder=True,
    )


def _framepack_call(lengths: list[int]) -> dict[str, Any]:
    batch = len(lengths)
    first, now, near, mid, far = torch.arange(1 + FRAMES + 1 + 2 + 16).split([1, FRAMES, 1, 2, 16])
    return {
        "hidden_states": _noise(batch, 4, FRAMES, 2 * ROWS, 2 * COLS),
        "timestep": torch.full((batch,), 601.0),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "encoder_attention_mask": _valid(lengths, TEXT).long(),
        "pooled_projections": _noise(batch, 14),
        "image_embeds": _noise(batch, 6, 10),
        "indices_latents": now,
        "guidance": torch.full((batch,), 9000.0),
        "latents_clean": _noise(batch, 4, 2, 2 * ROWS, 2 * COLS, seed=6),
        "indices_latents_clean": torch.cat([first, near]),
        "latents_history_2x": _noise(batch, 4, 2, 2 * ROWS, 2 * COLS, seed=7),
        "indices_latents_history_2x": mid,
        "latents_history_4x": _noise(batch, 4, 16, 2 * ROWS, 2 * COLS, seed=8),
        "indices_latents_history_4x": far,
        "attention_kwargs": None,
        "return_dict": False,
    }


def _motif(decoders: int) -> nn.Module:
    """``decoders``: how many of the last blocks run on the noise anew and attend to the tokens of the ones before."""
    return diffusers.MotifVideoTransformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        num_single_layers=3,
        num_decoder_layers=decoders,
        text_embed_dim=TEXT_DIM,
        image_embed_dim=10,
        rope_axes_dim=ROPE,
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )


def _motif_call(image: bool, lengths: tuple[int, ...] = (TEXT - 3,)) -> dict[str, Any]:
    batch = len(lengths)
    given = {
        "hidden_states": _noise(batch, 9, FRAMES, 2 * ROWS, 2 * COLS),
        "timestep": torch.full((batch,), 601.0),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "encoder_attention_mask": _valid(lengths, TEXT).long(),
        "attention_kwargs": None,
        "return_dict": False,
    }
    return given | ({"image_embeds": _noise(batch, 6, 10, seed=6)} if image else {})


# --- video and sound -----------------------------------------------------------------------------------------------


def _cosmos3() -> nn.Module:
    return diffusers.Cosmos3OmniTransformer(
        dtype="float32",
        head_dim=HEAD_DIM,
        hidden_size=DIM,
        intermediate_size=64,
        latent_channel=4,
        num_attention_heads=HEADS,
        num_hidden_layers=3,
        num_key_value_heads=2,
        patch_latent_dim=16,
        rope_axes_dim=(2, 2, 2),
        sound_dim=6,
        sound_gen=True,
        vocab_size=40,
    )


def _cosmos3_call(given_frames: int, sound: int) -> dict[str, Any]:
    """Text, video and sound in one sequence without a batch; the first ``given_frames`` are clean."""
    frame = ROWS * COLS
    video = FRAMES * frame
    total = TEXT + video + sound
    noisy = torch.arange(given_frames, FRAMES)
    time = torch.cat([torch.arange(TEXT), torch.arange(FRAMES).repeat_interleave(frame) + 100, torch.arange(sound)])
    row, col = torch.meshgrid(torch.arange(ROWS), torch.arange(COLS), indexing="ij")
    place = torch.stack([row.reshape(-1), col.reshape(-1)]).repeat(1, FRAMES)
    text = torch.arange(TEXT).expand(2, -1)
    given = {
        "input_ids": torch.randint(0, 40, (TEXT,), generator=torch.Generator().manual_seed(3)),
        "text_indexes": torch.arange(TEXT),
        "position_ids": torch.cat([time[None], torch.cat([text, place, torch.zeros(2, sound).long()], 1)]),
        "und_len": TEXT,
        "sequence_length": total,
        # The model pads odd latents itself.
        "vision_tokens": [_noise(1, 4, FRAMES, 2 * ROWS - 1, 2 * COLS)],
        "vision_token_shapes": [(FRAMES, ROWS, COLS)],
        "vision_sequence_indexes": torch.arange(TEXT, TEXT + video),
        "vision_mse_loss_indexes": torch.arange(TEXT + given_frames * frame, TEXT + video),
        "vision_timesteps": torch.full((len(noisy) * frame,), 601.0),
        "vision_noisy_frame_indexes": [noisy],
        "return_dict": False,
    }
    if sound:
        given |= {
            "sound_tokens": [_noise(6, sound)],
            "sound_token_shapes": [(sound, 1, 1)],
            "sound_sequence_indexes": torch.arange(TEXT + video, total),
            "sound_mse_loss_indexes": torch.arange(TEXT + video, total),
            "sound_timesteps": torch.full((sound,), 601.0),
            "sound_noisy_frame_indexes": [torch.arange(sound)],
        }
    return given


def _minimax() -> nn.Module:
    return diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=16,
        hidden_size=DIM,
        num_layers=3,
        num_refiner_layers=2,
        ffn_dim=64,
        in_channels=4,
        audio_in_channels=6,
        text_dim=TEXT_DIM,
        freq_dim=16,
        time_embed_hidden_dim=24,
        time_embed_dim=16,
        rope_freq_dim=2,
    )


def _minimax_call(keyframes: int, sound: int = 11) -> dict[str, Any]:
    """Text, clean ``keyframes``, sound and video in one sequence, each with its place in time, row and column."""
    frame, given = ROWS * COLS, keyframes * ROWS * COLS
    video = FRAMES * frame
    total = TEXT + given + sound + video
    row, col = torch.meshgrid(torch.arange(ROWS), torch.arange(COLS), indexing="ij")
    grid = torch.stack([row.reshape(-1), col.reshape(-1)], 1).double()
    places = torch.zeros(total, 3, dtype=torch.float64)
    places[:TEXT, 0] = torch.arange(TEXT)
    places[TEXT : TEXT + given] = torch.cat([torch.full((frame, 1), float(TEXT)), grid], 1).repeat(keyframes, 1)
    places[TEXT + given : -video, 0] = TEXT + 0.5 * torch.arange(sound)
    times = TEXT + torch.arange(FRAMES).repeat_interleave(frame)
    places[-video:] = torch.cat([times[:, None], grid.repeat(FRAMES, 1)], 1)
    rows = torch.arange(total)
    text, before, heard, seen = rows.split([TEXT, given, sound, video])
    tags = torch.zeros(total, dtype=torch.long).index_fill(0, text, 1).index_fill(0, heard, 2)
    return {
        "hidden_states": _noise(1, given + video, 16),
        "audio_hidden_states": _noise(1, sound, 6),
        "encoder_hidden_states": _noise(1, TEXT, TEXT_DIM),
        "timestep": torch.tensor([0.0, 0.6, 0.6]),
        "timestep_indices": torch.zeros(total, dtype=torch.long).index_fill(0, seen, 1).index_fill(0, heard, 2),
        "attention_kwargs": None,
        "return_dict": False,
        "token_tags": tags,
        "position_ids": places,
        "video_indices": torch.cat([before, seen]),
        "audio_indices": heard,
        "text_indices": text,
    }


# --- Kandinsky -----------------------------------------------------------------------------------------------------


def _kandinsky5(sparse: bool) -> nn.Module:
    model = diffusers.Kandinsky5Transformer3DModel(
        in_text_dim=TEXT_DIM,
        in_text_dim2=10,
        time_dim=16,
        model_dim=64,
        ff_dim=64,
        num_text_blocks=2,
        num_visual_blocks=3,
        axes_dims=(4, 6, 6),
        visual_cond=True,
        attention_type="nabla" if sparse else "regular",
    )
    if sparse:
        # As `set_attention_backend` does, which changes every other model of the process, too.
        for processor in model.attn_processors.values():
            processor._attention_backend = AttentionBackendName.FLEX
    return model


def _kandinsky5_call(batch: int, frames: int, rows: int, cols: int, sparse: bool = False) -> dict[str, Any]:
    blocks = frames * rows * cols // 64
    near = (torch.arange(blocks)[:, None] - torch.arange(blocks)).abs() <= 1
    return {
        "hidden_states": _noise(batch, frames, 2 * rows, 2 * cols, 9),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "pooled_projections": _noise(batch, 10),
        "timestep": torch.full((batch,), 601.0),
        "visual_rope_pos": [torch.arange(size) for size in (frames, rows, cols)],
        "text_rope_pos": torch.arange(TEXT),
        "scale_factor": (1.0, 2.0, 2.0),
        "sparse_params": {
            "sta_mask": near[None, None],
            "attention_type": "nabla",
            "to_fractal": True,
            "P": 0.5,
            "wT": 1,
            "wW": 1,
            "wH": 1,
            "add_sta": True,
            "visual_shape": (frames, rows, cols),
            "method": "topcdf",
        }
        if sparse
        else None,
        "return_dict": False,
    }


def _kandinsky6() -> nn.Module:
    return diffusers.Kandinsky6Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=TEXT_DIM,
        in_text_dim2=10,
        time_dim=16,
        model_dim=DIM,
        ff_dim=64,
        num_text_blocks=2,
        num_visual_blocks=3,
        axes_dims=ROPE,
        in_audio_dim=6,
        out_audio_dim=6,
        model_dim_a=24,
        ff_dim_a=40,
        ca_rope=True,
        cross_gates=True,
        fix_modulation=True,
        visual_token_type_num_embeddings=2,
    )


def _kandinsky6_call(sound: int, image: bool = False, length: int = TEXT) -> dict[str, Any]:
    """``image``: a clean frame stands behind the video, with the place of its first."""
    frames = FRAMES + image
    places = torch.cat([torch.arange(FRAMES), torch.zeros(1, dtype=torch.long)])
    types = torch.zeros(1, frames, dtype=torch.long)
    types[:, FRAMES:] = 1
    return {
        "hidden_states": _noise(1, frames, 2 * ROWS, 2 * COLS, 9),
        "audio_hidden_states": _noise(1, sound, 6) if sound else None,
        "encoder_hidden_states": _noise(1, TEXT, TEXT_DIM),
        "pooled_projections": _noise(1, 10),
        "timestep": torch.tensor([601.0]),
        "visual_rope_pos": (places, torch.arange(ROWS), torch.arange(COLS)) if image else None,
        "encoder_attention_mask": _valid([length], TEXT) if length < TEXT else None,
        "visual_token_type_ids": types if image else None,
        "return_dict": False,
    }


def _kandinsky6_sr() -> nn.Module:
    return diffusers.Kandinsky6SRTransformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        time_dim=16,
        model_dim=64,
        ff_dim=64,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
        nabla_threshold=0.5,
        nabla_window=(1, 1, 1),
    )


def _kandinsky6_sr_call(batch: int) -> dict[str, Any]:
    """Tiles of a video; attention takes 8 rows and columns of tokens at a time."""
    return {
        "hidden_states": _noise(batch, FRAMES, 8, 16, 9),
        "timestep": torch.full((batch,), 601.0),
        "return_dict": False,
    }


# --- Sana ----------------------------------------------------------------------------------------------------------


def _sana_video() -> nn.Module:
    return diffusers.SanaVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        num_cross_attention_heads=HEADS,
        cross_attention_head_dim=HEAD_DIM,
        cross_attention_dim=DIM,
        caption_channels=TEXT_DIM,
        rope_max_seq_len=32,
    )


def _sana_video_call(image: bool) -> dict[str, Any]:
    times = torch.full((2, 1, FRAMES, ROWS, COLS), 601.0)
    # The frame that is given has no noise.
    times[:, :, 0] = 0
    return {
        "hidden_states": _noise(2, 4, FRAMES, 2 * ROWS, 2 * COLS),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "encoder_attention_mask": _valid([4, TEXT], TEXT).long(),
        "timestep": times if image else torch.tensor([601.0, 601.0]),
        "return_dict": False,
        "attention_kwargs": None,
    }


def _sana_wm() -> nn.Module:
    return diffusers.SanaWMTransformer3DModel(
        in_channels=4,
        num_layers=2,
        hidden_size=2 * 24,
        num_attention_heads=2,
        # The second block attends with a softmax, the first with a state that follows the frames.
        softmax_every_n=2,
        linear_head_dim=24,
        chunk_plucker_channels=12,
        chunk_plucker_post_attn_blocks=2,
        caption_channels=TEXT_DIM,
    )


def _sana_wm_call(lengths: list[int]) -> dict[str, Any]:
    batch = len(lengths)
    camera = torch.eye(4).repeat(batch, FRAMES, 1, 1)
    camera[:, :, 0, 3] = 0.1 * torch.arange(FRAMES)
    lens = torch.tensor([6.0, 6.0, COLS / 2, ROWS / 2]).expand(batch, FRAMES, 4)
    times = torch.full((batch, 1, FRAMES), 601.0)
    times[:, :, 0] = 0
    return {
        "hidden_states": _noise(batch, 4, FRAMES, ROWS, COLS),
        "timestep": times,
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "return_dict": False,
        "data_info": {"img_hw": torch.tensor([[80.0, 112.0]])},
        "mask": _valid(lengths, TEXT).long(),
        "camera_conditions": torch.cat([camera.flatten(2), lens], 2),
        "chunk_plucker": _noise(batch, 12, FRAMES, ROWS, COLS, seed=6),
    }


def _refiner() -> nn.Module:
    return diffusers.SanaWMLTX2RefinerTransformer3DModel(
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


def _refiner_call(mode: str) -> dict[str, Any]:
    """``mode``: keys and values of these frames are noted ("capture..."), those of the ones before attended to."""
    tokens, cache = FRAMES * ROWS * COLS, SanaWMRefinerKVCache(2)
    if "inject" in mode:
        cache.sink_pe = tuple(part[None] for part in _turns(ROWS * COLS, 64))
        for block in range(2):
            kept = [_noise(1, ROWS * COLS, 64, seed=10 * block + n) for n in range(4)]
            cache.get(block).store_sink(kept[0], kept[1])
            cache.get(block).store_history(kept[2], kept[3])
    return {
        "hidden_states": _noise(1, tokens, 8),
        "encoder_hidden_states": _noise(1, TEXT, TEXT_DIM),
        "timestep": torch.full((1, tokens), 601.0 if mode == "inject" else 0.0),
        "video_rotary_emb": tuple(part[None] for part in _turns(tokens, 64)),
        "encoder_attention_mask": _valid([4], TEXT, left=True).long(),
        "kv_cache": cache,
        "kv_cache_mode": mode,
        "return_dict": False,
    }


CASES: dict[str, Case] = {
    "AllegroTransformer3DModel": Case(
        _made(_allegro),
        {"guidance": lambda: _allegro_call([4, TEXT]), "prompt": lambda: _allegro_call([TEXT - 2])},
    ),
    "AnyFlowFARTransformer3DModel": Case(
        _made(_anyflow_far),
        {"chunk": lambda: _anyflow_far_call(False), "chunks before": lambda: _anyflow_far_call(True)},
    ),
    "AnyFlowTransformer3DModel": Case(
        _made(_anyflow), {"guidance": lambda: _anyflow_call(2), "prompt": lambda: _anyflow_call(1)}
    ),
    "ChronoEditTransformer3DModel": Case(
        _made(_chronoedit), {"edit": lambda: _chronoedit_call(2), "frames between": lambda: _chronoedit_call(FRAMES)}
    ),
    "ConsisIDTransformer3DModel": Case(
        _made(_consisid), {"guidance": lambda: _consisid_call(2), "prompt": lambda: _consisid_call(1)}
    ),
    "Cosmos3OmniTransformer": Case(
        _made(_cosmos3),
        {
            "prompt": lambda: _cosmos3_call(0, 0),
            "image": lambda: _cosmos3_call(1, 0),
            "sound": lambda: _cosmos3_call(0, 11),
        },
    ),
    "EasyAnimateTransformer3DModel": Case(
        _made(_easyanimate),
        {
            "inpaint": lambda: _easyanimate_call("inpaint_latents"),
            "control": lambda: _easyanimate_call("control_latents"),
        },
    ),
    "HeliosTransformer3DModel": Case(
        _made(_helios), {"prompt": lambda: _helios_call(1), "two videos": lambda: _helios_call(2)}
    ),
    "HunyuanVideoFramepackTransformer3DModel": Case(
        _made(_framepack),
        {"prompt": lambda: _framepack_call([TEXT - 2]), "padded prompts": lambda: _framepack_call([TEXT, 4])},
    ),
    "Kandinsky5Transformer3DModel": Case(
        _made(lambda: _kandinsky5(False)),
        {
            "video": lambda: _kandinsky5_call(1, FRAMES, ROWS, COLS),
            "images": lambda: _kandinsky5_call(2, 1, ROWS, COLS),
        },
    ),
    # Another model: its attention is a sparse one of another backend.
    "Kandinsky5Transformer3DModel nabla": Case(
        _made(lambda: _kandinsky5(True)), {"video": lambda: _kandinsky5_call(1, FRAMES, 8, 16, sparse=True)}
    ),
    "Kandinsky6SRTransformer3DModel": Case(
        _made(_kandinsky6_sr), {"tile": lambda: _kandinsky6_sr_call(1), "tiles": lambda: _kandinsky6_sr_call(2)}
    ),
    "Kandinsky6Transformer3DModel": Case(
        _made(_kandinsky6),
        {
            "video": lambda: _kandinsky6_call(0),
            "sound": lambda: _kandinsky6_call(11, length=TEXT - 2),
            "image": lambda: _kandinsky6_call(11, image=True),
        },
    ),
    "MiniMaxH3Transformer3DModel": Case(
        _made(_minimax), {"prompt": lambda: _minimax_call(0), "keyframes": lambda: _minimax_call(2)}
    ),
    "MotifVideoTransformer3DModel": Case(
        _made(lambda: _motif(1)), {"prompt": lambda: _motif_call(False), "image": lambda: _motif_call(True)}
    ),
    # Another model: no block of it runs on the noise anew.
    "MotifVideoTransformer3DModel plain": Case(
        _made(lambda: _motif(0)),
        {
            "prompt": lambda: _motif_call(False),
            "image": lambda: _motif_call(True),
            "two prompts": lambda: _motif_call(True, (4, TEXT)),
        },
    ),
    "SanaVideoTransformer3DModel": Case(
        _made(_sana_video),
        {"guidance": lambda: _sana_video_call(False), "image": lambda: _sana_video_call(True)},
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Case(
        _made(_refiner),
        {
            "first frames": lambda: _refiner_call("capture_pre_rope"),
            "next frames": lambda: _refiner_call("inject"),
            "next frames noted": lambda: _refiner_call("inject_and_capture_post_rope"),
        },
    ),
    "SanaWMTransformer3DModel": Case(
        _made(_sana_wm), {"guidance": lambda: _sana_wm_call([4, TEXT]), "prompt": lambda: _sana_wm_call([TEXT])}
    ),
}
