"""Stable Audio Open (Evans et al. 2024, arXiv:2407.14358): sound tokens after one global token.

The stream is called image as in every layout: it is what the model draws.
"""

from ..types import LOCAL, Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="StableAudioDiTModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"), LOCAL),
            cuts=(
                Cut("attention_mask", dim=1, tokens=("image",)),
                Cut("rotary_embedding.0", dim=0, tokens=("image",)),
                Cut("rotary_embedding.1", dim=0, tokens=("image",)),
            ),
            whole=("encoder_hidden_states", "encoder_attention_mask"),
        ),
    ),
    unbatched=("rotary_embedding.0", "rotary_embedding.1"),
)
