"""A rank without peers: links that send nothing; what they receive is memory of this rank, as over a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..comm import Link, Traffic, Transfer
from ..comm.grid import LINKS
from ..comm.mesh import Mesh
from ..comm.transports import Way
from ..config import ParallelConfig


class PhantomLink(Link):
    """A `Link` to absent ranks. Received tensors have shapes and no values.

    ``listen`` is told of each exchange: the link's name, its kind and the bytes that this rank sends. When it is
    ``over``, what is gathered is not looked at: weights that are put together behind the last step.
    """

    def __init__(
        self,
        name: str,
        size: int,
        rank: int,
        traffic: Traffic,
        listen: Callable[[str, str, int], None] | None = None,
    ) -> None:
        super().__init__(name, range(size), rank, traffic)
        self._listen = listen
        self.over = False

    @property
    def _way(self) -> Way:
        # Messages of gloo go pair by pair.
        return "tags"

    def all_gather(self, piece: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        if not self.over:
            return super().all_gather(piece, lengths, dim)
        return piece.new_empty((*piece.shape[:dim], sum(lengths), *piece.shape[dim + 1 :]))

    def _together(self, collective: Callable[..., Any], *tensors: Any) -> None:
        """Ranks that are not there have the same."""
        if self._listen is not None:
            sent = sum(each.nbytes for each in tensors if isinstance(each, Tensor))
            self._listen(self.name, collective.__name__, sent)

    def _start(
        self,
        kind: str,
        outgoing: Sequence[tuple[Sequence[Tensor], Sequence[int]]],
        incoming: Sequence[tuple[Sequence[Tensor], int]],
    ) -> Transfer:
        if self._listen is not None:
            self._listen(self.name, kind, sum(each.nbytes * len(to) for tensors, to in outgoing for each in tensors))
        sent = [tensor.contiguous() for tensors, _ in outgoing for tensor in tensors]
        return Transfer([tensor for tensors, _ in incoming for tensor in tensors], sent, link=self.name)


def phantom_mesh(config: ParallelConfig, listen: Callable[[str, str, int], None] | None = None) -> Mesh:
    """The mesh of one rank of a configuration, without the others: the first, which has no less than any other."""
    traffic = Traffic()
    sizes = {name: config.size_of(axes) for name, axes in LINKS.items()} | {"shard": config.shard}
    links = {name: PhantomLink(name, sizes[name], 0, traffic, listen) for name in LINKS}
    return Mesh(config, "cpu", links=links)
