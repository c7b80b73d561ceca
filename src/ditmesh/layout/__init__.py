"""Which tensors of a transformer hold which tokens: the data type, the reviewed table, the probe."""

from .table import known_models, layout_of
from .types import LOCAL, Attention, Cut, Region, Stream, TokenLayout, joint

__all__ = [
    "LOCAL",
    "Attention",
    "Cut",
    "Region",
    "Stream",
    "TokenLayout",
    "joint",
    "known_models",
    "layout_of",
]
