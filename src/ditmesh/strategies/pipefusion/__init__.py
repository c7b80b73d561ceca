"""PipeFusion: blocks on stages, and patches of the image that pass through them."""
