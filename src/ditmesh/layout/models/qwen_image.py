"""Qwen-Image and its edit models (Qwen Team 2025, arXiv:2508.02324): joint attention over text and image."""

from ..types import CONTROLNET, Cut, Region, TokenLayout, image_and_text, joint

BLOCKS = Region(
    "transformer_blocks",
    streams=image_and_text(image=1, text_used_after=False),
    attention=(joint("text", "image"),),
    cuts=(
        Cut("encoder_hidden_states_mask", 1, ("text",)),
        Cut("image_rotary_emb.0", 0),
        Cut("image_rotary_emb.1", 0, ("text",)),
        Cut("modulate_index", 1),
    ),
    whole=("temb",),
)

LAYOUT = TokenLayout(
    "QwenImageTransformer2DModel",
    (BLOCKS,),
    listed=("img_shapes",),
    refused={"controlnet_block_samples": CONTROLNET},
)
