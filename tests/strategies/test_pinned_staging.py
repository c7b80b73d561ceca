"""Weights of a freed text encoder on their way to a GPU: through two pieces of pinned memory, each used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ditmesh.strategies import text_encoders
from ditmesh.strategies.text_encoders import PinnedStaging
from support.syncs import count_syncs


class OnGpu:
    """A target of copies that says it is on a GPU, and takes what it is given when the copy arrives."""

    device = torch.device("cuda", 0)

    def __init__(self, shape: torch.Size) -> None:
        self.value, self.source = torch.zeros(shape), torch.zeros(0)

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.source = source

    def arrive(self) -> None:
        self.value.copy_(self.source)


def test_no_memory_is_written_again_before_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[OnGpu] = []
    made: list[int] = []

    class Event:
        waiting: OnGpu | None = None

        def record(self) -> None:
            self.waiting = under_way[-1]

        def synchronize(self) -> None:
            if self.waiting is not None:
                self.waiting.arrive()

    empty = torch.empty

    def pinned(size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        made.append(size)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(text_encoders.torch, "empty", pinned)
    values = [torch.arange(float(count)).reshape(-1, 1) + 100 * count for count in (5, 3, 7, 1, 7)]
    staging: Any = PinnedStaging(7 * 4)
    for value in values:
        under_way.append(OnGpu(value.shape))
        staging.copy(under_way[-1], value)
    for target in under_way[-2:]:
        target.arrive()
    assert all(torch.equal(target.value, value) for target, value in zip(under_way, values, strict=True))
    assert made == [28, 28]


def test_sums_of_all_weights_are_one_look() -> None:
    weights = [torch.randn(count) for count in (3, 1, 8)] + [torch.randn(3).bfloat16()]
    with count_syncs() as syncs:
        found = text_encoders._sums(weights)
    assert [one.operation for one in syncs.found] == ["tolist"]
    assert len({total for _, total in found.values()}) == len(weights)
    before = dict(found)
    weights[2][0] += 1
    after = text_encoders._sums(weights)
    assert [after[one] != before[one] for one in weights] == [False, False, True, False]
