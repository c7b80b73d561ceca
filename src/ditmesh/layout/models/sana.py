"""Sana (Xie et al. 2024, arXiv:2410.10629): linear attention, and a feed-forward with a depthwise convolution.

The only attention with a softmax is that of the image on the text. The convolution works on the image, so
the tokens are cut between rows.
"""

from ..types import LOCAL, Cut, Grid, Leaf, Region, TokenLayout

BLOCKS = Region(
    "transformer_blocks",
    attention=(LOCAL,),
    cuts=(Cut("attention_mask", 2),),
    whole=("encoder_hidden_states", "encoder_attention_mask", "timestep"),
    grid=Grid(rows="height", cols="width"),
    leaves=(
        Leaf("attn1", "linear_attention", processor="SanaLinearAttnProcessor2_0", args=(("hidden_states", 1),)),
        Leaf("ff.conv_depth", "conv_rows"),
    ),
)

LAYOUT = TokenLayout("SanaTransformer2DModel", (BLOCKS,), between=("controlnet_block_samples",))
