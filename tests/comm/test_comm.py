"""Messages between ranks: through shared memory and over the process group, the same tensors."""

from __future__ import annotations

import gc
import os
import re
import time
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.comm import Hosts, shared
from support import ruled
from support.ruled import transport

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.int64]


def opened(hosts: tuple[int, ...] = (), timeout: float = 60, **settings):
    """A mesh with all ranks on the ring, and its ring link; as if the ranks were on hosts of these numbers."""
    seen = [frozenset(rank for rank, other in enumerate(hosts) if other == host) for host in hosts]
    apart = mock.patch("ditmesh.comm.grid.find_hosts", lambda group, shares: Hosts(tuple(seen), shares))
    with apart if hosts else nullcontext():
        mesh = ditmesh.Mesh(ditmesh.ParallelConfig(ring=dist.get_world_size(), **settings), timeout=timeout)
    near = settings.get("shared_memory", True) and not hosts
    assert mesh.ring.transport == transport("shared memory" if near else "gloo")
    return mesh, mesh.ring


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.arange(max(1, torch.Size(shape).numel())).view(-1)[: torch.Size(shape).numel()]
    return ((values + 10 * rank) % 50).view(shape).to(dtype)


def every_move(shared_memory: bool, hosts: tuple[int, ...] = ()) -> dict:
    """What each move of a link brings, for every dtype, with strides and with tensors that are empty."""
    mesh, link = opened(hosts, shared_memory=shared_memory)
    me, size, found = link.rank, link.size, {}
    for dtype in DTYPES:
        wide = numbers(me, 6, 4, dtype=dtype)
        columns, nothing = wide[:, ::2], wide[:0]
        outgoing = [[columns[: peer + 1], nothing] if peer != me else [columns] for peer in range(size)]
        shapes = [[(me + 1, 2), (0, 4)] if peer != me else [(6, 2)] for peer in range(size)]
        found["exchange", dtype] = [part.clone() for parts in link.all_to_all(outgoing, shapes) for part in parts]
        lengths = list(range(1, size + 1))
        found["gather", dtype] = link.all_gather(wide.t()[:, : me + 1], lengths, 1)
        found["shift", dtype] = [t.clone() for t in link.shift((columns, wide.t()), [(6, 2), (4, 6)]).wait()]
        buffers = [[torch.empty(6, 2, dtype=dtype), nothing.clone()] for _ in range(size)]
        posted = link.all_gather_async([columns, nothing], buffers)
        found["post", dtype] = [t.clone() for t in posted.wait()]
        if me:
            sent = link.send([columns], to=0)
            sent.wait()
        else:
            arriving = [link.receive([torch.empty(6, 2, dtype=dtype)], source) for source in range(1, size)]
            # In another order than they were announced.
            found["receive", dtype] = [one.wait()[0].clone() for one in reversed(arriving)]
    for shape in ((5,), (1,), (3, 7), (2, 3, 4)):
        found["all_reduce", shape] = link.all_reduce(numbers(me, *shape))
    found["list"] = link.all_gather_list([numbers(me, me + 1), numbers(me, 2)], [[(n + 1,), (2,)] for n in range(size)])
    for source in range(size):
        found["broadcast", source] = link.broadcast(numbers(me, 4), source)
    found["bytes"] = dict(mesh.traffic.bytes_sent)
    mesh.close()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_shared_memory_brings_what_the_process_group_brings(ranks, world):
    near, far = ranks(world).run(every_move, True), ranks(world).run(every_move, False)
    for here, there in zip(near, far, strict=True):
        assert here.keys() == there.keys()
        assert here["bytes"] == there["bytes"]
        for move in here.keys() - {"bytes"}:
            torch.testing.assert_close(here[move], there[move], rtol=0, atol=0)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), pytest.param((0, 1, 0, 0), marks=pytest.mark.matrix)], ids=str)
