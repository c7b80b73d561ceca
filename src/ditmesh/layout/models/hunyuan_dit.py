"""Hunyuan-DiT (Li et al. 2024, arXiv:2405.08748): text by cross-attention, long skips between blocks."""

from ..types import CONTROLNET, LOCAL, Region, TokenLayout, joint, rotary

BLOCKS = Region(
    "blocks",
    attention=(joint("image"), LOCAL),
    cuts=rotary("image_rotary_emb", 0),
    whole=("temb", "encoder_hidden_states"),
    local=("skip",),
)

LAYOUT = TokenLayout(
    "HunyuanDiT2DModel",
    (BLOCKS,),
    unbatched=("image_rotary_emb.0", "image_rotary_emb.1"),
    refused={"controlnet_block_samples": CONTROLNET},
)
