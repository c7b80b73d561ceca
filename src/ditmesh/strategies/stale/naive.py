"""Naive patch parallelism: every rank attends to its own tokens only. The lossy baseline.

A picture of N patches that know nothing of one another after the warm-up. It shows what the exchange of stale keys
is worth, and is of no other use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from ...attention.mixer import AttentionCall
from ...config import ParallelConfig
from ...forecast.costs.step import Share, StepForecast, Term
from ...forecast.costs.work import Work, Workload
from ..sequence import ExactSequence, SequenceParallel, gather_stream
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
    lossy = True
    kind = NaiveParallel

    @classmethod
    def share(cls, config: ParallelConfig, work: Work, workload: Workload, share: Share, stale: bool) -> Share:
        share = super().share(config, work, workload, share, stale)
        return replace(share, keys=config.ring) if stale else share

    @classmethod
    def terms(cls, step: StepForecast) -> Iterator[Term]:
        """Nothing, but in synchronous steps what exact attention exchanges."""
        return gather_stream(step) if step.stale else ExactSequence.terms(step)
