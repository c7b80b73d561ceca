"""PixArt-alpha and -sigma (Chen et al. 2023, arXiv:2310.00426): text by cross-attention."""

from ..types import LOCAL, Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="PixArtTransformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"), LOCAL),
            # The processor pads a mask whose length is not that of its own tokens: it must be cut with them.
            cuts=(Cut("attention_mask", dim=2, tokens=("image",)),),
            whole=("timestep", "encoder_hidden_states", "encoder_attention_mask"),
        ),
    ),
)
