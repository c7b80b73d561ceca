"""CogVideoX (Yang et al. 2024, arXiv:2408.06072): video and text as one sequence in every attention."""

from ..types import Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="CogVideoXTransformer3DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(
                Stream("image", "hidden_states", out=0),
                Stream("text", "encoder_hidden_states", out=1, used_after=False),
            ),
            attention=(joint("text", "image"),),
            cuts=(
                Cut("image_rotary_emb.0", dim=0, tokens=("image",)),
                Cut("image_rotary_emb.1", dim=0, tokens=("image",)),
            ),
            whole=("temb",),
        ),
    ),
    unbatched=("image_rotary_emb.0", "image_rotary_emb.1", "ofs"),
)
