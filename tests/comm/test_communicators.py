"""Process groups of a mesh: one for each set of ranks, and one more where messages keep an order of their own."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rules.fake_world import one_of

import ditmesh
from ditmesh.comm import grid as grid_module
from ditmesh.comm import mesh as mesh_module
from ditmesh.comm.hosts import Hosts
from ditmesh.comm.link import Link


def made(config: dict[str, Any]) -> tuple[int, int, float]:
    """Process groups of this rank that a mesh makes and makes again after a failure, and a sum over them then."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new:
        mesh = ditmesh.Mesh(ditmesh.ParallelConfig(**config, shared_memory=False))

        def joined() -> int:
            return sum(bool(call.args) and mesh.rank in call.args[0] for call in new.call_args_list)

        first = joined()
        mesh.world.all_reduce(torch.ones(1))
        # Who waits for the sum would hear of the failure.
        dist.barrier()
        mesh.fail_request()
        mesh.begin_request()
        total = float(mesh.world.all_reduce(torch.ones(1))) + float(mesh.sequence.all_reduce(torch.ones(1)))
        again = joined() - first
    mesh.close()
    return first, again, total


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


def kept_errors() -> list[Exception]:
    """Rank 0 fails a request whose other ranks wait for one another; they keep their errors, as a program may."""
    kept: list[Exception] = []
    mesh = ditmesh.Mesh(ditmesh.ParallelConfig(ulysses=4, shared_memory=False), timeout=10)
    try:
        with mesh.request():
            if mesh.rank == 0:
                raise ValueError("on purpose")
            mesh.world.all_gather_object(None)
    except (ValueError, ditmesh.PeerError) as error:
        kept.append(error)
    mesh.begin_request()
    mesh.close()
    return kept


def test_an_error_that_is_kept_holds_no_connection(ranks):
    """Otherwise the last ranks of a chain would wait to the deadline."""
    texts = [str(error) for kept in ranks(4).run(kept_errors) for error in kept]
    assert len(texts) == 4
    assert not any("timed out" in text for text in texts), texts


def test_operations_are_aborted_before_their_buffers_are_dropped():
    """An operation that no peer has joined may still write to them until then."""
    done = []
    with one_of(2, 0):
        mesh = ditmesh.Mesh(ditmesh.ParallelConfig(ring=2), device="cuda")
        with (
            mock.patch.object(ditmesh.Mesh, "_abort", lambda self, groups: done.append(f"abort {len(groups)}")),
            mock.patch.object(Link, "drop", lambda self: done.append(f"drop {self.name}")),
        ):
            mesh._drop()
    assert done[0] == "abort 1"
    assert "drop ring" in done[1:]


# --- NCCL's ways to connect


class Group:
    """A process group of NCCL and gloo, of which nothing is asked but its backends."""

    def _get_backend(self, device: torch.device) -> Any:
        return mock.Mock(**{"name.return_value": "nccl" if device.type == "cuda" else "gloo"})

    def abort(self) -> None:
        """Nothing is under way."""


def asked(rank: int, config: ditmesh.ParallelConfig) -> list[Any]:
    """What one rank of a mesh on GPUs asks for, in order: new groups, and bytes between pairs of ranks."""
    calls: list[Any] = []

    def new_group(*args: Any, **named: Any) -> Group:
        named.pop("timeout")
        calls.append(("new group", *args, named))
        return Group()

    def over_group(link: Link, kind: str, outgoing: Any, incoming: Any, watched: Any = None) -> Any:
        pairs = [(link.rank, to) for _, receivers in outgoing for to in receivers]
        pairs += [(source, link.rank) for _, source in incoming]
        calls.append(("bytes", link.name, link.ranks, pairs))
        return mock.Mock()

    with ExitStack() as patches:
        for owner, name, stand_in in (
            (dist, "is_initialized", lambda: True),
            (dist, "get_rank", lambda *_: rank),
            (dist, "get_world_size", lambda *_: config.world_size),
            (dist, "new_group", new_group),
            (dist, "ProcessGroup", Group),
            (dist, "barrier", lambda **_: calls.append("barrier")),
            (dist, "destroy_process_group", lambda *_: None),
            (dist, "group", SimpleNamespace(WORLD=Group())),
            (torch.accelerator, "current_device_index", lambda: rank),
            (torch, "zeros", lambda *_, **named: torch.empty(1, dtype=torch.uint8)),
            (grid_module, "gather_objects", lambda value, group: [value] * config.world_size),
            (mesh_module, "FailureWatcher", mock.Mock()),
            (grid_module, "find_hosts", lambda *_: Hosts.single(config.world_size)),
            (Link, "_over_group", over_group),
        ):
            patches.enter_context(mock.patch.object(owner, name, stand_in))
        ditmesh.Mesh(config, torch.device("cuda", rank)).close()
    return calls


CONFIGS: list[dict[str, Any]] = [
    {"ulysses": 8},
    {"cfg": 2, "ring": 2, "ulysses": 2},
    {"pipe": 8},
    {"cfg": 2, "pipe": 4},
    {"data": 2, "cfg": 2, "ulysses": 2, "shard": 2},
    {"ring": 8, "exchange": "displaced"},
    {"tensor": 4, "ulysses": 2},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_all_ranks_make_the_same_groups_in_one_order(config):
    config = ditmesh.ParallelConfig(**config)
    found = [asked(rank, config) for rank in range(config.world_size)]

    def groups(rank: int) -> list[Any]:
        return [call[1:] for call in found[rank] if call[0] == "new group"]

    assert all(groups(rank) == groups(0) for rank in range(config.world_size))
    for calls in found:
        for call in calls:
            if call[0] == "new group" and len(call) > 2:
                # Objects go over gloo.
                assert call[2] == {"backend": "cpu:gloo,cuda:nccl"}
        # Nothing is sent before all ranks have all groups.
        assert "barrier" in calls
        assert {call[0] for call in calls[: calls.index("barrier")]} == {"new group"}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_all_pairs_that_will_send_are_connected_in_an_order_that_no_rank_waits_in_for_ever(config):
    config = ditmesh.ParallelConfig(**config)
    left = [[call for call in asked(rank, config) if call[0] == "bytes"] for rank in range(config.world_size)]
    singly: set[tuple[int, int]] = set()
    every: set[tuple[int, int]] = set()
    # Both hosts of a pair wait for one another; so do all hosts of a batch.
    while any(left):
        before = sum(map(len, left))
        for calls in left:
            while calls and not calls[0][3]:
                # Between others.
                calls.pop(0)
            if not calls:
                continue
            _, name, ranks, pairs = calls[0]
            members = sorted({ranks[one] for pair in pairs for one in pair})
            fronts = [left[member][0] for member in members if left[member]]
            if len(fronts) < len(members) or any(front[1:3] != (name, ranks) for front in fronts):
                continue
            if len(pairs) == 1 and any(front[3] != pairs for front in fronts):
                continue
            sent = {(ranks[a], ranks[b]) for front in fronts for a, b in front[3]}
            (singly if len(pairs) == 1 else every).update(sent)
            for member in members:
                left[member].pop(0)
        assert sum(map(len, left)) < before, left
    for name in ("pipe", "ring", "ulysses", "cfg", "tensor", "data"):
        for ranks in config.groups((name,)):
            assert {(one, other) for one in ranks for other in ranks if one != other} <= every
    for stages in config.groups(("pipe",)):
        if len(stages) > 1:
            assert {*pairwise(stages), (stages[-1], stages[0])} <= singly
