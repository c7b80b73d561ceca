"""Fixtures that every test file may use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from ditmesh.launch import RankPool

# Nothing a test does may reach for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)``: a pool of n ranks with one thread each, kept for the session.

    A pool that a failing test has closed is replaced at the next call.
    """
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or pool.closed:
            pool = pools[world_size] = RankPool(world_size, threads=1, timeout=120.0)
        return pool

    yield get
    for pool in pools.values():
        pool.close()
