"""DiT (Peebles & Xie 2022, arXiv:2212.09748): class-conditional, image tokens only."""

from ..types import Region, TokenLayout

LAYOUT = TokenLayout(
    model="DiTTransformer2DModel",
    regions=(Region("transformer_blocks", whole=("timestep", "class_labels")),),
    # The last norm is modulated by the first block's embedding of timestep and class.
    kept=("transformer_blocks.0.norm1.emb",),
)
