"""Token layouts: which tensors of a transformer hold which tokens; the data type, the reviewed table, the probe."""

from .models import known_models, known_tables, layout_of
from .types import (
    LOCAL,
    Attention,
    Count,
    Cut,
    Fold,
    Grid,
    Leaf,
    Region,
    Stream,
    Table,
    TokenLayout,
    image_and_text,
    joint,
    rotary,
)

__all__ = [
    "LOCAL",
    "Attention",
    "Count",
    "Cut",
    "Fold",
    "Grid",
    "Leaf",
    "Region",
    "Stream",
    "Table",
    "TokenLayout",
    "image_and_text",
    "joint",
    "known_models",
    "known_tables",
    "layout_of",
    "rotary",
]
