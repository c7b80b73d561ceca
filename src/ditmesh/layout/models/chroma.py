"""Chroma (Lodestone 2025): FLUX.1 without guidance; the second block list runs on one stream, text first."""

from ..types import CONTROLNET, IP_ADAPTER, Cut, Region, TokenLayout, image_and_text, joint, rotary

LAYOUT = TokenLayout(
    model="ChromaTransformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=image_and_text(image=1),
            attention=(joint("text", "image"),),
            cuts=(*rotary("image_rotary_emb", 0, ("text", "image")), Cut("attention_mask", 1, ("text", "image"))),
            whole=("temb",),
        ),
        Region(
            blocks="single_transformer_blocks",
            cuts=(*rotary("image_rotary_emb", 0), Cut("attention_mask", 1)),
            whole=("temb",),
        ),
    ),
    unbatched=("img_ids", "txt_ids"),
    refused={
        "controlnet_block_samples": CONTROLNET,
        "controlnet_single_block_samples": CONTROLNET,
        "joint_attention_kwargs.ip_adapter_image_embeds": IP_ADAPTER,
    },
)
