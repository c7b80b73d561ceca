"""Stable Audio Open (Evans et al. 2024, arXiv:2407.14358): sound tokens after one global token.

The stream is called image as in every layout: it is what the model generates.
"""

from ..types import LOCAL, Cut, Region, TokenLayout, joint, rotary

BLOCKS = Region(
    "transformer_blocks",
    attention=(joint("image"), LOCAL),
    cuts=(Cut("attention_mask", 1), *rotary("rotary_embedding", 0)),
    whole=("encoder_hidden_states", "encoder_attention_mask"),
)

LAYOUT = TokenLayout("StableAudioDiTModel", (BLOCKS,), unbatched=("rotary_embedding.0", "rotary_embedding.1"))
