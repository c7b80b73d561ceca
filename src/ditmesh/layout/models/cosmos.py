"""Cosmos Predict (NVIDIA 2025, arXiv:2501.03575): text by cross-attention, positions added in every block."""

from ..types import LOCAL, Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="CosmosTransformer3DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"), LOCAL),
            cuts=(
                Cut("image_rotary_emb.0", dim=0, tokens=("image",)),
                Cut("image_rotary_emb.1", dim=0, tokens=("image",)),
                Cut("extra_pos_emb", dim=1, tokens=("image",)),
                Cut("embedded_timestep", dim=1, tokens=("image",), ndim=3),
                Cut("temb", dim=1, tokens=("image",), ndim=3),
            ),
            whole=("encoder_hidden_states", "embedded_timestep", "temb", "attention_mask"),
        ),
    ),
    unbatched=("padding_mask",),
    refused={
        "block_controlnet_hidden_states": "ControlNet residuals are added between blocks to whole sequences",
    },
)
