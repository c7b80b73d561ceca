"""AuraFlow (Fal 2024): joint attention, then one stream, text (with its registers) before image."""

from ..types import Region, TokenLayout, image_and_text, joint

LAYOUT = TokenLayout(
    model="AuraFlowTransformer2DModel",
    regions=(
        Region("joint_transformer_blocks", image_and_text(image=1), (joint("text", "image"),), whole=("temb",)),
        Region("single_transformer_blocks", whole=("temb",)),
    ),
)
