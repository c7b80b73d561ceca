"""Reproducible mode asks torch for nothing that has no deterministic kernel on a GPU: torch would refuse it there."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ditmesh
from ditmesh.train import reduce_gradients
from support.gradients import fresh, loss_of
from support.models import MAKERS, RAGGED, inputs, run, tiny

# What torch's documentation of `use_deterministic_algorithms` says will raise, and the operations behind it.
REFUSED: dict[str, tuple[str, ...]] = {
    "AvgPool3d": ("avg_pool3d_backward",),
    "AdaptiveAvgPool2d": ("_adaptive_avg_pool2d_backward",),
    "AdaptiveAvgPool3d": ("_adaptive_avg_pool3d_backward",),
    "AdaptiveMaxPool2d": ("adaptive_max_pool2d_backward",),
    "FractionalMaxPool2d": ("fractional_max_pool2d_backward",),
    "FractionalMaxPool3d": ("fractional_max_pool3d_backward",),
    "MaxUnpool1d": ("max_unpool2d",),
    "MaxUnpool2d": ("max_unpool2d",),
    "MaxUnpool3d": ("max_unpool3d",),
    "interpolate": tuple(
        f"upsample_{mode}_backward" for mode in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    ),
    "ReflectionPad1d": ("reflection_pad1d_backward",),
    "ReflectionPad2d": ("reflection_pad2d_backward",),
    "ReflectionPad3d": ("reflection_pad3d_backward",),
    "NLLLoss": ("nll_loss2d_forward",),
    "CTCLoss": ("_ctc_loss_backward",),
    "EmbeddingBag": ("_embedding_bag_dense_backward",),
    "put_": ("put_",),
    "histc": ("histc",),
    "bincount": ("bincount",),
    "kthvalue": ("kthvalue",),
    "median": ("median",),
    "grid_sample": ("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    "cumsum": ("cumsum", "cumsum_"),
    "scatter_reduce": ("scatter_reduce", "scatter_reduce_"),
    "resize_": ("resize_",),
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
        if any(name in names for names in REFUSED.values()) and _refused(name, args):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def _refused(name: str, args: Any) -> bool:
    """Whether it is for these arguments: a sum over integers has one result in any order."""
    given = next((one for one in args if isinstance(one, Tensor)), None)
    return not name.startswith("cumsum") or given is None or given.is_floating_point()


def test_the_list_is_torchs():
    text = torch.use_deterministic_algorithms.__doc__
    assert text is not None
    refused = text.rpartition("will throw a\n    :class:`RuntimeError`")[2].partition("In addition")[0]
    listed = re.findall(r"\* :(?:class|func):`(?:\w+\.)*(\w+)`", refused)
    assert len(listed) > 15
    assert set(listed) <= REFUSED.keys()


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
