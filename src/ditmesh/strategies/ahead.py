"""Modules of a transformer that go ahead, as they are known before any call: of a run of its class without values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..core.alive import manual_collection
from ..core.clock import TIMESTEPS
from ..errors import InputError, LayoutError
from ..layout.conventions import Conventions, Size
from ..layout.probe import meta_model
from ..layout.without_values import WithoutValues, by_any_call
from .precomputed import Ahead, found_ahead

# A request by which weights are placed before any is known: 1024 x 1024 pixels, guidance, 50 steps.
CELLS, TEXT, BRANCHES, STEPS = 64, 512, 2, 50
NOTHING = Ahead((), 0.0, 0.0)


def found_ahead_of(model: nn.Module, size: Size, steps: int, dtype: torch.dtype) -> Ahead:
    """What `found_ahead` finds in a call with these sizes of a transformer on the meta device.

    `LayoutError`: the transformer cannot run without values.
    """

    def of_call(make: Conventions) -> Ahead:
        inputs = make.inputs(size)
        times = [inputs[name] for name in inputs.keys() & TIMESTEPS if isinstance(inputs[name], Tensor)]
        with WithoutValues():
            return found_ahead(model, inputs, times, steps)

    with manual_collection():
        return by_any_call(model, dtype, of_call)


def usually_ahead(transformer: str, settings: Mapping[str, Any], dtype: torch.dtype) -> Ahead:
    """What goes ahead in an ordinary request of a transformer; nothing where that is not known."""
    return _usually_ahead(transformer, json.dumps(settings, default=str), dtype)


@lru_cache(maxsize=8)
def _usually_ahead(transformer: str, settings: str, dtype: torch.dtype) -> Ahead:
    config = json.loads(settings)
    # A walk may be on its way, with weights of its own in a model that it shares.
    with _disable_current_modes(), suppress(InputError):
        return ahead_in(meta_model(transformer, config), config, dtype)
    return NOTHING


def ahead_in(model: nn.Module, settings: Mapping[str, Any], dtype: torch.dtype) -> Ahead:
    """`usually_ahead` of a transformer that is on the meta device."""
    side, patch = settings.get("sample_size"), settings.get("patch_size")
    # Tables of positions end there.
    cells = side // patch if isinstance(side, int) and isinstance(patch, int) else CELLS
    with suppress(LayoutError):
        return found_ahead_of(model.eval(), Size(cells, cells, TEXT, BRANCHES), STEPS, dtype)
    return NOTHING


def modules_ahead(model: nn.Module) -> tuple[str, ...]:
    """Paths of the modules of a transformer that go ahead in an ordinary request; none where that is not known."""
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    return usually_ahead(type(model).__name__, dict(getattr(model, "config", {})), dtype).modules
