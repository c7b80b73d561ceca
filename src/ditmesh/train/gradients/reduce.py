"""Averaging of gradients over a mesh (docs/training.md)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from ...comm.mesh import Mesh
from .ordered import OrderedGradients, weight_gradients

# Gradients travel together in buckets of about so many bytes.
BUCKET_BYTES = 25 << 20


def reduce_gradients(model: nn.Module, mesh: Mesh, inputs: Iterable[Tensor] = ()) -> None:
    """Replace every gradient by its mean over the data and sequence ranks. A collective call, after ``backward``.

    In reproducible mode it is the mean over the data ranks, added up in an order that does not depend on any degree;
    the gradients of the blocks' weights are there only then. For those who use neither `DistributedDataParallel` nor
    FSDP2 over `Mesh.gradient_group`, which do the same.

    Args:
        model: with plain gradients. Ranks of the group must have gradients of the same parameters.
        mesh: as of ``ditmesh.engine_of(model).mesh``.
        inputs: other leaves with gradients to reduce: embeddings that the ranks of a data rank have in common.
    """
    if mesh.config.reproducible:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ordered = OrderedGradients(parameters, weight_gradients(model), mesh)
        ordered.take(mesh.data.rank, mesh.data.size)
        ordered.reduce([{rank} for rank in range(mesh.data.size)])
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= mesh.data.size
        return
    group = mesh.gradient_group
    if group is None:
        return
    gradients = [leaf.grad for leaf in (*model.parameters(), *inputs) if leaf.grad is not None]
    size = dist.get_world_size(group)
    with torch.no_grad():
        for bucket in _take_tensors(gradients, BUCKET_BYTES):
            flat = _flatten_dense_tensors(bucket)
            dist.all_reduce(flat, group=group)
            flat /= size
            for gradient, mean in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(mean)