def test_several_hosts_bring_what_one_brings(ranks, hosts, shared_memory):
    one, several = ranks(4).run(every_move, True), ranks(4).run(every_move, shared_memory, hosts)
    for here, there in zip(one, several, strict=True):
        for move in here.keys() - {"bytes"}:
            torch.testing.assert_close(here[move], there[move], rtol=0, atol=0)
    assert [of["bytes"] for of in one] == [of["bytes"] for of in several]


def sums(shape: tuple[int, ...]) -> torch.Tensor:
    mesh, link = opened()
    generator = torch.Generator().manual_seed(link.rank)
    total = link.all_reduce(torch.randn(shape, generator=generator))
    mesh.close()
    return total


def test_a_sum_has_the_same_bits_on_every_rank(ranks):
    results = ranks(3).run(sums, (7, 11))
    expected = sum(torch.randn((7, 11), generator=torch.Generator().manual_seed(rank)) for rank in range(3))
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], expected)


def kept_messages() -> tuple[bool, int, int]:
    """Messages that are kept while others come: are they left alone? And how many slots were made?"""
    mesh, link = opened()
    peer = 1 - link.rank
    kept = [link.all_gather_list([numbers(link.rank + n, 1000)], [[(1000,)]] * 2)[peer][0] for n in range(5)]
    for n in range(50):
        link.all_gather_list([numbers(link.rank + n, 1000)], [[(1000,)]] * 2)
    whole = all(torch.equal(t, numbers(peer + n, 1000)) for n, t in enumerate(kept))
    while_kept = sum(map(len, mesh._memory._slots.values()))
    # A part of a message keeps its memory as the whole does.
    part = kept[0].view(10, 100)[3]
    kept.clear()
    gc.collect()
    for n in range(50):
        link.all_gather_list([numbers(link.rank + n, 1000)], [[(1000,)]] * 2)
    whole = whole and torch.equal(part, numbers(peer, 1000).view(10, 100)[3])
    slots = sum(map(len, mesh._memory._slots.values()))
    mesh.close()
    return whole and torch.equal(part, numbers(peer, 1000).view(10, 100)[3]), while_kept, slots


@ruled.shared_memory
def test_memory_is_used_again_only_when_its_message_is_forgotten(ranks):
    for whole, while_kept, slots in ranks(2).run(kept_messages):
        assert whole
        # Five are kept; two or three more take turns.
        assert 6 <= while_kept <= 8
        assert slots == while_kept


def many() -> bool:
    """More messages than the table has entries, none looked at before all are sent."""
    mesh, link = opened()
    count = shared.ENTRIES + 100
    if link.rank == 0:
        for n in range(count):
            link.send([torch.tensor([float(n)])], to=1)
        mesh.close()
        return True
    time.sleep(0.3)
    coming = [link.receive([torch.empty(1)], 0) for _ in range(count)]
    right = all(one.wait()[0].item() == n for n, one in enumerate(coming))
    mesh.close()
    return right


@ruled.shared_memory
def test_a_sender_far_ahead_waits(ranks):
    assert ranks(2).run(many) == [True, True]


def late() -> tuple[str, float] | None:
    mesh, link = opened()
    found = None
    if link.rank == 0:
        coming = link.receive([torch.empty(1)], 1)
        began = time.monotonic()
        with pytest.raises(ditmesh.PeerError) as caught:
            coming.wait(timedelta(seconds=0.3))
        found = str(caught.value), time.monotonic() - began
    dist.barrier()
    if link.rank:
        link.send([torch.ones(1)], to=0)
    mesh.close()
    return found


@ruled.shared_memory
def test_a_wait_has_a_deadline(ranks):
    message, took = ranks(2).run(late)[0]
    assert message == "timed out waiting 0.3 s for rank 1"
    # Its own deadline, and not the mesh's.
    assert 0.3 <= took < 30


