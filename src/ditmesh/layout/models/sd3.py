"""Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv:2403.03206): joint attention over image and text.

The last block returns no text (`context_pre_only`). The first blocks of SD3.5-medium attend once more, the
image to itself.
"""

from ..types import CONTROLNET, IP_ADAPTER, Cut, Region, TokenLayout, image_and_text, joint

BLOCKS = Region(
    "transformer_blocks",
    streams=image_and_text(image=1, text_used_after=False),
    attention=(joint("image", "text"), joint("image")),
    cuts=(Cut("joint_attention_kwargs.attention_mask", 3, ("image", "text")),),
    whole=("temb",),
)

LAYOUT = TokenLayout(
    "SD3Transformer2DModel",
    (BLOCKS,),
    refused={
        "block_controlnet_hidden_states": CONTROLNET,
        "joint_attention_kwargs.ip_adapter_image_embeds": IP_ADAPTER,
    },
)
