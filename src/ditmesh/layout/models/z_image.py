"""Z-Image (Tongyi Lab 2025, arXiv:2511.22699): lists of images and captions, image before text in one stream.

The text refiner (`context_refiner`) sees text only and runs whole on every rank.
"""

from ..types import CONTROLNET, Cut, Region, Stream, TokenLayout

SEVERAL_PICTURES = "sequences of several images are not in the layout"

LAYOUT = TokenLayout(
    model="ZImageTransformer2DModel",
    regions=tuple(
        Region(
            blocks,
            streams=(Stream("image", "x"),),
            cuts=(Cut("freqs_cis", 1), Cut("attn_mask", 1)),
            whole=("adaln_input",),
        )
        for blocks in ("noise_refiner", "layers")
    ),
    listed=("x", "cap_feats"),
    timestep="t",
    refused={
        "controlnet_block_samples": CONTROLNET,
        "siglip_feats": SEVERAL_PICTURES,
        "image_noise_mask": SEVERAL_PICTURES,
    },
)
