"""Naive patch parallelism: every rank attends to its own tokens only. The lossy baseline.

A picture of N patches that know nothing of one another after the warm-up. It shows what the exchange of stale keys
is worth, and is of no other use.
"""

from __future__ import annotations

from torch import Tensor

from ...attention.mixer import AttentionCall
from ..sequence import SequenceParallel
from .displaced import Key, StaleSequence, StaleStrategy


class NaiveParallel(StaleSequence):
    """Handler of one transformer: exact in synchronous steps, own tokens only in all others."""

    def attend_stale(self, key: Key, attention: AttentionCall) -> Tensor:
        if self.control.decision.synchronous:
            return SequenceParallel.attend_distributed(self, attention)
        return self.own_tokens(attention)


class Naive(StaleStrategy):
    """No exchange after the warm-up."""

    name = key = "naive"
    kind = NaiveParallel
