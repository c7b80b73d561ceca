"""HunyuanVideo 1.5 (Tencent 2025, arXiv:2511.18870): text, glyph and image conditions as one text stream."""

from ..types import Cut, Region, TokenLayout, image_and_text, joint, rotary

BLOCKS = Region(
    "transformer_blocks",
    streams=image_and_text(image=0, text_used_after=False),
    attention=(joint("image", "text"),),
    cuts=(Cut("attention_mask", 1, ("text",)), *rotary("freqs_cis", 0)),
    whole=("temb",),
)

LAYOUT = TokenLayout("HunyuanVideo15Transformer3DModel", (BLOCKS,))
