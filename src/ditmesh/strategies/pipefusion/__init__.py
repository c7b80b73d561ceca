"""PipeFusion: blocks over stages, patches of the picture through them."""
