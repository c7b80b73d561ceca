"""The backward pass of blocks that run tile by tile: the same gradients, to the bit, on any number of ranks.

Inside of a tile the backward pass is torch's own. What tiles have in common (weights, arguments without tokens, keys
and values) is given to each of them by a function of its own, whose backward pass adds the tiles' gradients up along
the tree of `ditmesh.core.ordered`. All ranks of a sequence compute the same loss; gradients of what lies before and
behind the blocks are therefore whole, and the same, on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..attention import masks
from ..attention.kernels import Kernel
from ..attention.ulysses import HeadExchange
from ..comm import Link
from ..core.alignment import aligned
from ..core.ordered import OrderedSum, nodes_of
from ..core.partition import Partition, even_cut
from ..errors import LayoutError


class WeightGradients:
    """Collects the weight gradients of this rank's tiles, until `take`.

    One call of the model after the other: its tiles are numbered from 0 in each.
    """

    def __init__(self) -> None:
        self._calls: dict[int, tuple[tuple[range, ...], dict[nn.Parameter, OrderedSum]]] = {}
        # The call in progress.
        self.number = 0

    def begin_call(self) -> None:
        """The model is called."""
        self.number += 1

    def keep(self, call: int, runs: tuple[range, ...], tile: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A tile's gradient of a weight; ``runs``: the tiles of every rank."""
        _, sums = self._calls.setdefault(call, (runs, {}))
        sums.setdefault(parameter, OrderedSum(runs[-1].stop)).add((tile, tile + 1), gradient)

    def take(self) -> list[tuple[tuple[range, ...], dict[nn.Parameter, OrderedSum]]]:
        """For every call that has run backward, in order: the ranks' tiles, and this rank's sums by weight."""
        calls, self._calls = self._calls, {}
        return [calls[number] for number in sorted(calls)]


