"""FLUX.2 (Black Forest Labs 2025): the second block list runs on one stream, text before image."""

from ..types import Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="Flux2Transformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(Stream("image", "hidden_states", out=1), Stream("text", "encoder_hidden_states", out=0)),
            attention=(joint("text", "image"),),
            cuts=(
                Cut("image_rotary_emb.0", dim=0, tokens=("text", "image")),
                Cut("image_rotary_emb.1", dim=0, tokens=("text", "image")),
                Cut("joint_attention_kwargs.attention_mask", dim=3, tokens=("text", "image")),
            ),
            whole=("temb_mod_img", "temb_mod_txt"),
        ),
        Region(
            blocks="single_transformer_blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(joint("image"),),
            cuts=(
                Cut("image_rotary_emb.0", dim=0, tokens=("image",)),
                Cut("image_rotary_emb.1", dim=0, tokens=("image",)),
                Cut("joint_attention_kwargs.attention_mask", dim=3, tokens=("image",)),
            ),
            whole=("temb_mod",),
        ),
    ),
    unbatched=("img_ids", "txt_ids"),
    refused={
        "kv_cache": "cached keys and values of reference pictures are not cut",
        "kv_cache_mode": "cached keys and values of reference pictures are not cut",
    },
)