def bereft(handle: bool) -> tuple[str, float, float]:
    """Rank 1's memory is that of a process which ends, having sent one message of two."""
    mesh, link = opened()
    memory = mesh._memory
    child = os.fork()
    if child == 0:
        time.sleep(0.5)
        os._exit(0)
    if not handle:
        # A process that nobody has waited for is still listed.
        os.waitpid(child, 0)
    if link.rank:
        link.send([torch.full((3,), 7.0)], to=0)
    else:
        memory._peers[1].alive = os.pidfd_open(child) if handle else None
        memory._peers[1].process = child
    value = took = 0.0
    message = ""
    if link.rank == 0:
        first, second = (link.receive([torch.empty(3)], 1) for _ in range(2))
        time.sleep(0.7)
        value = first.wait()[0][0].item()
        began = time.monotonic()
        with pytest.raises(ditmesh.PeerError) as caught:
            second.wait()
        message, took = str(caught.value), time.monotonic() - began
    if handle:
        os.waitpid(child, 0)
    dist.barrier()
    mesh.close()
    return message, value, took


@ruled.shared_memory
@pytest.mark.parametrize("handle", [True, False])
def test_a_rank_that_has_ended_is_not_waited_for(ranks, handle):
    """What it sent before still arrives. Also where the system has no handles of processes."""
    message, value, took = ranks(2).run(bereft, handle)[0]
    assert value == 7.0
    assert re.fullmatch(r"rank 1 \(process \d+\) has ended", message)
    # Long before the deadline.
    assert took < 30


def written_to() -> bool:
    """What came from one rank is written to on two others."""
    mesh, link = opened()
    parts = link.all_gather_list([torch.zeros(64)], [[(64,)]] * link.size)
    whole = link.broadcast(torch.zeros(64), 0)
    dist.barrier()
    for part in (*(part for (part,) in parts), whole):
        part.add_(link.rank + 1)
    dist.barrier()
    mine = all(bool((part == link.rank + 1).all()) for part in (*(part for (part,) in parts), whole))
    dist.barrier()
    mesh.close()
    return mine


def test_what_came_may_be_written_to(ranks):
    """One message goes to several ranks: none sees what another one does to it."""
    assert ranks(3).run(written_to) == [True] * 3


def large() -> bool:
    mesh, link = opened()
    # Two of these do not fit in one region.
    shared.REGION_BYTES = 1 << 20
    tensors = [numbers(link.rank + n, 600_000) for n in range(3)]
    received = [link.all_gather_list([tensor], [[(600_000,)]] * 2)[1 - link.rank][0] for tensor in tensors]
    same = all(torch.equal(t, numbers(1 - link.rank + n, 600_000)) for n, t in enumerate(received))
    mesh.close()
    return same


def test_memory_grows_by_regions(ranks):
    assert ranks(2).run(large) == [True, True]


def test_a_processor_that_reorders_stores_does_without(monkeypatch):
    assert shared.possible(2)
    monkeypatch.setattr(shared.platform, "machine", lambda: "aarch64")
    assert not shared.possible(2)


def hosts_of_all(same_name: bool) -> tuple[int, ...]:
    """The hosts of a mesh's ranks, of which the last shows another process's number, as one on another machine has."""
    from ditmesh.comm import hosts

    class Far:
        """As `os`, but for the process id of the last rank: here it is another process's."""

        def __getattr__(self, name):
            return getattr(os, name)

        def getpid(self):
            return os.getppid() if dist.get_rank() == dist.get_world_size() - 1 else os.getpid()

    name = "alike" if same_name else f"host {dist.get_rank()}"
    with mock.patch.object(hosts, "os", Far()), mock.patch.object(hosts, "_system", return_value=name):
        return hosts.find_hosts(None, True).numbers


@ruled.shared_memory
def test_hosts_are_told_apart_by_their_memory_and_not_by_their_names(ranks):
    assert ranks(3).run(hosts_of_all, True) == [(0, 0, 1)] * 3
    assert ranks(3).run(hosts_of_all, False) == [(0, 1, 2)] * 3
