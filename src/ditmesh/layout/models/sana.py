"""Sana (Xie et al. 2024, arXiv:2410.10629): linear attention, and a feed-forward with a depthwise convolution.

The only attention with a softmax is that of the image on the text. The convolution works on the picture, so
the tokens are cut between rows.
"""

from ..types import LOCAL, Cut, Grid, Leaf, Region, Stream, TokenLayout

LAYOUT = TokenLayout(
    model="SanaTransformer2DModel",
    regions=(
        Region(
            blocks="transformer_blocks",
            streams=(Stream("image", "hidden_states"),),
            attention=(LOCAL,),
            cuts=(Cut("attention_mask", dim=2, tokens=("image",)),),
            whole=("encoder_hidden_states", "encoder_attention_mask", "timestep"),
            grid=Grid(rows="height", cols="width"),
            leaves=(
                Leaf("attn1", "linear_attention", processor="SanaLinearAttnProcessor2_0"),
                Leaf("ff.conv_depth", "conv_rows"),
            ),
        ),
    ),
    refused={"controlnet_block_samples": "ControlNet residuals are added between blocks to whole sequences"},
)
