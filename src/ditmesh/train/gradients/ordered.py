"""Gradients of a step, summed in an order that does not depend on the ranks.

Addends are tiles within a call, calls within a micro-batch, micro-batches within a step: each along the tree of
`ditmesh.core.ordered`. A rank of a sequence keeps the sums of its share of all elements; the shares are put together
when the step is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ...comm.mesh import Mesh
from ...core.ordered import OrderedSum, nodes_of
from ...core.partition import Partition, even_cut
from ...engine import engine_of
from ...strategies.hooks import ModelHooks
from ...strategies.tiled_gradients import WeightGradients, summed


class OrderedGradients:
    """The gradients of one optimizer step.

    Args:
        tiles: what tiles have added, of every transformer.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], tiles: Sequence[WeightGradients], mesh: Mesh) -> None:
        self._parameters, self._tiles, self._mesh = list(parameters), tiles, mesh
        self._sums: dict[torch.dtype, OrderedSum] = {}
        self._used: set[int] = set()

    def take(self, number: int = 0, count: int = 1) -> None:
        """Add the gradients of a backward pass to the step's sum. Collective over the sequence ranks.

        Args:
            number: of the micro-batch within the step.
            count: micro-batches of the step, over all data ranks.
        """
        calls = [call for one in self._tiles for call in one.take()]
        for dtype, parameters in self._by_dtype().items():
            total = self._share(_flat(parameters, [p.grad for p in parameters]))
            for runs, sums in calls:
                total = total + self._of_tiles(parameters, runs, sums)
            self._sums.setdefault(dtype, OrderedSum(count)).add((number, number + 1), total)
        self._used |= {place for place, p in enumerate(self._parameters) if p.grad is not None}
        self._used |= {place for place, p in enumerate(self._parameters) if any(p in sums for _, sums in calls)}
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self, shares: Sequence[Iterable[int]]) -> None:
        """Leave the step's gradient in every parameter's ``grad``, the same on all ranks. Collective.

        Args:
            shares: for every data rank the numbers of its micro-batches.
        """
        data, sequence = self._mesh.data, self._mesh.sequence
        numbers = [set(share) for share in shares]
        used = set().union(*data.all_gather_object(self._used)) if data.size > 1 else self._used
        for dtype, parameters in self._by_dtype().items():
            elements = sum(p.numel() for p in parameters)
            lengths = even_cut(elements, sequence.size)
            mine = self._sums.pop(dtype, None) or OrderedSum(sum(map(len, numbers)))
            shape = torch.empty(lengths[sequence.rank], dtype=dtype, device=parameters[0].device)
            flat = sequence.all_gather(summed(mine, numbers, data, shape), lengths, 0)
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter).clone()
        for place, parameter in enumerate(self._parameters):
            if place not in used:
                parameter.grad = None
        self._used = set()

    def _by_dtype(self) -> dict[torch.dtype, list[nn.Parameter]]:
        found: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            found.setdefault(parameter.dtype, []).append(parameter)
        return found

    def _share(self, flat: Tensor) -> Tensor:
        link = self._mesh.sequence
        return Partition((even_cut(flat.numel(), link.size),)).copy(flat, 0, link.rank)

    def _of_tiles(
        self, parameters: Sequence[nn.Parameter], runs: tuple[range, ...], sums: dict[nn.Parameter, OrderedSum]
    ) -> Tensor:
        """The sum over the tiles of all ranks, of this rank's share of the elements."""
        link, count = self._mesh.sequence, runs[-1].stop
        nodes = [nodes_of(run, (0, count)) for run in runs]
        wholes = [
            _flat(parameters, [sums[p].nodes[node] if p in sums else None for p in parameters])
            for node in nodes[link.rank]
        ]
        cut = Partition((even_cut(wholes[0].numel(), link.size),))
        outgoing = [[cut.take(whole, 0, peer) for whole in wholes] for peer in range(link.size)]
        shapes = [[(cut.lengths[link.rank],)] * len(each) for each in nodes]
        total = OrderedSum(count)
        for each, received in zip(nodes, link.all_to_all(outgoing, shapes), strict=True):
            for node, value in zip(each, received, strict=True):
                total.add(node, value)
        return total.total


def _flat(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> Tensor:
    return torch.cat(
        [
            (torch.zeros_like(parameter) if gradient is None else gradient).detach().reshape(-1)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
    )


def weight_gradients(model: nn.Module) -> list[WeightGradients]:
    """The collectors of a parallelised model's tile gradients; empty without tiles."""
    found = [getattr(one.get(ModelHooks).handler, "weight_gradients", None) for one in engine_of(model).models]
    return [cast(WeightGradients, one) for one in found if one is not None]
