"""Weights that are away while a rank denoises with ``precompute``, and the values that take their place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ..layout.conventions import Size
from ..layout.without_values import model_on_meta
from ..strategies.ahead import found_ahead_of, usually_ahead
from .cache import Needs, kept
from .sizes import Workload


@kept
def computed_ahead(
    transformer: str,
    settings: Mapping[str, Any],
    tensor: int,
    workload: Workload,
    dtype: torch.dtype,
    in_pieces: bool = False,
) -> Needs:
    """Bytes of one of ``tensor`` ranks: `weights` of the modules whose values are computed ahead, `kept` for these.

    Args:
        workload: of a rank; values are kept for all of its steps.
        in_pieces: ranks share the others in pieces, and modules that go ahead in this request alone are among these.

    Raises: as `denoise`.
    """
    model = model_on_meta(transformer, json.dumps(settings, default=str))
    batch, calls = workload.calls(workload.pictures, workload.branches)
    size = Size(workload.rows, workload.cols, workload.text, batch, workload.frames)
    ahead = found_ahead_of(model, size, workload.steps, dtype)
    most = usually_ahead(transformer, settings, dtype).weights if in_pieces else ahead.weights
    return Needs(min(ahead.weights, most) / tensor, 0.0, calls * ahead.values)
