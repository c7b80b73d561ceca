"""Lumina-Image 2.0 (Qin et al. 2025, arXiv:2503.21758): one stream, each sample's text before its image.

The text refiner (`context_refiner`) sees text only and runs whole on every rank.
"""

from ..types import Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="Lumina2Transformer2DModel",
    regions=(
        Region(
            blocks="noise_refiner",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"),),
            cuts=(Cut("image_rotary_emb", dim=1, tokens=("image",)),),
            whole=("temb",),
        ),
        Region(
            blocks="layers",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"),),
            cuts=(
                Cut("attention_mask", dim=1, tokens=("image",)),
                Cut("image_rotary_emb", dim=1, tokens=("image",)),
            ),
            whole=("temb",),
        ),
    ),
)
