"""Weights that are away while a rank denoises with ``precompute``, and the values that take their place."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..core.clock import TIMESTEPS
from ..errors import DitmeshError
from ..layout.conventions import Size
from ..strategies.precomputed import Ahead, found_ahead
from .cache import Needs, kept
from .sizes import Workload
from .walk import WithoutValues, by_any_call, manual_collection, model_on_meta

log = logging.getLogger(__name__)

# A request by which weights are left in host memory before any is known: 1024 x 1024 pixels, guidance, 50 steps.
USUAL = Workload(64, 64, text=512, branches=2, steps=50)


@kept
def computed_ahead(
    transformer: str, settings: Mapping[str, Any], tensor: int, workload: Workload, dtype: torch.dtype
) -> Needs:
    """Bytes of one of ``tensor`` ranks: `weights` of the modules whose values are computed ahead, `kept` for these.

    ``workload``: of a rank; values are kept for all of its steps. Raises as `denoise`.
    """
    ahead = found_ahead_of(transformer, settings, workload, dtype)
    calls = workload.calls(workload.pictures, workload.branches)[1]
    return Needs(ahead.weights / tensor, 0.0, calls * ahead.values)


def modules_ahead(transformer: str, settings: Mapping[str, Any], dtype: torch.dtype) -> tuple[str, ...]:
    """Paths of the modules of a transformer that go ahead in an ordinary request; none where that is not known."""
    side, patch = settings.get("sample_size"), settings.get("patch_size")
    # Tables of positions end there.
    cells = side // patch if isinstance(side, int) and isinstance(patch, int) else USUAL.rows
    try:
        return found_ahead_of(transformer, settings, replace(USUAL, rows=cells, cols=cells), dtype).modules
    except DitmeshError as error:
        log.debug("all weights of %s go to the device: %s", transformer, error)
        return ()


def found_ahead_of(transformer: str, settings: Mapping[str, Any], workload: Workload, dtype: torch.dtype) -> Ahead:
    """What `found_ahead` finds in a call of a transformer with these sizes."""
    model = model_on_meta(transformer, json.dumps(settings, default=str))
    batch = workload.calls(workload.pictures, workload.branches)[0]
    size = Size(workload.rows, workload.cols, workload.text, batch, workload.frames)

    def of_call(make: Any) -> Ahead:
        inputs = make.inputs(size)
        times = [inputs[name] for name in inputs.keys() & TIMESTEPS if isinstance(inputs[name], torch.Tensor)]
        with WithoutValues():
            return found_ahead(model, inputs, times, workload.steps)

    with manual_collection():
        return by_any_call(model, dtype, of_call)
