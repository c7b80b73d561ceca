"""Which tensors of a transformer hold which tokens: the data type, the reviewed table, the probe."""

from .table import known_models, layout_of
from .types import LOCAL, Attention, Count, Cut, Grid, Leaf, Region, Stream, TokenLayout, joint

__all__ = [
    "LOCAL",
    "Attention",
    "Count",
    "Cut",
    "Grid",
    "Leaf",
    "Region",
    "Stream",
    "TokenLayout",
    "joint",
    "known_models",
    "layout_of",
]
