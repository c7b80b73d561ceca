"""Cosmos Predict (NVIDIA 2025, arXiv:2501.03575): text by cross-attention, positions added in every block."""

from ..types import CONTROLNET, LOCAL, Cut, Region, TokenLayout, joint, rotary

BLOCKS = Region(
    "transformer_blocks",
    attention=(joint("image"), LOCAL),
    cuts=(
        *rotary("image_rotary_emb", 0),
        Cut("extra_pos_emb", 1),
        Cut("embedded_timestep", 1, ndim=3),
        Cut("temb", 1, ndim=3),
    ),
    whole=("encoder_hidden_states", "embedded_timestep", "temb", "attention_mask"),
)

LAYOUT = TokenLayout(
    "CosmosTransformer3DModel",
    (BLOCKS,),
    unbatched=("padding_mask",),
    refused={"block_controlnet_hidden_states": CONTROLNET},
)
