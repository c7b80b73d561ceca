"""Process groups of a mesh: one for each set of ranks, and one more where messages keep an order of their own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ditmesh


def made(config: dict[str, Any]) -> tuple[int, int, float]:
    """Process groups that a mesh makes and makes again after a failure, and a sum over them then."""
    with mock.patch.object(dist, "new_subgroups_by_enumeration", wraps=dist.new_subgroups_by_enumeration) as new:
        mesh = ditmesh.Mesh(ditmesh.ParallelConfig(**config, shared_memory=False))
        first = new.call_count
        mesh.world.all_reduce(torch.ones(1))
        mesh.fail_request()
        mesh.begin_request()
        total = float(mesh.world.all_reduce(torch.ones(1))) + float(mesh.sequence.all_reduce(torch.ones(1)))
    mesh.close()
    return first, new.call_count - first, total


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        ({"ulysses": 4}, 1),
        ({"tensor": 4}, 1),
        ({"ring": 2, "ulysses": 2}, 3),
        ({"cfg": 2, "ulysses": 2}, 3),
        ({"data": 2, "ulysses": 2}, 3),
        ({"ring": 4, "exchange": "displaced"}, 2),
        ({"pipe": 4}, 3),
        ({"ulysses": 4, "shard": 4}, 2),
    ],
    ids=str,
)
def test_a_mesh_has_one_group_for_each_set_of_ranks(ranks, config, groups):
    sequence = config.get("ring", 1) * config.get("ulysses", 1)
    assert ranks(4).run(made, config) == [(groups, groups, 4.0 + sequence)] * 4
