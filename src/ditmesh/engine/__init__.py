"""`parallelize`, and the engine of transformers and their pipelines."""

from ..strategies.heads import check_heads, heads_of
from .engine import (
    DENOISERS,
    ENGINE,
    ConfigLike,
    Engine,
    agreed,
    configuration_for,
    controls,
    denoisers,
    engine_of,
    find_layout,
    parallelize,
    parallelized,
    restore,
    simulate,
    simulated,
)

__all__ = [
    "DENOISERS",
    "ENGINE",
    "ConfigLike",
    "Engine",
    "agreed",
    "check_heads",
    "configuration_for",
    "controls",
    "denoisers",
    "engine_of",
    "find_layout",
    "heads_of",
    "parallelize",
    "parallelized",
    "restore",
    "simulate",
    "simulated",
]
