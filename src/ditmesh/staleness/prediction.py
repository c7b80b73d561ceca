"""Keys that stand for those of the step in progress: of the step before, moved on by a share of their latest change.

After TaylorSeer (Liu et al. 2025, arXiv:2503.06923), which extrapolates what a cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SHARE = 0.5
# The step with a change that says nothing of the next one: the first that has one, in which noise turns into a picture.
FIRST = 1


def share_in(step: int, goes_on: bool) -> float:
    """The share of the latest change by which a stale step moves keys on; ``goes_on``: see `WarmupControl.goes_on`."""
    return SHARE if step - 1 > FIRST and goes_on else 0.0


def move_on(latest: Sequence[Tensor], before: Sequence[Tensor], share: float) -> None:
    """Remember the latest keys in ``before``, and move them on in place by a share of what they have changed since.

    The same operations on every rank, each rounded by itself, so that a prediction has the same bits on all ranks.
    """
    with torch.no_grad():
        for now, earlier in zip(latest, before, strict=True):
            if share:
                change = now - earlier
                earlier.copy_(now)
                now.add_(change.mul_(share))
            else:
                earlier.copy_(now)
