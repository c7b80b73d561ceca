"""Chroma (Lodestone 2025): FLUX.1 without guidance; the second block list runs on one stream, text first."""

from ..types import Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="ChromaTransformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(Stream("image", "hidden_states", out=1), Stream("text", "encoder_hidden_states", out=0)),
            attention=(joint("text", "image"),),
            cuts=(
                Cut("image_rotary_emb.0", dim=0, tokens=("text", "image")),
                Cut("image_rotary_emb.1", dim=0, tokens=("text", "image")),
                Cut("attention_mask", dim=1, tokens=("text", "image")),
            ),
            whole=("temb",),
        ),
        Region(
            blocks="single_transformer_blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"),),
            cuts=(
                Cut("image_rotary_emb.0", dim=0, tokens=("image",)),
                Cut("image_rotary_emb.1", dim=0, tokens=("image",)),
                Cut("attention_mask", dim=1, tokens=("image",)),
            ),
            whole=("temb",),
        ),
    ),
    unbatched=("img_ids", "txt_ids"),
    refused={
        "controlnet_block_samples": "ControlNet residuals are added between blocks to whole sequences",
        "controlnet_single_block_samples": "ControlNet residuals are added between blocks to whole sequences",
        "joint_attention_kwargs.ip_adapter_image_embeds": "IP-Adapter attention is not in the layout",
    },
)
