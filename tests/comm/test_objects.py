"""Python objects between ranks travel over gloo, whatever carries the tensors."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ditmesh.comm import backends, objects


def without_gloo() -> tuple[list[Any], list[Any], int, bool]:
    """What objects do in a job that has NCCL alone; collectives of objects over its groups raise."""
    world, asked = dist.group.WORLD, backends.backend_of
    gloo: list[dist.ProcessGroup] = []

    def backend_of(group: dist.ProcessGroup | None, device: Any) -> str:
        """As of NCCL alone, but for groups made for the host."""
        if group is not None and any(group is one for one in gloo):
            return asked(group, device)
        return "" if torch.device(device).type == "cpu" else "nccl"

    def new_group(*args: Any, **named: Any) -> Any:
        made = new(*args, **named)
        if named.get("backend") == "gloo":
            gloo.append(made)
        return made

    def refuse(collective: Any) -> Any:
        def call(*args: Any, group: Any = None, **named: Any) -> Any:
            assert backend_of(group, "cpu") == "gloo", "objects over NCCL"
            return collective(*args, group=group, **named)

        return call

    new = dist.new_group
    with (
        mock.patch.object(objects, "backend_of", backend_of),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "all_gather_object", refuse(dist.all_gather_object)),
        mock.patch.object(dist, "broadcast_object_list", refuse(dist.broadcast_object_list)),
    ):
        rank = dist.get_rank()
        every = objects.gather_objects({"rank": rank})
        every += objects.gather_objects(rank + 10)
        sent = [objects.broadcast_object(("from", rank), source) for source in (0, 1)]
        try:
            dist.all_gather_object([None, None], rank)
            refused = False
        except AssertionError:
            refused = True
    made = len(gloo)
    for group in gloo:
        dist.destroy_process_group(group)
    assert world is not None
    objects._beside.pop(world, None)
    return every, sent, made, refused


def test_a_job_that_has_nccl_alone_gets_one_group_for_objects(ranks):
    for every, sent, made, refused in ranks(2).run(without_gloo):
        assert every == [{"rank": 0}, {"rank": 1}, 10, 11]
        assert sent == [("from", 0), ("from", 1)]
        assert made == 1
        assert refused
