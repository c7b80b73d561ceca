"""Latte (Ma et al. 2024, arXiv:2401.03048): spatial and temporal blocks by turns.

Spatial blocks see (batch · frames, tokens of a frame, C), temporal ones (batch · tokens of a frame, frames, C).
A rank keeps its tokens of every frame through both: spatial attention mixes ranks, temporal attention does not.
"""

from ..types import LOCAL, Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="LatteTransformer3DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            attention=(joint("image"), LOCAL),
            whole=("encoder_hidden_states", "encoder_attention_mask", "timestep"),
        ),
        Region(
            blocks="temporal_transformer_blocks",
            streams=(Stream("image", "hidden_states", dim=0, folded=True),),
            attention=(LOCAL,),
            cuts=(Cut("timestep", 0, folded=True),),
        ),
    ),
    alternating=True,
)
