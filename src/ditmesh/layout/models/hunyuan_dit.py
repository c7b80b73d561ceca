"""Hunyuan-DiT (Li et al. 2024, arXiv:2405.08748): text by cross-attention, long skips between blocks."""

from ..types import LOCAL, Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="HunyuanDiT2DModel",
    regions=(
        Region(
            blocks="blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"), LOCAL),
            cuts=(
                Cut("image_rotary_emb.0", dim=0, tokens=("image",)),
                Cut("image_rotary_emb.1", dim=0, tokens=("image",)),
            ),
            whole=("temb", "encoder_hidden_states"),
            local=("skip",),
        ),
    ),
    unbatched=("image_rotary_emb.0", "image_rotary_emb.1"),
    refused={
        "controlnet_block_samples": "ControlNet residuals are added between blocks to whole sequences",
    },
)
