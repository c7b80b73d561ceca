"""CogVideoX (Yang et al. 2024, arXiv:2408.06072): video and text as one sequence in every attention."""

from ..types import Region, TokenLayout, image_and_text, joint, rotary

BLOCKS = Region(
    "transformer_blocks",
    streams=image_and_text(image=0, text_used_after=False),
    attention=(joint("text", "image"),),
    cuts=rotary("image_rotary_emb", 0),
    whole=("temb",),
)

LAYOUT = TokenLayout(
    "CogVideoXTransformer3DModel",
    (BLOCKS,),
    unbatched=("image_rotary_emb.0", "image_rotary_emb.1", "ofs"),
)
