"""Python objects between ranks: over gloo, also where the ranks' tensors travel over NCCL.

Where a group has NCCL alone, torch pickles objects into memory of the current GPU: the host waits for the device
several times, and a rank that does not come is missed at the deadline instead of at once. This is the only place that
calls torch's collectives of objects.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .backends import backend_of, device_of_rank

# For default groups without a backend for the host one beside them that has.
_beside: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank of a group, in rank order, on all of them: anything that can be pickled. Collective."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=_on_host(group))
    return every


def broadcast_object(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """One rank's value, on every rank of a group: anything that can be pickled. Collective.

    ``value``: this rank's; only that of the source counts. ``source``: its number among all ranks of the job.
    """
    box = [value]
    dist.broadcast_object_list(box, source, group=_on_host(group))
    return box[0]


def _on_host(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of the same ranks that carries tensors of the host."""
    world = dist.group.WORLD
    ranks = world if group is None else group
    assert ranks is not None
    assert world is not None
    if backend_of(ranks, "cpu"):
        return ranks
    # Other groups are made with one.
    assert ranks is world, "objects of a group that carries no tensors of the host"
    if world not in _beside:
        # gloo's own deadline is half an hour.
        options = getattr(world._get_backend(device_of_rank()), "options", None)
        made = dist.new_group(backend="gloo", timeout=getattr(options, "_timeout", None))
        assert isinstance(made, dist.ProcessGroup)
        _beside[world] = made
    return _beside[world]
