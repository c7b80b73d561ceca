"""LTX-Video (HaCohen et al. 2024, arXiv:2501.00103): text by cross-attention; a timestep per token in I2V."""

from ..types import LOCAL, Cut, Region, Table, TokenLayout, joint, rotary

BLOCKS = Region(
    "transformer_blocks",
    attention=(joint("image"), LOCAL),
    cuts=(*rotary("image_rotary_emb", 1), Cut("temb", 1)),
    whole=("encoder_hidden_states", "encoder_attention_mask"),
)

LAYOUT = TokenLayout(
    "LTXVideoTransformer3DModel",
    (BLOCKS,),
    tables=(Table("LTXAttention", "image_rotary_emb", ndim=3, dim=2, width="queries"),),
)
