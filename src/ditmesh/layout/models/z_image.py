"""Z-Image (Tongyi Lab 2025, arXiv:2511.22699): lists of pictures and captions, image before text in one stream.

The text refiner (`context_refiner`) sees text only and runs whole on every rank.
"""

from ..types import Cut, Region, Stream, TokenLayout, joint

LAYOUT = TokenLayout(
    model="ZImageTransformer2DModel",
    regions=(
        Region(
            blocks="noise_refiner",
            streams=(Stream("image", "x"),),
            attention=(joint("image"),),
            cuts=(
                Cut("freqs_cis", dim=1, tokens=("image",)),
                Cut("attn_mask", dim=1, tokens=("image",)),
            ),
            whole=("adaln_input",),
        ),
        Region(
            blocks="layers",
            streams=(Stream("image", "x"),),
            attention=(joint("image"),),
            cuts=(
                Cut("freqs_cis", dim=1, tokens=("image",)),
                Cut("attn_mask", dim=1, tokens=("image",)),
            ),
            whole=("adaln_input",),
        ),
    ),
    listed=("x", "cap_feats"),
    timestep="t",
    refused={
        "controlnet_block_samples": "ControlNet residuals are added between blocks to whole sequences",
        "siglip_feats": "sequences of several pictures are not in the layout",
        "image_noise_mask": "sequences of several pictures are not in the layout",
    },
)
