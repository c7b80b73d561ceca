"""Gradients of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..comm.mesh import Mesh


class GradientSync:
    """What makes the gradients of ranks one.

    Args:
        model: what is trained.
        mesh: the ranks.
        sharding: as in `TrainConfig`.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, sharding: str) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        yield

    def reduce(self) -> None: ...

    def clip(self, most: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, most or float("inf")))

    def close(self) -> None: ...
