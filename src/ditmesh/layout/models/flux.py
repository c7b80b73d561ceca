"""FLUX.1 (Black Forest Labs 2024): two block lists, the second fed by the first unchanged."""

from dataclasses import replace

from ..types import CONTROLNET, IP_ADAPTER, Cut, Region, TokenLayout, image_and_text, joint, rotary

DOUBLE = Region(
    blocks="transformer_blocks",
    streams=image_and_text(image=1),
    attention=(joint("text", "image"),),
    cuts=(
        *rotary("image_rotary_emb", 0, ("text", "image")),
        Cut("joint_attention_kwargs.attention_mask", 3, ("text", "image")),
    ),
    whole=("temb",),
)
SINGLE = replace(
    DOUBLE,
    blocks="single_transformer_blocks",
    streams=image_and_text(image=1, text_used_after=False),
    chained=True,
)

LAYOUT = TokenLayout(
    model="FluxTransformer2DModel",
    regions=(DOUBLE, SINGLE),
    unbatched=("img_ids", "txt_ids"),
    refused={
        "controlnet_block_samples": CONTROLNET,
        "controlnet_single_block_samples": CONTROLNET,
        "joint_attention_kwargs.ip_adapter_image_embeds": IP_ADAPTER,
    },
)
