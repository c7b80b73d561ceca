"""`parallelize`, and the engine of transformers and their pipelines."""

from ..requirements import check_versions

# diffusers imports peft where it is installed, and with an old one of its models cannot be imported.
check_versions("lora")

from .api import parallelize, parallelized  # noqa: E402
from .auto import agreed, configuration_for, guided, refusal  # noqa: E402
from .engine import Engine  # noqa: E402
from .targets import DENOISERS, ENGINE, ConfigLike, denoisers, engine_of, find_layout, restore  # noqa: E402

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
    "guided",
    "parallelize",
    "parallelized",
    "refusal",
    "restore",
]
