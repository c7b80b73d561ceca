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
NAMES = ("SD3", "Flux", "Wan")
DISPLACED = {"exchange": "displaced", "warmup": "fixed(1)"}
# What is foreseen of the kernels that are launched, those of exchanges among them.
WITHIN = 0.05
CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("SD3", {}, True),
    ("Wan", {}, False),
    ("Flux", {}, False),
    *(
        (name, {axis: degree}, (name, axis, degree) in (("SD3", "ring", 4), ("Flux", "ulysses", 8)))
        for name in NAMES
        for axis in ("ulysses", "ring")
        for degree in (2, 4, 8)
    ),
    # Wan's norms are over the features of all ranks.
    *((name, {"tensor": degree}, (name, degree) in (("Flux", 4), ("Wan", 2))) for name in NAMES for degree in (2, 4)),
    *((name, {"tensor": 8}, False) for name in ("SD3", "Flux")),
    *(
        (name, {"ulysses": degree, "shard": degree}, (name, degree) == ("Wan", 2))
        for name in NAMES
        for degree in (2, 4)
    ),
    *((name, {"ulysses": 2, "ring": 2}, False) for name in NAMES),
    *((name, {"ring": degree, **DISPLACED}, (name, degree) == ("Wan", 2)) for name in NAMES for degree in (2, 4)),
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
    # One second each; the device's own seconds hide some.
    counting = device("h100").model_copy(update={"launch": 1.0})
    made = ParallelConfig(**config)
    found = predict(made, work(name), JOB, Hardware(device=counting, link=link("nvlink4"), devices=made.world_size))
    return sum(term.seconds + term.hidden for term in found.stale if term.kind == "launch"), found


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
    assert found.launches == pytest.approx(kernels, rel=WITHIN)
    # Sums over ranks that share weights are of every token, whatever the model adds for them.
    assert found.sent == pytest.approx(sum(term.sent for term in prediction.stale), rel=0.01)


# Of tiny models, whose few operations outside of blocks and tiles count for more: 1.05 to 1.10 times as many.
TILED = [
    ("SD3", {"ring": 2, "tiles": 2}, True),
    ("SD3", {"ring": 2, "tiles": 4}, False),
    ("Flux", {"ulysses": 2, "tiles": 2}, False),
    ("Flux", {"ring": 2, "tiles": 2}, False),
    ("Wan", {"ring": 2, "tiles": 2}, False),
]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(name, {**config, "reproducible": True}, marks=() if always else pytest.mark.matrix)
        for name, config, always in TILED
    ],
    ids=str,
)
def test_launches_of_reproducible_tiles_are_foreseen(name, config):
    """A kernel for each tile: what bounds this mode on a GPU. Messages are foreseen to the byte."""
    kernels, prediction = foreseen(name, config)
    found = alone(name, config, 0, EVEN, masks=False)
    assert kernels <= found.launches <= 1.12 * kernels
    assert found.sent == sum(term.sent for term in prediction.stale)
