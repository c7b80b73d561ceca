"""Weighted splits: a faster rank gets more tokens, and the result stays the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.strategies.balance import Balance
from support.clocks import SimulatedClock, measured_by
from support.models import RAGGED, inputs, relative_error, run, tiny
from support.parity import parity
from support.sample import sampled

TOLERANCE = 1e-5  # relative, float32


@pytest.mark.parametrize(
    ("model", "config"),
    sampled(
        ["DiT", "PixArt", "SD3", "Flux", "Sana", "Latte"],
        [
            {"ulysses": 2, "speeds": (2, 1)},
            {"ring": 3, "speeds": (1, 5, 2)},
            {"ulysses": 3, "speeds": (4, 1, 1)},
            {"ulysses": 2, "ring": 2, "speeds": (1, 2, 3, 4)},
        ],
        of=8,
    ),
    ids=str,
)
def test_equals_one_device(ranks, model, config):
    """Latte and Sana as well: a cut between rows, folded streams."""
    world = config.get("ulysses", 1) * config.get("ring", 1)
    for result in ranks(world).run(parity, model, config, RAGGED):
        assert result["error"] <= TOLERANCE
        assert result["repeats"]


def slow_rank_one(config: dict[str, Any]) -> dict[str, Any]:
    """A delay in the first block makes rank 1 slow; speeds before and after."""
    model, made = tiny("Flux"), inputs("Flux", RAGGED)
    truth = run(model, made)

    clock = SimulatedClock()
    blocks = model.transformer_blocks
    handles = [block.norm1.register_forward_pre_hook(lambda *_: clock.sleep(0.02)) for block in blocks]
    inner = blocks[0].norm1.register_forward_pre_hook(lambda *_: clock.sleep(0.06 if dist.get_rank() == 1 else 0.0))
    found: dict[str, Any] = {}
    try:
        with measured_by(clock), ditmesh.parallelized(model, config):
            balance = ditmesh.engine_of(model).balances[0]
            found["before"] = balance.speeds
            run(model, made)
            found["measured"] = balance.speeds
            found["error"] = relative_error(run(model, made), truth)
            found["kept"] = balance.speeds
    finally:
        for handle in handles:
            handle.remove()
        inner.remove()
    return found


def test_speeds_are_measured(ranks):
    """The slow rank gets less; all ranks agree."""
    first, second = ranks(2).run(slow_rank_one, {"ring": 2, "speeds": "auto"})
    assert first == second
    assert first["before"] == (1.0, 1.0)
    assert first["measured"][0] > 2 * first["measured"][1]
    assert first["kept"] == first["measured"]
    assert first["error"] <= TOLERANCE


@pytest.mark.parametrize("shares", [[0, 1, 2], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]])
def test_a_share_of_several_ranks_is_as_fast_as_its_slowest(shares):
    """Stages and tensor groups: by the times of all ranks, in any order."""
    seconds = [1.0, 4.0, 2.0, 8.0][: len(shares)]
    told = torch.tensor([[share, 1 / took] for share, took in zip(shares, seconds, strict=True)])
    slowest = [
        max(took for share, took in zip(shares, seconds, strict=True) if share == n) for n in sorted(set(shares))
    ]
    expected = [1 / took / sum(1 / other for other in slowest) for took in slowest]
    for rank, took in enumerate(seconds):
        link: Any = SimpleNamespace(size=len(shares), rank=rank, all_gather=lambda *_, **__: told.double())
        balance = Balance("auto", link, "cpu", len(slowest), shares[rank])
        balance.agree(took)
        assert balance.speeds == pytest.approx(expected, abs=0.006)


def unlike_slices(config: dict[str, Any]) -> dict[str, Any]:
    """Every rank measures a time of its own, those with slices of the same weights too."""

    def seconds(work: Callable[[], Any], device: Any) -> float:
        work()
        return 1.0 + dist.get_rank()

    model, made = tiny("Flux"), inputs("Flux", RAGGED)
    truth = run(model, made)
    with mock.patch("ditmesh.strategies.balance.median_seconds", seconds), ditmesh.parallelized(model, config):
        run(model, made)
        error = relative_error(run(model, made), truth)
        return {"speeds": ditmesh.engine_of(model).balances[0].speeds, "error": error}


def test_slices_of_the_same_weights_have_the_same_tokens(ranks):
    """Tensor ranks add up what they compute for the same tokens, so they have to agree on the cut."""
    found = ranks(4).run(unlike_slices, {"ring": 2, "tensor": 2, "speeds": "auto"})
    assert {one["speeds"] for one in found} == {(0.67, 0.33)}
    assert all(one["error"] <= TOLERANCE for one in found)
