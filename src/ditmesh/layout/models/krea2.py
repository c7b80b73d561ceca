"""Krea 2 (Krea): one stream, text before image."""

from ..types import Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="Krea2Transformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"),),
            cuts=(
                Cut("image_rotary_emb.0", dim=0, tokens=("image",)),
                Cut("image_rotary_emb.1", dim=0, tokens=("image",)),
                Cut("attention_mask", dim=3, tokens=("image",)),
            ),
            whole=("temb",),
        ),
    ),
    unbatched=("position_ids",),
)