class TileWeights:
    """The weights of a block, as every tile of this rank has them: the same values with gradients of their own.

    Args:
        block: its parameters are replaced while a tile computes.
        here: numbers of this rank's tiles; ``runs``: the tiles of every rank.
    """

    def __init__(self, block: nn.Module, here: range, runs: tuple[range, ...], gradients: WeightGradients) -> None:
        self._slots = [
            (module._parameters, name, parameter)
            for module in block.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        call = gradients.number

        def of_tile(parameter: nn.Parameter, tile: int) -> Tensor:
            def keep(gradient: Tensor) -> tuple[None]:
                gradients.keep(call, runs, tile, parameter, gradient)
                return (None,)

            return _differentiable(lambda weight: weight.view_as(weight), keep, parameter)

        self._own = [{parameter: of_tile(parameter, tile) for _, _, parameter in self._slots} for tile in here]

    def use(self, place: int) -> None:
        """The tile of that place among this rank's computes next."""
        own = self._own[place]
        for slots, name, parameter in self._slots:
            slots[name] = cast(nn.Parameter, own[parameter])

    def close(self) -> None:
        """Put the parameters back."""
        for slots, name, parameter in self._slots:
            slots[name] = parameter


class _Function(torch.autograd.Function):
    """A function of tensors alone and its backward, which takes the results' gradients and returns the tensors'."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], backward: Callable[..., Sequence[Any]], *tensors: Tensor) -> Any:
        ctx.back = backward
        return run(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, *ctx.back(*grads)


def _differentiable(run: Callable[..., Any], backward: Callable[..., Sequence[Any]], *tensors: Tensor) -> Any:
    return _Function.apply(run, backward, *tensors)


# --- tokens ---------------------------------------------------------------------------------------------------


def cut(whole: Tensor, tokens: Partition, dim: int, link: Link) -> Tensor:
    """This rank's tokens of a tensor that all ranks have whole; the backward pass gathers all ranks' gradients."""
    lengths = tokens.lengths

    def backward(gradient: Tensor) -> tuple[Tensor]:
        gathered = link.all_gather(gradient.contiguous(), lengths, dim)
        return (tokens.join(gathered.split(lengths, dim), dim),)

    return _differentiable(lambda whole: tokens.copy(whole, dim, link.rank), backward, whole)


def split(part: Tensor, here: Partition, dim: int) -> list[Tensor]:
    """A rank's tokens, tile by tile."""

    def run(part: Tensor) -> tuple[Tensor, ...]:
        return tuple(here.copy(part, dim, tile) for tile in range(here.parts))

    return list(_differentiable(run, lambda *grads: (here.join(grads, dim),), part))


def join_tiles(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The tokens of a rank's tiles as one tensor; tiles get their gradients as they lie on any number of ranks."""
    lengths = [piece.shape[dim] for piece in pieces]

    def backward(gradient: Tensor) -> list[Tensor]:
        return [aligned(part) for part in gradient.split(lengths, dim)]

    return _differentiable(lambda *pieces: torch.cat(pieces, dim), backward, *pieces)


# --- shared by all tiles ----------------------------------------------------------------------------------------


def for_each(value: Tensor, runs: tuple[range, ...], link: Link) -> list[Tensor]:
    """A tensor that all ranks have, for every tile of this rank; the backward pass adds all tiles' gradients up."""
    run = runs[link.rank]

    def backward(*grads: Tensor) -> tuple[Tensor]:
        mine = OrderedSum(runs[-1].stop)
        for tile, gradient in zip(run, grads, strict=True):
            mine.add((tile, tile + 1), gradient)
        return (summed(mine, runs, link, grads[0]),)

    return list(_differentiable(lambda value: tuple(aligned(value).clone() for _ in run), backward, value))


def first_copy(first: Tensor, copies: Sequence[Tensor], here: bool) -> Tensor:
    """Tokens that every tile has made: the first tile's, of which alone others depend. ``here``: it is this rank's."""

    def backward(gradient: Tensor) -> list[Tensor]:
        nothing = torch.zeros_like(gradient)
        return [gradient if here and place == 0 else nothing for place in range(len(copies))]

    return _differentiable(lambda *_: first.clone(), backward, *copies)


def summed(mine: OrderedSum, runs: Sequence[range | set[int]], link: Link, like: Tensor) -> Tensor:
    """The whole sum on every rank of a link. Collective.

    ``mine`` has this rank's addends, with the numbers ``runs[link.rank]``, perhaps none, of the form of ``like``.
    """
    if link.size == 1:
        return mine.total
    nodes = [nodes_of(run, (0, mine.count)) for run in runs]
    outgoing = [mine.nodes[node].contiguous() for node in nodes[link.rank]] or [like.new_empty(0)]
    shapes = [[tuple(like.shape)] * len(each) or [(0,)] for each in nodes]
    total = OrderedSum(mine.count)
    for each, received in zip(nodes, link.all_gather_list(outgoing, shapes), strict=True):
        for node, value in zip(each, received, strict=False):
            total.add(node, value)
    return total.total


# --- attention ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionOfTiles:
    """One attention call of all tiles of all ranks.

    Attributes:
        attend: computes it without gradients: queries, keys and values of this rank's tiles to their outputs.
        queries, keys: the streams by tile; ``runs``: the tiles of every rank.
        mask_of: the mask of every tile's queries over all keys, or None.
        agreed: a rank's tokens, replicated ones as the first tile has them. Collective.
    """

    attend: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
    queries: Partition
    keys: Partition
    runs: tuple[range, ...]
    link: Link
    kernel: Kernel
    mask_of: Callable[[int], Tensor | None]
    scale: float | None
    agreed: Callable[[Tensor, Partition], Tensor]

    def recorded(self, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for this rank's tiles, with a backward pass; `LayoutError`: the kernel has none."""
        one = q[0][:1, :1, :1].detach().requires_grad_()
        if not self.kernel.attend(one, one, one, None, self.scale).requires_grad:
            raise LayoutError(
                f"attention={self.kernel.name!r} passes no gradient on; train with attention='native', or call the "
                "model under torch.no_grad()"
            )
        return list(cast(Any, _Attention.apply(self, *q, *k, *v)))

    def gradients(
        self, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """Gradients of queries, keys and values of this rank's tiles. Collective.

        Heads are traded for tokens between all sequence ranks, whatever their degrees: for each head one rank has all
        tiles of queries, and adds up their gradients of keys and values.
        """
        link, run = self.link, self.runs[self.link.rank]
        queries, keys = self.queries.regroup(self.runs), self.keys.regroup(self.runs)
        own_queries, own_keys = self.queries.of(run), self.keys.of(run)
        tensors = [
            self.agreed(own.join(each, 2), whole)
            for own, whole, each in ((own_queries, queries, q), (own_keys, keys, k), (own_keys, keys, v))
        ]
        tensors.append(self.agreed(own_queries.join(grads, 2), queries))
        exchange = HeadExchange(link, even_cut(tensors[0].shape[1], link.size))
        start, count = exchange.head_starts[link.rank], exchange.head_counts[link.rank]
        if link.size > 1:
            tensors = exchange.gather_tokens(tensors, (queries, keys, keys, queries))
        gradients = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors[:3]]
        for head in range(count):
            pieces = self._of_head(start + head, *(tensor[:, head : head + 1] for tensor in tensors))
            for tensor, piece in zip(gradients, pieces, strict=True):
                tensor[:, head : head + 1] = piece
        if link.size > 1:
            gradients = [
                exchange.gather_heads(tensor, tokens)
                for tensor, tokens in zip(gradients, (queries, keys, keys), strict=True)
            ]
        return [
            [_gradient_of(tokens, tensor, place, tile) for place, tile in enumerate(run)]
            for tensor, tokens in zip(gradients, (own_queries, own_keys, own_keys), strict=True)
        ]

    def _of_head(self, head: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One head's gradients, (B, 1, S, D): each tile of queries over all keys, added up along the tree."""
        tiles = range(self.queries.parts)
        k, v = (aligned(tensor).detach().requires_grad_() for tensor in (k, v))
        of_q: list[Tensor] = []
        of_k, of_v = OrderedSum(len(tiles)), OrderedSum(len(tiles))
        for tile in tiles:
            queries = aligned(self.queries.take(q, 2, tile)).detach().requires_grad_()
            mask = self.mask_of(tile)
            bias = None if mask is None else aligned(masks.of_heads(mask, head, 1))
            with torch.enable_grad():
                out = self.kernel.attend(queries, k, v, bias, self.scale)
            dq, dk, dv = torch.autograd.grad(out, (queries, k, v), _gradient_of(self.queries, grad, tile, tile))
            of_q.append(dq)
            of_k.add((tile, tile + 1), dk)
            of_v.add((tile, tile + 1), dv)
        return self.queries.join(of_q, 2), of_k.total, of_v.total


def _gradient_of(tokens: Partition, whole: Tensor, place: int, tile: int) -> Tensor:
    """A tile's gradient, at its place in ``tokens``; that of tokens which all tiles have is the first tile's."""
    part = tokens.take(whole, 2, place)
    if tile and tokens.replicated:
        pieces = enumerate(tokens.split(part, 2, place))
        part = torch.cat([torch.zeros_like(p) if block in tokens.replicated else p for block, p in pieces], 2)
    return aligned(part)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AttentionOfTiles, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        tiles = len(tensors) // 3
        return tuple(call.attend(tensors[:tiles], tensors[tiles : 2 * tiles], tensors[2 * tiles :]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        tensors, tiles = ctx.saved_tensors, len(grads)
        found = ctx.call.gradients(tensors[:tiles], tensors[tiles : 2 * tiles], tensors[2 * tiles :], grads)
        return None, *(gradient for each in found for gradient in each)
