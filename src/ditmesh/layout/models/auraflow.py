"""AuraFlow (Fal 2024): joint attention, then one stream, text (with its registers) before image."""

from ..types import Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="AuraFlowTransformer2DModel",
    regions=(
        Region(
            blocks="joint_transformer_blocks",
            streams=(Stream("image", "hidden_states", out=1), Stream("text", "encoder_hidden_states", out=0)),
            attention=(joint("text", "image"),),
            whole=("temb",),
        ),
        Region(
            blocks="single_transformer_blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"),),
            whole=("temb",),
        ),
    ),
)
