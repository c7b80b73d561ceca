"""FLUX.2 (Black Forest Labs 2025): the second block list runs on one stream, text before image."""

from ..types import Cut, Region, TokenLayout, image_and_text, joint, rotary

MASK = "joint_attention_kwargs.attention_mask"

LAYOUT = TokenLayout(
    model="Flux2Transformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=image_and_text(image=1),
            attention=(joint("text", "image"),),
            cuts=(*rotary("image_rotary_emb", 0, ("text", "image")), Cut(MASK, 3, ("text", "image"))),
            whole=("temb_mod_img", "temb_mod_txt"),
        ),
        Region(
            blocks="single_transformer_blocks",
            cuts=(*rotary("image_rotary_emb", 0), Cut(MASK, 3)),
            whole=("temb_mod",),
        ),
    ),
    unbatched=("img_ids", "txt_ids"),
    refused=dict.fromkeys(("kv_cache", "kv_cache_mode"), "cached keys and values of reference pictures are not cut"),
)
