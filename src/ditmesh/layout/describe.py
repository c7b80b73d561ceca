"""A transformer class as `ditmesh layout` shows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import InputError
from .models import known_models
from .probe import probe
from .types import TokenLayout

# Config entries that say how many blocks a list has; a probe needs two.
DEPTHS = ("num_layers", "num_single_layers", "num_refiner_layers", "num_attention_blocks", "depth", "n_layers")


def model_class(name: str) -> type[Any]:
    """The diffusers class of that name.

    Raises:
        InputError: the installed diffusers has no such transformer.
    """
    import diffusers

    cls = getattr(diffusers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise InputError(f"diffusers {diffusers.__version__} has no model class {name!r}; upgrade diffusers")
    return cls


def meta_model(name: str, config: dict[str, Any]) -> nn.Module:
    """The model without storage for its weights: parameters can be counted, nothing can run."""
    with torch.device("meta"):
        return model_class(name).from_config(config)


def layout_of_class(name: str, config: dict[str, Any]) -> TokenLayout:
    """The reviewed layout, or one that a probe of the class derives: two blocks per list, with random weights.

    Raises:
        LayoutError: the probe failed.
    """
    if (reviewed := known_models().get(name)) is not None:
        return reviewed
    short = {key: min(value, 2) if key in DEPTHS and isinstance(value, int) else value for key, value in config.items()}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return probe(model_class(name).from_config(short))
