"""Wan 2.1 and 2.2 (Wan Team 2025, arXiv:2503.20314): text, and the first frame, by cross-attention.

With a timestep per token (Wan 2.2 TI2V) the modulation is per token, too.
"""

from ..types import LOCAL, Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="WanTransformer3DModel",
    regions=(
        Region(
            blocks="blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"), LOCAL, LOCAL),
            cuts=(
                Cut("rotary_emb.0", dim=1, tokens=("image",)),
                Cut("rotary_emb.1", dim=1, tokens=("image",)),
                Cut("temb", dim=1, tokens=("image",), ndim=4),
            ),
            whole=("encoder_hidden_states", "temb"),
        ),
    ),
)
