"""Qwen-Image and its edit models (Qwen Team 2025, arXiv:2508.02324): joint attention over text and image."""

from ..types import Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="QwenImageTransformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(
                Stream("image", "hidden_states", out=1),
                Stream("text", "encoder_hidden_states", out=0, used_after=False),
            ),
            attention=(joint("text", "image"),),
            cuts=(
                Cut("encoder_hidden_states_mask", dim=1, tokens=("text",)),
                Cut("image_rotary_emb.0", dim=0, tokens=("image",)),
                Cut("image_rotary_emb.1", dim=0, tokens=("text",)),
                Cut("modulate_index", dim=1, tokens=("image",)),
            ),
            whole=("temb",),
        ),
    ),
    listed=("img_shapes",),
    refused={
        "controlnet_block_samples": "ControlNet residuals are added between blocks to whole sequences",
    },
)
