"""HunyuanVideo 1.5 (Tencent 2025, arXiv:2511.18870): text, glyph and image conditions as one text stream."""

from ..types import Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="HunyuanVideo15Transformer3DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(
                Stream("image", "hidden_states", out=0),
                Stream("text", "encoder_hidden_states", out=1, used_after=False),
            ),
            attention=(joint("image", "text"),),
            cuts=(
                Cut("attention_mask", dim=1, tokens=("text",)),
                Cut("freqs_cis.0", dim=0, tokens=("image",)),
                Cut("freqs_cis.1", dim=0, tokens=("image",)),
            ),
            whole=("temb",),
        ),
    ),
)
