"""`parallelize`, and the engine of transformers and their pipelines."""

from .api import agreed, configuration_for, follow, parallelize, parallelized
from .engine import Engine
from .simulation import simulate, simulated
from .targets import DENOISERS, ENGINE, ConfigLike, denoisers, engine_of, find_layout, restore

__all__ = [
    "DENOISERS",
    "ENGINE",
    "ConfigLike",
    "Engine",
    "agreed",
    "configuration_for",
    "denoisers",
    "engine_of",
    "find_layout",
    "follow",
    "parallelize",
    "parallelized",
    "restore",
    "simulate",
    "simulated",
]
