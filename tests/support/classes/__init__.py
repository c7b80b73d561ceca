"""Tiny transformers of diffusers by class, and calls of them in the forms that their pipelines make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from support.models import stirred


@dataclass(frozen=True)
class Case:
    """How to make a tiny transformer, and the keyword arguments of its forward by form of call."""

    make: Callable[[], nn.Module]
    calls: dict[str, Callable[[], dict[str, Any]]]


def made(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A maker whose models have the same weights in every process, zero gates stirred."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return stirred(build().eval())

    return make


def noise(*shape: int, seed: int = 5) -> Tensor:
    """Random numbers, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def valid(lengths: Sequence[int], longest: int, left: bool = False) -> Tensor:
    """Which of ``longest`` tokens are real, for every sample; padding stands behind them, or before them."""
    places = torch.arange(longest).flip(0) if left else torch.arange(longest)
    return places[None] < torch.tensor(lengths)[:, None]
