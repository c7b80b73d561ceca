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
