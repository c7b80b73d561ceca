"""CogView4 (Zhipu AI 2025; CogView3: Zheng et al. 2024, arXiv:2403.05121): joint attention, text first."""

from ..types import Cut, Region, TokenLayout, image_and_text, joint, rotary

BLOCKS = Region(
    "transformer_blocks",
    streams=image_and_text(image=0, text_used_after=False),
    attention=(joint("text", "image"),),
    cuts=(*rotary("image_rotary_emb", 0), Cut("attention_mask", 1, ("text",))),
    whole=("temb",),
)

LAYOUT = TokenLayout("CogView4Transformer2DModel", (BLOCKS,), unbatched=("image_rotary_emb.0", "image_rotary_emb.1"))
