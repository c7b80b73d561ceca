"""The drift of keys and values from one step to the next, measured cheaply on every rank and summed over all."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.request import RequestValue

# Tokens of a rank that stand for all of them.
SAMPLED_TOKENS = 32


class _Latest(NamedTuple):
    """The sample of the latest step, and that of the step before it, where it is needed."""

    step: int
    sample: Tensor
    before: Tensor | None = None


@dataclass
class _Measured:
    """The measurements of one request: sums of the step in progress, and the latest sample of every key."""

    sums: Tensor | None = None
    samples: dict[Hashable, _Latest] = field(default_factory=dict)


class DriftMonitor:
    """Relative L2 distance of a sample of tensors from what stands for it in a stale step, per block.

    That is the same sample one step earlier, or a prediction made of the two steps before. ``reduce``: sums a float64
    tensor over all ranks, the same bits on each: `Link.all_reduce`.
    """

    def __init__(self, reduce: Callable[[Tensor], Tensor], device: torch.device | str = "cpu") -> None:
        self.reduce = reduce
        self.active = True
        self._device = torch.device(device)
        self.blocks: list[str] = []
        self._of = RequestValue(_Measured)

    def add_block(self, name: str) -> int:
        """Room for one more block; its number. Every rank adds the same blocks in the same order."""
        self.blocks.append(name)
        return len(self.blocks) - 1

    def reset(self) -> None:
        """A new request begins: nothing of the one before is compared with."""
        self._of.renew()

    def observe(
        self, block: int, key: Hashable, step: int, tensors: tuple[Tensor, ...], dim: int, share: float | None = None
    ) -> None:
        """Compare tensors of a step, such as a rank's K and V, with those of the same ``key`` in the step before.

        ``dim``: their token dimension; `SAMPLED_TOKENS` evenly spaced tokens are looked at. ``share``: where a stale
        step uses tensors moved on by a share of their latest change, that share, or 0: they are compared with those.
        """
        if not self.active:
            return
        stride = max(1, -(-tensors[0].shape[dim] // SAMPLED_TOKENS))
        picked = (*(slice(None),) * dim, slice(None, None, stride))
        sample = torch.stack([tensor.detach()[picked] for tensor in tensors]).float()
        samples = self._of.value.samples
        latest = samples.get(key)
        reference = latest if latest is not None and latest.step == step - 1 else None
        if reference is not None and reference.sample.shape == sample.shape:
            expected = reference.sample
            if share and reference.before is not None:
                expected = expected + share * (expected - reference.before)
            of = self._of.value
            if of.sums is None:
                of.sums = self._nothing()
            distance = (sample - expected).square().sum()
            of.sums[block] += torch.stack([distance, sample.square().sum()]).to(of.sums)
            samples[key] = _Latest(step, sample, None if share is None else reference.sample)
        else:
            samples[key] = _Latest(step, sample)

    def _nothing(self) -> Tensor:
        return torch.zeros(len(self.blocks), 2, dtype=torch.float64, device=self._device)

    def take(self) -> Tensor:
        """This rank's sums of the step that has run: squared distances and squares, float64 (blocks, 2)."""
        of = self._of.value
        sums, of.sums = of.sums, None
        return self._nothing() if sums is None else sums


def drifts_of(totals: Tensor) -> list[list[float | None]]:
    """Drift of every block in every step, from the sums of all ranks (steps, blocks, 2); None: nothing was compared.

    Waits for the device.
    """
    return [[(distance / size) ** 0.5 if size > 0 else None for distance, size in step] for step in totals.tolist()]
