"""Krea 2 (Krea): one stream, text before image."""

from ..types import Cut, Region, TokenLayout, rotary

BLOCKS = Region(
    "transformer_blocks",
    cuts=(*rotary("image_rotary_emb", 0), Cut("attention_mask", 3)),
    whole=("temb",),
)

LAYOUT = TokenLayout("Krea2Transformer2DModel", (BLOCKS,), unbatched=("position_ids",))
