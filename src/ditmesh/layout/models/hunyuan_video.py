"""HunyuanVideo (Kong et al. 2024, arXiv:2412.03603): two block lists, the second fed by the first unchanged.

The image-to-video model gives the first frame's tokens a modulation of their own and counts them
(`num_tokens`); the blocks of the text-to-video model are passed the same two arguments and ignore them.
"""

from ..types import Count, Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="HunyuanVideoTransformer3DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(Stream("image", "hidden_states", out=0), Stream("text", "encoder_hidden_states", out=1)),
            attention=(joint("image", "text"),),
            cuts=(
                Cut("attention_mask", dim=3, tokens=("image", "text")),
                Cut("freqs_cis.0", dim=0, tokens=("image",)),
                Cut("freqs_cis.1", dim=0, tokens=("image",)),
            ),
            whole=("temb", "token_replace_emb", "*5"),
            counts=(
                Count("num_tokens", "image"),
                Count("*6", "image"),
            ),
        ),
        Region(
            blocks="single_transformer_blocks",
            streams=(
                Stream("image", "hidden_states", out=0),
                Stream("text", "encoder_hidden_states", out=1, used_after=False),
            ),
            attention=(joint("image", "text"),),
            cuts=(
                Cut("attention_mask", dim=3, tokens=("image", "text")),
                Cut("image_rotary_emb.0", dim=0, tokens=("image",)),
                Cut("image_rotary_emb.1", dim=0, tokens=("image",)),
            ),
            whole=("temb", "token_replace_emb", "*5"),
            counts=(
                Count("num_tokens", "image"),
                Count("*6", "image"),
            ),
            chained=True,
        ),
    ),
)
