"""LTX-Video (HaCohen et al. 2024, arXiv:2501.00103): text by cross-attention; a timestep per token in I2V."""

from ..types import LOCAL, Cut, Region, Stream, Table, TokenLayout, joint

LAYOUT = TokenLayout(
    model="LTXVideoTransformer3DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"), LOCAL),
            cuts=(
                Cut("image_rotary_emb.0", dim=1, tokens=("image",)),
                Cut("image_rotary_emb.1", dim=1, tokens=("image",)),
                Cut("temb", dim=1, tokens=("image",)),
            ),
            whole=("encoder_hidden_states", "encoder_attention_mask"),
        ),
    ),
    tables=(Table("LTXAttention", "image_rotary_emb", ndim=3, dim=2, width="queries"),),
)
