"""Small messages that travel together: the same tensors, fewer messages, and none of a request that is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ditmesh
from ditmesh.comm import Bundles, Hosts, Link, PeerError
from ditmesh.comm.bundle import MOST_BYTES, messages_of_bundle
from support import ruled


def opened(hosts: Sequence[int], shared_memory: bool) -> tuple[ditmesh.Mesh, Link]:
    """A mesh with all ranks on the ring, as if they were on hosts of these numbers."""
    seen = tuple(frozenset(rank for rank, other in enumerate(hosts) if other == host) for host in hosts)
    config = ditmesh.ParallelConfig(ring=len(hosts), exchange="displaced", shared_memory=shared_memory)
    with mock.patch("ditmesh.comm.grid.find_hosts", lambda group, shares: Hosts(seen, shares)):
        mesh = ditmesh.Mesh(config, timeout=60)
    return mesh, mesh.ring


def message(rank: int, step: int, number: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * step + number)
    return torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator)


def sizes_of(number: int, world: int) -> list[int]:
    """Elements of a message of every rank: unlike for every rank and number."""
    return [10 + 3 * number + rank for rank in range(world)]


def rounds(hosts: Sequence[int], shared_memory: bool, numbers: Sequence[Sequence[int]]) -> tuple[bool, list[int], int]:
    """Rounds of messages, each waited for where the same number is posted again, or at the end.

    Returns:
        Whether all are right, how many messages were sent in every round, and whether bytes are those of all messages.
    """
    mesh, link = opened(hosts, shared_memory)
    bundles, me, world = Bundles(link), link.rank, link.size
    under_way: dict[int, tuple[int, Any]] = {}
    right, sent, own = True, [], 0

    def take(number: int) -> None:
        nonlocal right
        step, transfer = under_way.pop(number)
        sizes = sizes_of(number, world)
        expected = [message(rank, step, number, sizes[rank]) for rank in range(world) if rank != me]
        right &= all(map(torch.equal, transfer.wait(), expected))

    mesh.traffic.reset()
    for step, of in enumerate(numbers):
        before = mesh.traffic.calls["ring"]
        for number in of:
            if number in under_way:
                take(number)
            sizes = sizes_of(number, world)
            under_way[number] = step, bundles.post(message(me, step, number, sizes[me]), sizes)
            own += sizes[me]
        bundles.end_round()
        sent.append(mesh.traffic.calls["ring"] - before)
    for number in [*under_way]:
        take(number)
    total = torch.tensor([mesh.traffic.bytes_across["ring"], own])
    dist.all_reduce(total)
    mesh.close()
    far = len(set(hosts)) - 1
    return right, sent, int(total[0] == far * total[1])


ALL = range(9)


@pytest.mark.parametrize(
    ("hosts", "shared_memory"),
    [((0, 1), False), ((0, 1, 2), False), ((0, 0, 1, 1), True), ((0, 0, 1), False)],
    ids=str,
)
def test_messages_travel_together(ranks, hosts, shared_memory):
    """The first round tells how many there are; a number that comes twice is waited for before it was sent."""
    numbers = [ALL, ALL, ALL, [0, 1, 1, 0, 2, 3, 5], ALL, [], ALL, [4], ALL]
    for right, sent, bytes_right in ranks(len(hosts)).run(rounds, hosts, shared_memory, numbers):
        assert right
        assert bytes_right
        # Of nine messages three travel together; the second one of a number is waited for after two of its round.
        assert sent[:4] == [9, 3, 3, 3]
        # A round without messages says nothing of the next one; after a round of one all are sent at once.
        assert sent[4:] == [3, 0, 3, 1, 9]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_ranks_of_one_host_bundle_where_they_have_no_memory_in_common(ranks, shared_memory):
    for right, sent, _ in ranks(2).run(rounds, (0, 0), shared_memory, [ALL, ALL]):
        assert right
        assert sent == [9, 9 if shared_memory and not ruled.RULED else 3]


@pytest.mark.parametrize(
    ("size", "posted", "together"),
    [(1, 12, 4), (1, 13, 5), (1, 3, 1), (1, 1, 1), (1, 0, 1), (MOST_BYTES / 3, 57, 3), (MOST_BYTES // 2 + 1, 57, 1)],
)
def test_how_many_travel_together(size, posted, together):
    assert messages_of_bundle(size, posted) == together


def large() -> list[list[int]]:
    """Messages sent after each of some posts, of messages of so many bytes, in a third round."""
    mesh, link = opened((0, 1), False)
    bundles, found = Bundles(link), []
    for sizes in ([1] * 12, [MOST_BYTES // 2, MOST_BYTES // 2 + 1, 8, MOST_BYTES // 2, MOST_BYTES // 2, 1, 1, 1, 1]):
        counts, posted = [], []
        mesh.traffic.reset()
        for size in sizes:
            posted.append(bundles.post(torch.zeros(size, dtype=torch.int8), [size, size]))
            counts.append(mesh.traffic.calls["ring"])
        bundles.end_round()
        counts.append(mesh.traffic.calls["ring"])
        found.append(counts)
        for one in posted:
            one.wait()
    mesh.close()
    return found


def test_a_bundle_is_limited(ranks):
    """A large message goes by itself, at once; one that has no place begins another bundle."""
    for _, counts in ranks(2).run(large):
        # The first is open while the second goes alone; the third has a place beside it, and the fourth has none …
        assert counts[:4] == [0, 1, 1, 2]
        # … but beside the fifth, and then there is room for nothing. Four messages are full, however small they are.
        assert counts[4:] == [2, 3, 3, 3, 3, 4]


def dropped() -> tuple[str, str, bool]:
    """What waiting says for a bundle not sent when it is dropped, and when the links are; and what comes afterwards."""
    mesh, link = opened((0, 1), False)

    def third_of(bundles: Bundles) -> Any:
        """The first of two messages of which a bundle would have three, in the second round."""
        for one in [bundles.post(torch.ones(4), [4, 4]) for _ in range(9)]:
            one.wait()
        bundles.end_round()
        first, _ = (bundles.post(torch.full((4,), 7.0), [4, 4]) for _ in range(2))
        return first

    bundles, texts = Bundles(link), []
    first = third_of(bundles)
    bundles.drop()
    first.finish()
    with pytest.raises(PeerError) as caught:
        first.wait()
    texts.append(str(caught.value))
    bundles = Bundles(link)
    first = third_of(bundles)
    group, channel = link._group, link._channel
    link.drop()
    with pytest.raises(PeerError) as caught:
        first.wait()
    texts.append(str(caught.value))
    with pytest.raises(PeerError):
        bundles.flush()
    link.connect(group, channel, (0, 1))
    again = third_of(Bundles(link))
    right = torch.equal(again.wait()[0], torch.full((4,), 7.0))
    mesh.close()
    return (*texts, right)


def test_what_was_not_sent_is_dropped(ranks):
    for first, second, right in ranks(2).run(dropped):
        assert first == second == "the request of this transfer over the ring link is over; call the model again"
        assert right
