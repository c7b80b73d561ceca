"""Transformers that draw images: tiny ones with random weights, called as their pipelines call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers import transformer_ideogram4 as ideogram4
from diffusers.models.transformers.transformer_2d_dreamlite import DreamLiteTransformer2DModel
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.models.unets.unet_dreamlite import DreamLiteAttnProcessor2_0
from torch import Tensor, nn

from support.classes import Case
from support.classes import made as _made
from support.classes import noise as _noise
from support.classes import valid as _valid

HEADS, HEAD_DIM = 4, 12
DIM = HEADS * HEAD_DIM
ROPE = (4, 4, 4)
TEXT_DIM = 20
# Tokens of an image with an odd number of rows and columns, and of the longest prompt.
ROWS, COLS, TEXT = 5, 7, 9


def _ids(rows: int, cols: int, first: float = 0.0) -> Tensor:
    """(rows · cols, 3): a number that all tokens of an image share, row, column."""
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    return torch.stack([torch.full_like(row, first), row, col], -1).reshape(-1, 3).float()


# --- Bria ----------------------------------------------------------------------------------------------------------


def _bria() -> nn.Module:
    return diffusers.BriaTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=list(ROPE),
    )


def _bria_call() -> dict[str, Any]:
    return {
        "hidden_states": _noise(2, ROWS * COLS, 8),
        "timestep": torch.tensor([601.0, 601.0]),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "attention_kwargs": None,
        "return_dict": False,
        "txt_ids": torch.zeros(TEXT, 3),
        "img_ids": _ids(ROWS, COLS),
    }


def _bria_controlnet() -> dict[str, Any]:
    # The single blocks' residuals are left out: the forward takes the text off their tokens a second time and fails.
    return _bria_call() | {"controlnet_block_samples": [_noise(2, ROWS * COLS, DIM, seed=n) for n in (1, 2)]}


def _fibo() -> nn.Module:
    return diffusers.BriaFiboTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=list(ROPE),
        text_encoder_dim=10,
    )


def _fibo_call(lengths: list[int], edited: bool = False) -> dict[str, Any]:
    batch, images = len(lengths), 1 + edited
    valid = torch.cat([_valid(lengths, TEXT), torch.ones(batch, images * ROWS * COLS, dtype=torch.bool)], 1)
    return {
        "hidden_states": _noise(batch, images * ROWS * COLS, 8),
        "timestep": torch.full((batch,), 601.0),
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "text_encoder_layers": [_noise(batch, TEXT, 10, seed=n) for n in range(5)],
        "joint_attention_kwargs": {} if valid.all() else {"attention_mask": valid[:, None, None]},
        "return_dict": False,
        "txt_ids": torch.zeros(TEXT, 3),
        "img_ids": torch.cat([_ids(ROWS, COLS, n) for n in range(images)]),
    }


def _fibo2() -> nn.Module:
    return diffusers.BriaFibo2Transformer2DModel(
        in_channels=4,
        patch_size=2,
        dim=DIM,
        n_layers=3,
        n_refiner_layers=2,
        n_heads=HEADS,
        cap_feat_dim=TEXT_DIM,
        injection_layer_ids=(1,),
        perceiver_num_layers=2,
        min_num_gist_tokens=4,
        max_num_gist_tokens=8,
        gist_step=2,
        gist_min_text_len=2,
        gist_max_text_len=12,
        axes_dims=ROPE,
        axes_lens=(32, 32, 32),
    )


def _fibo2_call(lengths: list[int], context: tuple[tuple[int, int], ...] = ()) -> dict[str, Any]:
    batch, longest = len(lengths), max(lengths)
    valid = _valid(lengths, longest)
    return {
        "hidden_states": _noise(batch, 4, 2 * ROWS, 2 * COLS),
        "timestep": torch.full((batch,), 0.6),
        "encoder_hidden_states": _noise(batch, 2, longest, TEXT_DIM),
        "encoder_attention_mask": None if valid.all() else valid,
        "context_latents": [_noise(batch, 4, 2 * rows, 2 * cols, seed=rows) for rows, cols in context] or None,
        "return_dict": False,
    }


# --- latents as a grid -----------------------------------------------------------------------------------------------


def _cogview3() -> nn.Module:
    return diffusers.CogView3PlusTransformer2DModel(
        in_channels=4,
        num_layers=3,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        out_channels=4,
        text_embed_dim=TEXT_DIM,
        time_embed_dim=16,
        condition_dim=8,
        pos_embed_max_size=16,
        sample_size=16,
    )


def _cogview3_call() -> dict[str, Any]:
    return {
        "hidden_states": _noise(2, 4, 2 * ROWS, 2 * COLS),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "timestep": torch.tensor([601, 601]),
        "original_size": torch.tensor([[80.0, 112.0]] * 2),
        "target_size": torch.tensor([[80.0, 112.0]] * 2),
        "crop_coords": torch.zeros(2, 2),
        "return_dict": False,
    }


def _dreamlite() -> nn.Module:
    model = DreamLiteTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=16,
        num_layers=2,
        norm_num_groups=4,
        cross_attention_dim=TEXT_DIM,
        use_linear_projection=True,
        qk_norm="rms_norm",
        num_kv_heads=2,
        ff_mult=3,
    )
    for module in model.modules():
        if isinstance(module, Attention):
            # As the U-Net sets it, for the keys have fewer heads than the queries.
            module.set_processor(DreamLiteAttnProcessor2_0())
    return model


def _dreamlite_call(masked: bool) -> dict[str, Any]:
    bias = torch.where(_valid([TEXT, 4], TEXT), 0.0, -10000.0)[:, None]
    return {
        "hidden_states": _noise(2, 16, ROWS, COLS),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "cross_attention_kwargs": None,
        "attention_mask": None,
        "encoder_attention_mask": bias if masked else None,
        "return_dict": False,
    }


def _ernie() -> nn.Module:
    return diffusers.ErnieImageTransformer2DModel(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_layers=2,
        ffn_hidden_size=64,
        in_channels=8,
        out_channels=8,
        text_in_dim=TEXT_DIM,
        rope_axes_dim=ROPE,
    )


def _ernie_call(lengths: list[int]) -> dict[str, Any]:
    return {
        "hidden_states": _noise(len(lengths), 8, ROWS, COLS),
        "timestep": torch.full((len(lengths),), 601.0),
        "text_bth": _noise(len(lengths), max(lengths), TEXT_DIM),
        "text_lens": torch.tensor(lengths),
        "return_dict": False,
    }


def _glm() -> nn.Module:
    return diffusers.GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        text_embed_dim=TEXT_DIM,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=32,
    )


def _glm_call(mode: str | None, text: int = TEXT) -> dict[str, Any]:
    """``mode`` of the key and value caches: the image to edit fills them ("write"), the denoising steps "read" them."""
    caches = GlmImageKVCache(num_layers=2)
    if mode == "read":
        for number in range(2):
            caches[number].store(_noise(1, 12, HEADS, HEAD_DIM, seed=number), _noise(1, 12, HEADS, HEAD_DIM, seed=9))
    if mode is not None:
        caches.set_mode(mode)
    prior = torch.randint(32, (1, ROWS * COLS), generator=torch.Generator().manual_seed(3))
    return {
        "hidden_states": _noise(1, 4, 2 * ROWS, 2 * COLS),
        "encoder_hidden_states": _noise(1, text, TEXT_DIM),
        "prior_token_id": prior,
        "prior_token_drop": torch.zeros_like(prior, dtype=torch.bool),
        "timestep": torch.tensor([600.0]),
        "target_size": torch.tensor([[80.0, 112.0]]),
        "crop_coords": torch.zeros(1, 2),
        "attention_kwargs": None,
        "return_dict": False,
        "kv_caches": caches,
    }


def _hidream() -> nn.Module:
    return diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        caption_channels=[TEXT_DIM, 10],
        text_emb_dim=14,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=ROPE,
        max_resolution=(16, 12),
        llama_layers=[0, 1, 2, 3, 4],
    )


def _hidream_call(rows: int, cols: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(2, 4, 2 * rows, 2 * cols),
        "timesteps": torch.tensor([601.0, 601.0]),
        "encoder_hidden_states_t5": _noise(2, TEXT, TEXT_DIM),
        "encoder_hidden_states_llama3": _noise(5, 2, 6, 10),
        "pooled_embeds": _noise(2, 14),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _hunyuan() -> nn.Module:
    return diffusers.HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=2,
        patch_size=(1, 1),
        guidance_embeds=True,
        text_embed_dim=TEXT_DIM,
        text_embed_2_dim=10,
        rope_axes_dim=(6, 6),
    )


def _hunyuan_call(lengths: list[int], glyphs: list[int]) -> dict[str, Any]:
    """``glyphs``: real tokens of the second text, which stand before those of the first; padding comes last."""
    batch = len(lengths)
    return {
        "hidden_states": _noise(batch, 4, ROWS, COLS),
        "timestep": torch.full((batch,), 601.0),
        "timestep_r": None,
        "guidance": torch.full((batch,), 3500.0),
        "attention_kwargs": None,
        "return_dict": False,
        "encoder_hidden_states": _noise(batch, TEXT, TEXT_DIM),
        "encoder_attention_mask": _valid(lengths, TEXT).long(),
        "encoder_hidden_states_2": _noise(batch, 6, 10),
        "encoder_attention_mask_2": _valid(glyphs, 6).long(),
    }


# --- packed tokens -------------------------------------------------------------------------------------------------


def _flux3() -> nn.Module:
    return diffusers.Flux3Transformer2DModel(
        in_channels=8,
        cond_in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        timestep_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )


def _flux3_call(edited: bool) -> dict[str, Any]:
    def ids(rows: int, cols: int, first: float) -> Tensor:
        return nn.functional.pad(_ids(rows, cols, first), (0, 1))

    text = nn.functional.pad(torch.arange(TEXT).float()[:, None], (3, 0))
    given = {
        "hidden_states": _noise(2, ROWS * COLS, 8),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "timestep": torch.tensor([0.6, 0.6]),
        "img_ids": ids(ROWS, COLS, 0),
        "txt_ids": text,
        "attention_kwargs": None,
        "return_dict": False,
    }
    if edited:
        given["image_cond_hidden_states"] = _noise(2, ROWS * COLS, 8, seed=6)
        given["image_cond_ids"] = ids(ROWS, COLS, 10)
    return given


def _ideogram() -> nn.Module:
    return diffusers.Ideogram4Transformer2DModel(
        in_channels=8,
        num_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        intermediate_size=64,
        adaln_dim=16,
        llm_features_dim=TEXT_DIM,
        mrope_section=(2, 2, 2),
    )


def _ideogram_call(lengths: list[int]) -> dict[str, Any]:
    """Text, padded on the left, before the image in one sequence; the image alone where ``lengths`` are 0."""
    batch, longest, size = len(lengths), max(lengths), ROWS * COLS
    real = torch.cat([_valid(lengths, longest, left=True), torch.ones(batch, size, dtype=torch.bool)], 1)
    text = torch.zeros(batch, longest, 3, dtype=torch.long)
    for place, length in zip(text, lengths, strict=True):
        place[longest - length :] = torch.arange(length)[:, None]
    indicator = torch.full((batch, longest + size), ideogram4.OUTPUT_IMAGE_INDICATOR)
    indicator[:, :longest] = ideogram4.LLM_TOKEN_INDICATOR * real[:, :longest]
    latents = torch.cat([torch.zeros(batch, longest, 8), _noise(batch, size, 8)], 1)
    return {
        "hidden_states": latents,
        "timestep": torch.full((batch,), 0.4),
        "encoder_hidden_states": _noise(batch, longest + size, TEXT_DIM) * (longest > 0),
        "position_ids": torch.cat([text, (_ids(ROWS, COLS).long() + 100).expand(batch, -1, -1)], 1),
        "segment_ids": torch.where(real, 1, ideogram4.SEQUENCE_PADDING_INDICATOR),
        "indicator": indicator,
        "attention_kwargs": None,
        "return_dict": False,
    }


def _longcat() -> nn.Module:
    return diffusers.LongCatImageTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=list(ROPE),
    )


def _longcat_call(edited: bool) -> dict[str, Any]:
    images = 1 + edited
    text = torch.zeros(TEXT, 3)
    text[:, 1:] = torch.arange(TEXT)[:, None]
    return {
        "hidden_states": _noise(1, images * ROWS * COLS, 8),
        "timestep": torch.tensor([0.6]),
        "guidance": None,
        "encoder_hidden_states": _noise(1, TEXT, TEXT_DIM),
        "txt_ids": text,
        "img_ids": torch.cat([_ids(ROWS, COLS, 1 + n) + TEXT for n in range(images)]),
        "return_dict": False,
    }


def _ovis() -> nn.Module:
    return diffusers.OvisImageTransformer2DModel(
        in_channels=8,
        out_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=ROPE,
    )


def _ovis_call() -> dict[str, Any]:
    text = torch.zeros(TEXT, 3)
    text[:, 1:] = torch.arange(TEXT)[:, None]
    return {
        "hidden_states": _noise(1, ROWS * COLS, 8),
        "timestep": torch.tensor([0.6]),
        "encoder_hidden_states": _noise(1, TEXT, TEXT_DIM),
        "txt_ids": text,
        "img_ids": _ids(ROWS, COLS),
        "joint_attention_kwargs": {},
        "return_dict": False,
    }


# --- images that are made from others ------------------------------------------------------------------------------


def _joy() -> nn.Module:
    return diffusers.JoyImageEditTransformer3DModel(
        patch_size=[1, 2, 2],
        in_channels=4,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        text_dim=TEXT_DIM,
        num_layers=2,
        rope_dim_list=list(ROPE),
    )


def _joy_call(items: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(1, items, 4, 1, 2 * ROWS, 2 * COLS),
        "timestep": torch.tensor([601.0]),
        "encoder_hidden_states": _noise(1, TEXT, TEXT_DIM),
        "return_dict": False,
    }


def _joy_plus() -> nn.Module:
    return diffusers.JoyImageEditPlusTransformer3DModel(
        patch_size=[1, 2, 2],
        in_channels=4,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        text_dim=TEXT_DIM,
        num_layers=2,
        rope_dim_list=list(ROPE),
    )


def _joy_plus_call(shapes: list[list[tuple[int, int, int]]], lengths: list[int]) -> dict[str, Any]:
    """``shapes``: patches of the image and of those it is made from; samples with fewer are padded."""
    most = max(sum(t * h * w for t, h, w in sample) for sample in shapes)
    return {
        "hidden_states": _noise(len(shapes), most, 4, 1, 2, 2),
        "timestep": torch.full((len(shapes),), 601.0),
        "encoder_hidden_states": _noise(len(shapes), max(lengths), TEXT_DIM),
        "encoder_hidden_states_mask": _valid(lengths, max(lengths)).float(),
        "shape_list": shapes,
        "return_dict": False,
    }


def _omnigen() -> nn.Module:
    return diffusers.OmniGenTransformer2DModel(
        in_channels=4,
        patch_size=2,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=64,
        num_layers=2,
        pad_token_id=2,
        vocab_size=40,
        max_position_embeddings=256,
        original_max_position_embeddings=128,
        rope_scaling={"short_factor": [1.0] * 6, "long_factor": [1.1] * 6},
        pos_embed_max_size=16,
        time_step_dim=16,
    )


def _omnigen_call(lengths: list[int], images: tuple[int, ...] = ()) -> dict[str, Any]:
    """Prompts padded on the left, a token of time, the image; ``images``: samples whose prompt holds a 2x3 image."""
    longest, size = max(lengths), ROWS * COLS
    total = longest + 1 + size
    real = torch.cat([_valid(lengths, longest, left=True), torch.ones(len(lengths), 1 + size, dtype=torch.bool)], 1)
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    causal[longest + 1 :] = True
    mask = torch.where(real[:, :, None], causal & real[:, None], True)
    spans = {sample: [[longest - 8, longest - 2]] for sample in images}
    for sample, ((start, end),) in spans.items():
        mask[sample, start:end, start:end] = True
    ids = torch.randint(3, 40, (len(lengths), longest), generator=torch.Generator().manual_seed(3))
    return {
        "hidden_states": _noise(len(lengths), 4, 2 * ROWS, 2 * COLS),
        "timestep": torch.full((len(lengths),), 0.6),
        "input_ids": torch.where(real[:, :longest], ids, 2),
        "input_img_latents": [_noise(1, 4, 4, 6, seed=sample) for sample in images],
        "input_image_sizes": spans,
        "attention_mask": mask.float(),
        "position_ids": (real.cumsum(1) - 1).clamp(min=0),
        "return_dict": False,
    }


# --- text that is attended to --------------------------------------------------------------------------------------


def _lumina() -> nn.Module:
    return diffusers.LuminaNextDiT2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        hidden_size=DIM,
        num_layers=2,
        num_attention_heads=HEADS,
        num_kv_heads=2,
        multiple_of=16,
        cross_attention_dim=TEXT_DIM,
    )


def _lumina_call() -> dict[str, Any]:
    turns = torch.arange(24.0)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    angles = torch.cat([turns[:, None].expand(24, 24, 3), turns[None].expand(24, 24, 3)], 2)
    return {
        "hidden_states": _noise(2, 4, 2 * ROWS, 2 * COLS),
        "timestep": torch.tensor([0.4, 0.4]),
        "encoder_hidden_states": _noise(2, TEXT, TEXT_DIM),
        "encoder_mask": _valid([TEXT, 4], TEXT).long(),
        "image_rotary_emb": torch.polar(torch.ones_like(angles), angles),
        "cross_attention_kwargs": {},
        "return_dict": False,
    }


def _nucleus() -> nn.Module:
    return diffusers.NucleusMoEImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=ROPE,
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=32,
        capacity_factors=2.0,
    )


def _filled(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Parameters that are made without values get some."""

    def filled() -> nn.Module:
        model = build()
        for name, parameter in model.named_parameters():
            if "experts." in name or name == "pad_token":
                nn.init.normal_(parameter, std=0.1)
        return model

    return filled


