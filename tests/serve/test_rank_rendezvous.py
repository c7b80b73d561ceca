"""Where the ranks of a replica meet, and how long they wait there."""

from __future__ import annotations

from typing import Any

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
