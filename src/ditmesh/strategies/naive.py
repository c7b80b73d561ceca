"""Naive patch parallelism: every rank attends to its own tokens only. The lossy baseline.

A picture of N patches that know nothing of one another after the warm-up. It shows what the exchange of stale keys
is worth, and is of no other use.
"""

from __future__ import annotations

from torch import Tensor

from ..attention.segments import Segment
from .displaced import Key, StaleSequence
from .sequence import SequenceParallel


class NaiveParallel(StaleSequence):
    """Handler of one transformer: exact in synchronous steps, own tokens only in all others."""

    def mix_stale(
        self,
        key: Key,
        q_bhsd: Tensor,
        k_bhsd: Tensor,
        v_bhsd: Tensor,
        queries: list[Segment],
        keys: list[Segment],
        mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """See `StaleSequence.mix_stale`."""
        if self.control.decision.synchronous:
            return SequenceParallel.mix(self, q_bhsd, k_bhsd, v_bhsd, queries, keys, mask, scale)
        return self.own_tokens(q_bhsd, k_bhsd, v_bhsd, queries, keys, mask, scale)