def _nucleus_call(lengths: list[int]) -> dict[str, Any]:
    valid = _valid(lengths, TEXT)
    return {
        "hidden_states": _noise(len(lengths), ROWS * COLS, 16),
        "timestep": torch.full((len(lengths),), 0.6),
        "encoder_hidden_states": _noise(len(lengths), TEXT, TEXT_DIM),
        "encoder_hidden_states_mask": None if valid.all() else valid.long(),
        "img_shapes": [(1, ROWS, COLS)] * len(lengths),
        "attention_kwargs": {},
        "return_dict": False,
    }


CASES: dict[str, Case] = {
    "BriaFibo2Transformer2DModel": Case(
        _made(_fibo2),
        {
            "prompt": lambda: _fibo2_call([TEXT]),
            "padded prompts": lambda: _fibo2_call([TEXT, 3]),
            "edit": lambda: _fibo2_call([TEXT, 3], ((3, 4), (ROWS, COLS))),
        },
    ),
    "BriaFiboTransformer2DModel": Case(
        _made(_fibo),
        {
            "guidance": lambda: _fibo_call([TEXT, 4]),
            "plain": lambda: _fibo_call([TEXT]),
            "edit": lambda: _fibo_call([TEXT, 4], edited=True),
        },
    ),
    "BriaTransformer2DModel": Case(_made(_bria), {"guidance": _bria_call, "controlnet": _bria_controlnet}),
    "CogView3PlusTransformer2DModel": Case(_made(_cogview3), {"guidance": _cogview3_call}),
    "DreamLiteTransformer2DModel": Case(
        _made(_dreamlite),
        {"guidance": lambda: _dreamlite_call(masked=False), "padded prompts": lambda: _dreamlite_call(masked=True)},
    ),
    "ErnieImageTransformer2DModel": Case(
        _made(_ernie), {"guidance": lambda: _ernie_call([4, TEXT]), "plain": lambda: _ernie_call([TEXT])}
    ),
    "Flux3Transformer2DModel": Case(
        _made(_flux3), {"guidance": lambda: _flux3_call(False), "edit": lambda: _flux3_call(True)}
    ),
    "GlmImageTransformer2DModel": Case(
        _made(_glm),
        {
            "prompt": lambda: _glm_call(None),
            "edit": lambda: _glm_call("read"),
            "image before": lambda: _glm_call("write", text=0),
        },
    ),
    "HiDreamImageTransformer2DModel": Case(
        _made(_hidream), {"square": lambda: _hidream_call(6, 6), "oblong": lambda: _hidream_call(ROWS, COLS)}
    ),
    "HunyuanImageTransformer2DModel": Case(
        _made(_hunyuan),
        {
            "prompt": lambda: _hunyuan_call([TEXT - 2], [4]),
            "prompts": lambda: _hunyuan_call([TEXT, 4], [6, 2]),
            "no glyphs": lambda: _hunyuan_call([TEXT - 2], [0]),
        },
    ),
    "Ideogram4Transformer2DModel": Case(
        _made(_ideogram),
        {
            "prompt": lambda: _ideogram_call([TEXT]),
            "padded prompts": lambda: _ideogram_call([TEXT, 4]),
            "image alone": lambda: _ideogram_call([0]),
        },
    ),
    "JoyImageEditPlusTransformer3DModel": Case(
        _made(_joy_plus),
        {
            "edit": lambda: _joy_plus_call([[(1, ROWS, COLS), (1, 3, 4)]], [TEXT]),
            "guidance": lambda: _joy_plus_call([[(1, ROWS, COLS), (1, 3, 4)], [(1, ROWS, COLS)]], [4, TEXT]),
        },
    ),
    "JoyImageEditTransformer3DModel": Case(_made(_joy), {"prompt": lambda: _joy_call(1), "edit": lambda: _joy_call(2)}),
    "LongCatImageTransformer2DModel": Case(
        _made(_longcat), {"prompt": lambda: _longcat_call(False), "edit": lambda: _longcat_call(True)}
    ),
    "LuminaNextDiT2DModel": Case(_made(_filled(_lumina)), {"guidance": _lumina_call}),
    "NucleusMoEImageTransformer2DModel": Case(
        _made(_filled(_nucleus)),
        {"prompt": lambda: _nucleus_call([TEXT]), "padded prompts": lambda: _nucleus_call([TEXT, 4])},
    ),
    "OmniGenTransformer2DModel": Case(
        _made(_omnigen),
        {"guidance": lambda: _omnigen_call([TEXT, 4]), "edit": lambda: _omnigen_call([12, 4, 10], images=(0, 2))},
    ),
    "OvisImageTransformer2DModel": Case(_made(_ovis), {"prompt": _ovis_call}),
}
