"""HunyuanVideo (Kong et al. 2024, arXiv:2412.03603): two block lists, the second fed by the first unchanged.

The image-to-video model gives the first frame's tokens a modulation of their own and counts them
(`num_tokens`); the blocks of the text-to-video model are passed the same two arguments and ignore them.
"""

from dataclasses import replace

from ..types import Count, Cut, Region, TokenLayout, image_and_text, joint, rotary

MASK = Cut("attention_mask", 3, ("image", "text"))
DOUBLE = Region(
    blocks="transformer_blocks",
    streams=image_and_text(image=0),
    attention=(joint("image", "text"),),
    cuts=(MASK, *rotary("freqs_cis", 0)),
    whole=("temb", "token_replace_emb", "*5"),
    counts=(Count("num_tokens", "image"), Count("*6", "image")),
)
SINGLE = replace(
    DOUBLE,
    blocks="single_transformer_blocks",
    streams=image_and_text(image=0, text_used_after=False),
    cuts=(MASK, *rotary("image_rotary_emb", 0)),
    chained=True,
)

LAYOUT = TokenLayout(model="HunyuanVideoTransformer3DModel", regions=(DOUBLE, SINGLE))
