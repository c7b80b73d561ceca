"""Mochi 1 (Genmo 2024): joint attention with the valid text tokens only, one call for every sample."""

from ..types import Attention, Cut, Region, Stream, Table, TokenLayout, rotary

BLOCKS = Region(
    "transformer_blocks",
    streams=(
        Stream("image", "hidden_states", out=0),
        Stream("text", "encoder_hidden_states", out=1, used_after=False, replicate=True),
    ),
    attention=(Attention(("image", "text"), ("image", "text"), ragged="text", per_sample=True),),
    cuts=(Cut("encoder_attention_mask", 1, ("text",)), *rotary("image_rotary_emb", 0)),
    whole=("temb",),
)

LAYOUT = TokenLayout(
    "MochiTransformer3DModel",
    (BLOCKS,),
    tables=(Table("MochiAttention", "image_rotary_emb", ndim=3, dim=1, width="heads"),),
)
