"""Lumina-Image 2.0 (Qin et al. 2025, arXiv:2503.21758): one stream, each sample's text before its image.

The text refiner (`context_refiner`) sees text only and runs whole on every rank.
"""

from ..types import Cut, Region, TokenLayout

LAYOUT = TokenLayout(
    model="Lumina2Transformer2DModel",
    regions=(
        Region("noise_refiner", cuts=(Cut("image_rotary_emb", 1),), whole=("temb",)),
        Region("layers", cuts=(Cut("attention_mask", 1), Cut("image_rotary_emb", 1)), whole=("temb",)),
    ),
)
