"""DiT (Peebles & Xie 2022, arXiv:2212.09748): class-conditional, image tokens only."""

from ..types import Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="DiTTransformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"),),
            whole=("timestep", "class_labels"),
        ),
    ),
    # The last norm is modulated by the first block's embedding of timestep and class.
    kept=("transformer_blocks.0.norm1.emb",),
)
