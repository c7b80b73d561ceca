"""The interface of a group of ranks for strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Ranks that hold parts of the same tensors: processes (`ditmesh.comm.Link`), virtual ranks, patches."""

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_gather(self, piece: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        """All ranks' pieces along ``dim``, in rank order, on every rank; see `ditmesh.comm.Link.all_gather`."""
        ...
