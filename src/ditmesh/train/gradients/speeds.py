"""Relative speeds of data ranks, so that uneven devices finish a step together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from ...comm.mesh import Mesh

# Steps that a measured speed is the mean of.
RECENT = 8


class DataSpeeds:
    """Speeds of the data ranks relative to one another: given, or measured; the same numbers on every rank."""

    def __init__(self, given: Literal["auto"] | Sequence[float] | None, mesh: Mesh) -> None:
        self._mesh, self._measures = mesh, given == "auto" and mesh.data.size > 1
        self.values = [1.0] * mesh.data.size if given is None or given == "auto" else list(given)
        # Cost and seconds of forwards, of this rank in this step and of all data ranks in the last ones.
        self._own = [0.0, 0.0]
        self._recent = [deque[tuple[float, float]](maxlen=RECENT) for _ in self.values]

    @contextmanager
    def measured(self, cost: float) -> Iterator[None]:
        """Around a forward, in which data ranks do not wait for one another; a backward may hold their exchange."""
        if not self._measures:
            yield
            return
        began = self._now()
        yield
        self._own[0] += cost
        self._own[1] += self._now() - began

    def _now(self) -> float:
        if self._mesh.device.type != "cpu":
            torch.accelerator.synchronize(self._mesh.device)
        return time.perf_counter()

    def agree(self) -> None:
        """Update the speeds after a step. Collective, if speeds are measured."""
        if not self._measures:
            return
        everyone = self._mesh.world.all_gather_object((self._mesh.data.rank, *self._own))
        self._own = [0.0, 0.0]
        for rank, recent in enumerate(self._recent):
            # Ranks that share a sequence wait for the slowest of them.
            recent.append(max((one[1:] for one in everyone if one[0] == rank), key=lambda measure: measure[1]))
        self.values = [sum(cost for cost, _ in r) / max(sum(took for _, took in r), 1e-9) for r in self._recent]
