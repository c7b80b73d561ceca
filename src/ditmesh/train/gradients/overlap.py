"""The exchange of gradients while the backward pass still computes others.

The idea is that of DistributedDataParallel (Li et al. 2020, arXiv:2006.15704): gradients that are done are summed up
over ranks in a fixed order of buckets, so that every rank calls the same collectives. Unlike there, large gradients are
summed where they lie, several modules may be trained, frozen weights may be of any kind, and a weight without a
gradient in some step counts as zeros without a search for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from .reduce import BUCKET

# A gradient from so many bytes on is sent by itself.
MIN_SINGLE_BYTES = 1 << 20


@dataclass
class _Bucket:
    """Parameters that send their gradients together; a large one is alone.

    Attributes:
        parameters: of one dtype.
        missing: ids of the parameters that wait for their gradients in this step.
        sent: the tensor in the collective, and its work.
        versions: of the gradients when they were sent.
    """

    parameters: list[nn.Parameter]
    missing: set[int] = field(default_factory=set)
    sent: tuple[Tensor, Any] | None = None
    versions: list[int] = field(default_factory=list)

    def begin(self, group: dist.ProcessGroup) -> None:
        gradients = [_gradient(p) for p in self.parameters]
        # A flat copy of one tensor would be a copy for nothing.
        alone = len(gradients) == 1 and gradients[0].is_contiguous()
        flat = gradients[0] if alone else _flatten_dense_tensors(gradients)
        self.sent = flat, dist.all_reduce(flat, group=group, async_op=True)
        self.versions = [gradient._version for gradient in gradients]

    def end(self) -> None:
        assert self.sent is not None
        flat, work = self.sent
        work.wait()
        gradients = [_gradient(p) for p in self.parameters]
        if [gradient._version for gradient in gradients] != self.versions:
            raise RuntimeError("a gradient was added to after it had been sent; use sharding: none")
        if flat is not gradients[0]:
            for gradient, whole in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(whole)
        self.sent = None


class OverlappedSum:
    """Sums gradients over a group of ranks, as far as possible during the backward pass.

    Args:
        parameters: that are trained; the same on every rank.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_last = False
        self._next = 0
        # A backward pass ends with the weights that were used first.
        self._buckets = _bucketed(reversed(list(parameters)))
        self._of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._undo = ExitStack()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._undo.callback(parameter.register_post_accumulate_grad_hook(self._done).remove)

    def expect(self, is_last: bool) -> None:
        """Say whether the next backward pass is this rank's last one of a step: its gradients are sent."""
        self._is_last = is_last
        if is_last:
            self._next = 0
            for bucket in self._buckets:
                bucket.missing = {id(p) for p in bucket.parameters}

    def _done(self, parameter: Tensor) -> None:
        if not self._is_last:
            return
        self._of[id(parameter)].missing.discard(id(parameter))
        # In their order: on every rank the same one.
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._buckets[self._next].begin(self._group)
            self._next += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Send the remaining buckets, and wait for all of them. Collective."""
        if not self._is_last:
            # A rank without micro-batches.
            self._next = 0
        self._is_last = False
        for bucket in self._buckets[self._next :]:
            bucket.begin(self._group)
        for bucket in self._buckets:
            bucket.end()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        self._undo.close()


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _bucketed(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    found: list[_Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
    for parameter in parameters:
        if parameter.nbytes >= MIN_SINGLE_BYTES:
            found.append(_Bucket([parameter]))
            continue
        key = (parameter.dtype, parameter.device)
        bucket, size = filling.get(key, (None, BUCKET))
        if bucket is None or size >= BUCKET:
            bucket, size = _Bucket([]), 0
            found.append(bucket)
        bucket.parameters.append(parameter)
        filling[key] = (bucket, size + parameter.nbytes)
    return found
