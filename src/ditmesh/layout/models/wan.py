"""Wan 2.1 and 2.2 (Wan Team 2025, arXiv:2503.20314): text, and the first frame, by cross-attention.

With a timestep per token (Wan 2.2 TI2V) the modulation is per token, too.
"""

from ..types import LOCAL, Cut, Region, TokenLayout, joint, rotary

BLOCKS = Region(
    "blocks",
    attention=(joint("image"), LOCAL, LOCAL),
    cuts=(*rotary("rotary_emb", 1), Cut("temb", 1, ndim=4)),
    whole=("encoder_hidden_states", "temb"),
)

# Of a first and a last frame, two by two.
LAYOUT = TokenLayout("WanTransformer3DModel", (BLOCKS,), grouped=("encoder_hidden_states_image",))
