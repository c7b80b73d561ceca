"""Once a request runs, the host never waits for the device: no strategy reads a tensor in its steady state."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ditmesh
from support.pipelines import MAKERS, arguments
from support.syncs import count_syncs

STEPS, STEADY = 6, 3
STALE = {"warmup": "fixed(1)"}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "ulysses": (2, {"ulysses": 2}),
    "ring": (2, {"ring": 2}),
    "tensor": (2, {"tensor": 2}),
    "cfg": (2, {"cfg": 2}),
    "data": (2, {"data": 2}),
    "displaced": (2, {"ring": 2, "exchange": "displaced", **STALE}),
    "displaced, int8": (2, {"ring": 2, "exchange": "displaced", "compress": "int8", **STALE}),
    "displaced, adaptive": (2, {"ring": 2, "exchange": "displaced", "warmup": "adaptive(0.05)"}),
    "displaced, cfg": (4, {"ring": 2, "cfg": 2, "exchange": "displaced", **STALE}),
    "naive": (2, {"ring": 2, "exchange": "naive", **STALE}),
    "pipe": (2, {"pipe": 2, **STALE}),
    "patches": (1, {"patches": 2, **STALE}),
    "reproducible, 1 rank": (1, {"reproducible": True}),
    "reproducible, 2 ranks": (2, {"ulysses": 2, "reproducible": True}),
}
MORE = ("data", "naive", "patches", "displaced, int8", "displaced, adaptive", "displaced, cfg", "reproducible, 1 rank")
# The adaptive warm-up decides by the drift of the step before.
ALLOWED = {"displaced, adaptive": 1}


def steady(family: str, config: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """The most host synchronisations of ditmesh in a step of the steady state, and where they come from."""
    pipe = MAKERS[family]()
    pipe.set_progress_bar_config(disable=True)
    # Over the process group, as between accelerators.
    with ditmesh.parallelized(pipe, {**config, "shared_memory": False}), torch.no_grad(), count_syncs() as syncs:

        def step_is_over(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            syncs.mark()
            return tensors

        pipe(**arguments(family, [1, 2], steps=STEPS), callback_on_step_end=step_is_over)
    return syncs.per_step(first=STEADY), syncs.places(first=STEADY)


@pytest.mark.parametrize(
    ("mode", "family"),
    [
        # Each mode always with one of the families, in turn; but for modes that have a setting more than another one.
        pytest.param(mode, family, marks=() if row % len(MAKERS) == column and mode not in MORE else pytest.mark.matrix)
        for row, mode in enumerate(MODES)
        for column, family in enumerate(MAKERS)
    ],
)
def test_none_in_the_steady_state(ranks, mode, family):
    world, config = MODES[mode]
    for count, places in ranks(world).run(steady, family, config):
        assert count <= ALLOWED.get(mode, 0), places


def test_the_counter_sees_what_waits():
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, True])
    waiting: list[Callable[[], Any]] = [
        lambda: x[0].item(),
        lambda: bool(x[0]),
        lambda: float(x.sum()),
        lambda: x.tolist(),
        lambda: x.numpy(),
        lambda: x.cpu(),
        lambda: x.to("cpu"),
        lambda: np.asarray(x),
        lambda: torch.equal(x, x),
        lambda: x[mask],
        lambda: mask.nonzero(),
        lambda: torch.where(mask),
        lambda: x.unique(),
        lambda: x.masked_select(mask),
        lambda: x.repeat_interleave(torch.tensor([1, 0, 2, 1])),
        lambda: torch.tensor([1.0], device=x.device),
        lambda: torch.allclose(x, x),
    ]
    for call in waiting:
        with count_syncs() as syncs:
            call()
        assert [one.owner for one in syncs.found] == ["other"], inspect.getsource(call)
        assert syncs.found[0].place.startswith("test_host_syncs.py:")
    with count_syncs() as syncs:
        torch.where(mask, x, 0.0).to(x.device).masked_fill(mask, 1.0)[torch.tensor([2, 0])].to(torch.float16).sum()
        x.repeat_interleave(torch.tensor([1, 0, 2, 1]), output_size=4)
    assert syncs.found == []
    inside = compile("def read(x): return x.tolist()", str(Path(ditmesh.__file__).parent / "made_up.py"), "exec")
    names: dict[str, Any] = {}
    exec(inside, names)
    with count_syncs() as syncs:
        syncs.mark()
        names["read"](x)
    (one,) = syncs.found
    assert (one.owner, one.operation, one.step) == ("ditmesh", "tolist", 1)
    assert one.place == "made_up.py:1" == one.stack[0]
