"""CogView4 (Zhipu AI 2025; CogView3: Zheng et al. 2024, arXiv:2403.05121): joint attention, text first."""

from ..types import Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="CogView4Transformer2DModel",
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
                Cut("attention_mask", dim=1, tokens=("text",)),
            ),
            whole=("temb",),
        ),
    ),
    unbatched=("image_rotary_emb.0", "image_rotary_emb.1"),
)
