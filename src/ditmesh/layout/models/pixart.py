"""PixArt-alpha and -sigma (Chen et al. 2023, arXiv:2310.00426): text by cross-attention."""

from ..types import LOCAL, Cut, Region, TokenLayout, joint

BLOCKS = Region(
    "transformer_blocks",
    attention=(joint("image"), LOCAL),
    # The processor pads a mask of another length than its own tokens: it must be cut with them.
    cuts=(Cut("attention_mask", 2),),
    whole=("timestep", "encoder_hidden_states", "encoder_attention_mask"),
)

LAYOUT = TokenLayout("PixArtTransformer2DModel", (BLOCKS,))
