"""Launches and bytes of a step, counted on fake CUDA devices, beside what the cost model foresees."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from ditmesh.config import ParallelConfig
from ditmesh.forecast.costs.hardware import Hardware, device, link
from ditmesh.forecast.costs.work import Work, Workload
from ditmesh.forecast.model_work import work_of
from ditmesh.forecast.prediction import Prediction, predict
from ditmesh.layout import layout_of
from ditmesh.layout.conventions import Size
from nccl_rules.fake_cuda import unavailable
from support.models import MAKERS
from support.on_fake_cuda import alone

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

EVEN = Size(rows=8, cols=8, text=32, batch=1)
JOB = Workload.of_tokens(64, 32, steps=10, element=4)
# Attention calls over all ranks' tokens, and blocks.
CALLS = {"SD3": (4, 3), "Flux": (4, 4), "Wan": (2, 2)}
# Kernels that the cost model does not foresee, at most: of every attention call, by degree. A hop of the ring merges
# two results by five kernels, after padding heads of a width that kernels do not take; what is traded with Ulysses
# ranks is put together and taken apart.
UNFORESEEN = {"ulysses": {2: 16, 4: 32, 8: 64}, "ring": {2: 10, 4: 28, 8: 64}}
CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("SD3", {}, True),
    ("Wan", {}, False),
    ("Flux", {}, False),
    *(
        (name, {axis: degree}, (name, axis, degree) in (("SD3", "ring", 4), ("Flux", "ulysses", 8)))
        for name in CALLS
        for axis in ("ulysses", "ring")
        for degree in (2, 4, 8)
    ),
    ("SD3", {"tensor": 2}, False),
    ("Flux", {"tensor": 4}, True),
]


@cache
def work(name: str) -> Work:
    with torch.device("meta"):
        model = MAKERS[name]()
    layout = layout_of(model)
    assert layout is not None
    return work_of(model, layout)


def foreseen(name: str, config: dict[str, Any]) -> tuple[float, Prediction]:
    """Kernels of a step, and the whole prediction."""
    # Launches alone take time, one second each.
    counting = device("h100").model_copy(update={"launch": 1.0, "ahead": False})
    made = ParallelConfig(**config)
    found = predict(made, work(name), JOB, Hardware(device=counting, link=link("nvlink4"), devices=made.world_size))
    return sum(term.seconds for term in found.stale if term.kind == "launch"), found


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(
            name, config, id=f"{name}-{ParallelConfig(**config).describe()}", marks=() if always else pytest.mark.matrix
        )
        for name, config, always in CASES
    ],
)
def test_launches_and_bytes_are_those_foreseen(name, config):
    kernels, prediction = foreseen(name, config)
    found = alone(name, config, 0, EVEN, masks=False)
    calls, blocks = CALLS[name]
    more = {"tensor": 7 * blocks}
    more |= {axis: calls * UNFORESEEN[axis][degree] for axis, degree in config.items() if axis in UNFORESEEN}
    assert 0.92 * kernels <= found.launches <= kernels + sum(more.get(axis, 0) for axis in config)
    # Sums over ranks that share weights are of every token, whatever the model adds for them.
    assert found.sent == pytest.approx(sum(term.sent for term in prediction.stale), rel=0.01)
