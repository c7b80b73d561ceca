"""Which tensors of a transformer hold which tokens: the data type, the reviewed table, the probe."""

from .table import known_models, known_tables, layout_of
from .types import LOCAL, Attention, Count, Cut, Grid, Leaf, Region, Stream, Table, TokenLayout, joint

__all__ = [
    "LOCAL",
    "Attention",
    "Count",
    "Cut",
    "Grid",
    "Leaf",
    "Region",
    "Stream",
    "Table",
    "TokenLayout",
    "joint",
    "known_models",
    "known_tables",
    "layout_of",
]
