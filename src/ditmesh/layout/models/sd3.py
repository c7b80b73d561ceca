"""Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv:2403.03206): joint attention over image and text.

The last block returns no text (`context_pre_only`). The first blocks of SD3.5-medium attend once more, the
image to itself.
"""

from ..types import Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="SD3Transformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(
                Stream("image", "hidden_states", out=1),
                Stream("text", "encoder_hidden_states", out=0, used_after=False),
            ),
            attention=(joint("image", "text"), joint("image")),
            cuts=(Cut("joint_attention_kwargs.attention_mask", dim=3, tokens=("image", "text")),),
            whole=("temb",),
        ),
    ),
    refused={
        "block_controlnet_hidden_states": "ControlNet residuals are added between blocks to whole sequences",
        "joint_attention_kwargs.ip_adapter_image_embeds": "IP-Adapter attention is not in the layout",
    },
)
