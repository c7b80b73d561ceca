"""Reproducible mode asks torch for nothing that has no deterministic kernel on a GPU: torch would refuse it there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ditmesh
from ditmesh.train import reduce_gradients
from support.gradients import fresh, loss_of
from support.models import MAKERS, RAGGED, inputs, run, tiny

# Operations behind what torch's documentation of `use_deterministic_algorithms` says will raise.
REFUSED = {
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
    *("max_unpool2d", "max_unpool3d", "nll_loss2d_forward", "_ctc_loss_backward", "_embedding_bag_dense_backward"),
    *(f"upsample_{mode}_backward" for mode in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"reflection_pad{dimensions}d_backward" for dimensions in (1, 2, 3)),
    *("put_", "histc", "bincount", "kthvalue", "median", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    *("cumsum", "cumsum_", "scatter_reduce", "scatter_reduce_", "resize_"),
}


class Asked(TorchDispatchMode):
    """Notes operations that have no deterministic kernel on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.counted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted += 1
        name = func._schema.name.rpartition("::")[2]
        # A sum over integers has one result in any order.
        if name in REFUSED and not (name.startswith("cumsum") and not args[0].is_floating_point()):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MAKERS)
def test_a_call(name):
    model = tiny(name)
    try:
        with ditmesh.parallelized(model, {"reproducible": True}), Asked() as asked:
            run(model, inputs(name, RAGGED))
    except ditmesh.ConfigError as refused:
        pytest.skip(str(refused))
    assert asked.counted > 100
    assert asked.found == set()


@pytest.mark.parametrize("name", ["SD3", "Wan", "DiT", "PixArt", "Flux"])
def test_a_training_step(name):
    model = copy.deepcopy(tiny(name))
    with ditmesh.parallelized(model, {"reproducible": True}), Asked() as asked:
        loss_of(model, fresh(name, RAGGED, torch.float32)).backward()
        reduce_gradients(model, ditmesh.engine_of(model).mesh)
    assert asked.found == set()


def test_one_is_found():
    x = torch.ones(2, 3, 8, 8, requires_grad=True)
    with Asked() as asked:
        torch.nn.functional.pad(x, (1, 1, 1, 1), mode="reflect").sum().backward()
        torch.ones(3).cumsum(0)
        torch.ones(3, dtype=torch.long).cumsum(0)
    assert asked.found == {"reflection_pad2d_backward", "cumsum"}
