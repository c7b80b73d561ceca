"""Exact attention over gathered keys: queries stay, keys and values of all ring ranks come to each rank.

As many bytes travel as round the ring, but before attention and not beside it. In return any kernel computes it (none
has to return its log-sum-exp), over keys in the order of one device; with grouped queries only the heads of the keys
travel; and no number of heads limits the ranks. Llama 3 trains so (arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from ..config import ParallelConfig
from .sequence import ExactSequence, SequenceParallel


class GatherParallel(SequenceParallel):
    """Handler of one transformer: keys are gathered over the ring axis; with Ulysses, those of a rank's heads."""

    travels = False

    @property
    def takes_key_heads(self) -> bool:
        """True where heads are not traded, so that keys can travel with the few heads that they have."""
        return self.mesh.ulysses.size == 1


class GatheredSequence(ExactSequence):
    """Gathered keys on the ring axis, with or without Ulysses."""

    kind = GatherParallel
    name = "gathered keys"
    key, key_of_axis = "gather", "ring"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.exchange == "gather"
