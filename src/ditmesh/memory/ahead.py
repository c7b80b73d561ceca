"""Weights that are away while a rank denoises with ``precompute``, and the values that take their place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ..core.clock import TIMESTEPS
from ..layout.conventions import Size
from ..strategies.precomputed import bytes_ahead
from .cache import Needs, kept
from .sizes import Workload
from .walk import WithoutValues, by_any_call, manual_collection, model_on_meta


@kept
def computed_ahead(
    transformer: str, settings: Mapping[str, Any], tensor: int, workload: Workload, dtype: torch.dtype
) -> Needs:
    """Bytes of one of ``tensor`` ranks: `weights` of the modules whose values are computed ahead, `kept` for these.

    ``workload``: of a rank; values are kept for all of its steps. Raises as `denoise`.
    """
    model = model_on_meta(transformer, json.dumps(settings, default=str))
    batch, calls = workload.calls(workload.pictures, workload.branches)
    size = Size(workload.rows, workload.cols, workload.text, batch, workload.frames)

    def of_call(make: Any) -> Needs:
        inputs = make.inputs(size)
        times = [inputs[name] for name in inputs.keys() & TIMESTEPS if isinstance(inputs[name], torch.Tensor)]
        with WithoutValues():
            weights, values = bytes_ahead(model, inputs, times, workload.steps)
        return Needs(weights / tensor, 0.0, calls * values)

    with manual_collection():
        return by_any_call(model, dtype, of_call)
