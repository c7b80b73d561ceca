"""Collectives that gradients pass through.

Every rank computes a loss of its own, and the backward pass computes the gradient of the sum of all ranks'
losses with respect to a rank's own tensors: each function below has the transposed exchange for its backward. Where all
ranks compute the same loss, the mean of a parameter's gradients over the ranks is one device's gradient, wherever the
parameter is used. The ranks of a tensor-parallel group compute one loss together; those have functions of their own
(Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053: f and g).

Where no gradient is asked for, every function is the link's own method. torch's engine runs the nodes of one device in
the reverse of the order in which they were made, which is the same on all ranks, so that exchanges meet in backward as
they do in forward. Gradients of gradients are refused by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.group import Group
from ..core.partial_run import exchanged
from ..core.values import tracked
from .link import Link


def all_to_all(
    link: Link, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[Tensor]]:
    """`Link.all_to_all`, differentiable: gradients go back to the rank that the tensor came from."""
    if link.size == 1 or not torch.is_grad_enabled() or not any(tracked(*tensors) for tensors in outgoing):
        return link.all_to_all(outgoing, shapes)
    counts = [len(tensors) for tensors in outgoing]
    received = iter(_AllToAll.apply(link, counts, shapes, *[tensor for tensors in outgoing for tensor in tensors]))
    return [
        list(outgoing[peer]) if peer == link.rank else [next(received) for _ in shapes[peer]]
        for peer in range(link.size)
    ]


def all_to_all_packed(link: Link, packed: Tensor, outgoing: Sequence[int], incoming: Sequence[int]) -> Tensor:
    """`Link.all_to_all_packed`, waited for, and differentiable."""
    if not tracked(packed):
        return link.all_to_all_packed(packed, outgoing, incoming)()
    return cast(Tensor, _AllToAllPacked.apply(packed, link, outgoing, incoming))


def all_gather(link: Group, piece: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
    """`Link.all_gather`, differentiable: a rank gets back the sum of all ranks' gradients of its piece.

    That sum is a reduce-scatter: each rank may use the whole tensor in another way.
    """
    if link.size == 1 or not tracked(piece):
        return link.all_gather(piece, lengths, dim)
    return cast(Tensor, _AllGather.apply(piece, link, tuple(lengths), dim, True))


def gather_features(link: Link, piece: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
    """All-gather between ranks that compute one loss: the backward takes this rank's piece of the gradient."""
    if not tracked(piece):
        return exchanged(lambda own: link.all_gather(own, lengths, dim), piece, sum(lengths))
    return cast(Tensor, _AllGather.apply(piece, link, tuple(lengths), dim, False))


def enter_slices(link: Link, tensor: Tensor) -> Tensor:
    """Megatron's f, before weights that are cut by column: the tensor itself; the backward adds up all ranks' parts."""
    return cast(Tensor, _Sum.apply(tensor, link, False, True)) if tracked(tensor) else tensor


def leave_slices(link: Link, tensor: Tensor) -> Tensor:
    """Megatron's g, behind weights that are cut by row: `Link.all_reduce`; the backward passes the gradient on."""
    if not tracked(tensor):
        return exchanged(link.all_reduce, tensor)
    return cast(Tensor, _Sum.apply(tensor, link, True, False))


def sum_of_slices(link: Link, tensor: Tensor) -> Tensor:
    """`Link.all_reduce` where every rank makes something of its own of the sum: the backward adds up, too."""
    if not tracked(tensor):
        return exchanged(link.all_reduce, tensor)
    return cast(Tensor, _Sum.apply(tensor, link, True, True))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Link, counts: list[int], shapes: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        outgoing = [[next(rest) for _ in range(count)] for count in counts]
        ctx.link, ctx.sizes = link, [len(expected) for expected in shapes]
        ctx.sent = [[] if peer == link.rank else [tuple(t.shape) for t in out] for peer, out in enumerate(outgoing)]
        ctx.kept = counts[link.rank]
        received = link.all_to_all(outgoing, shapes)
        return tuple(tensor for peer, part in enumerate(received) if peer != link.rank for tensor in part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        link, rest = ctx.link, iter(grads)
        # A rank's own entry gives the dtype and goes nowhere.
        outgoing = [
            [grads[0]] if peer == link.rank else [next(rest) for _ in range(ctx.sizes[peer])]
            for peer in range(link.size)
        ]
        received = link.all_to_all(outgoing, ctx.sent)
        back = [[None] * ctx.kept if peer == link.rank else part for peer, part in enumerate(received)]
        return None, None, None, *(grad for part in back for grad in part)


class _AllToAllPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, link: Link, outgoing: Sequence[int], incoming: Sequence[int]) -> Tensor:
        ctx.link, ctx.outgoing, ctx.incoming = link, outgoing, incoming
        return link.all_to_all_packed(packed, outgoing, incoming)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.link.all_to_all_packed(grads[0].contiguous(), ctx.incoming, ctx.outgoing)(), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, link: Any, lengths: tuple[int, ...], dim: int, summed: bool) -> Tensor:
        ctx.link, ctx.lengths, ctx.dim, ctx.summed = link, lengths, dim, summed
        return link.all_gather(piece, lengths, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        parts = grads[0].split(ctx.lengths, ctx.dim)
        mine = parts[ctx.link.rank]
        if ctx.summed:
            received = ctx.link.all_to_all([[part] for part in parts], [[tuple(mine.shape)]] * len(parts))
            # In rank order.
            mine = reduce(torch.add, [part for (part,) in received])
        return mine, None, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, link: Link, now: bool, back: bool) -> Tensor:
        ctx.link, ctx.back = link, back
        return link.all_reduce(_copy(tensor)) if now else tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.link.all_reduce(_copy(grads[0])) if ctx.back else grads[0], None, None, None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
