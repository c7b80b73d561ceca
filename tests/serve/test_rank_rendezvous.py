"""Where the ranks of a replica meet, and how long they wait there."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch


def deadline_and_values() -> tuple[float, list[Any]]:
    from ditmesh.serve.worker.rendezvous import HostAllGather

    gather = HostAllGather()
    try:
        group = gather._group._get_backend(torch.device("cpu"))
        return group.options._timeout.total_seconds(), gather(gather.rank)
    finally:
        gather.close()


def test_ranks_wait_for_one_another_as_long_as_the_job_says(ranks) -> None:
    """A new group of torch would wait for half an hour, whatever the deadline of the ranks is."""
    assert ranks(2).run(deadline_and_values) == [(120.0, [0, 1])] * 2


def said(sockets: bool) -> tuple[list[Any], list[Any], bool]:
    """On a rank: what it hears, short and long, from rank 0, or on rank 0 from the other; whether over sockets."""
    from queue import SimpleQueue

    from ditmesh.serve.worker.rendezvous import HostAllGather
    from ditmesh.serve.worker.wire import Channel, Ending

    gather, heard = HostAllGather(), SimpleQueue[Any]()
    channel = Channel(gather.rank, 2, heard.put, gather if sockets else None)
    sent = [gather.rank, b"x" * 100_000, [gather.rank]]
    if gather.rank == 0:
        channel.publish([*sent, Ending()])
        found = [heard.get(timeout=60) for _ in sent]
    else:
        for one in sent:
            channel.tell(one)
        found = [channel.events.get(timeout=60) for _ in sent]
    channel.close()
    gather.close()
    return sent, found, channel._sockets is not None


@pytest.mark.parametrize("sockets", [True, False])
def test_messages_of_a_pool_arrive_in_order_however_long_they_are(ranks, sockets: bool) -> None:
    (sent_by_0, heard_by_0, over), (sent_by_1, heard_by_1, _) = ranks(2).run(said, sockets)
    assert (heard_by_0, heard_by_1) == (sent_by_1, sent_by_0)
    assert over is sockets


def unreached() -> Any:
    """On a rank: connections with rank 0, whose folder is not on rank 1's host."""
    from ditmesh.serve.worker import sockets
    from ditmesh.serve.worker.rendezvous import HostAllGather

    gather = HostAllGather()
    real, sockets._reached = sockets._reached, lambda path, rank: real(f"{path}-elsewhere", rank)
    try:
        return sockets.connected(gather.rank, gather.size, gather)
    finally:
        sockets._reached = real
        gather.close()


def test_ranks_of_other_hosts_have_no_sockets(ranks) -> None:
    assert ranks(2).run(unreached) == [None, None]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have priorities of their own on Linux")
def test_a_thread_that_gives_way_is_the_only_one() -> None:
    import os
    import threading

    from ditmesh.serve.worker.priority import give_way

    before, found = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), []
    thread = threading.Thread(target=lambda: (give_way(), found.append(os.getpriority(os.PRIO_PROCESS, 0))))
    thread.start()
    thread.join()
    assert found == [min(19, before + 10)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
