"""Mochi 1 (Genmo 2024): joint attention with the valid text tokens only, one call for every sample."""

from ..types import Attention, Cut, Region, Stream, Table, TokenLayout

LAYOUT = TokenLayout(
    model="MochiTransformer3DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(
                Stream("image", "hidden_states", out=0),
                Stream("text", "encoder_hidden_states", out=1, used_after=False, replicate=True),
            ),
            attention=(Attention(queries=("image", "text"), keys=("image", "text"), ragged="text", per_sample=True),),
            cuts=(
                Cut("encoder_attention_mask", dim=1, tokens=("text",)),
                Cut("image_rotary_emb.0", dim=0, tokens=("image",)),
                Cut("image_rotary_emb.1", dim=0, tokens=("image",)),
            ),
            whole=("temb",),
        ),
    ),
    tables=(Table("MochiAttention", "image_rotary_emb", ndim=3, dim=1, width="heads"),),
)
