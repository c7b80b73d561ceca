"""FLUX.1 (Black Forest Labs 2024): two block lists, the second fed by the first unchanged."""

from ..types import Cut, Region, Stream, TokenLayout, joint

CUTS = (
    Cut("image_rotary_emb.0", dim=0, tokens=("text", "image")),
    Cut("image_rotary_emb.1", dim=0, tokens=("text", "image")),
    Cut("joint_attention_kwargs.attention_mask", dim=3, tokens=("text", "image")),
)

LAYOUT = TokenLayout(
    model="FluxTransformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(
                Stream("image", "hidden_states", out=1),
                Stream("text", "encoder_hidden_states", out=0),
            ),
            attention=(joint("text", "image"),),
            cuts=CUTS,
            whole=("temb",),
        ),
        Region(
            blocks="single_transformer_blocks",
            streams=(
                Stream("image", "hidden_states", out=1),
                Stream("text", "encoder_hidden_states", out=0, used_after=False),
            ),
            attention=(joint("text", "image"),),
            cuts=CUTS,
            whole=("temb",),
            chained=True,
        ),
    ),
    unbatched=("img_ids", "txt_ids"),
    refused={
        "controlnet_block_samples": "ControlNet residuals are added between blocks to whole sequences",
        "controlnet_single_block_samples": "ControlNet residuals are added between blocks to whole sequences",
        "joint_attention_kwargs.ip_adapter_image_embeds": "IP-Adapter attention is not in the layout",
    },
)
