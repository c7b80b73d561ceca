"""Ranks of a server on fake CUDA devices: requests, previews, and a pool whose ranks change between steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from ditmesh.serve.worker.adaptive import serve_pool
from ditmesh.serve.worker.protocol import Beat, Finished, Preview
from ditmesh.serve.worker.worker import serve_rank
from nccl_rules.fake_cuda import unavailable
from support.batching import Owner, at_once, of, picture, task
from support.pool import PROMPTS, RandomScheduler, pool_spec
from support.served_on_fake_cuda import serve_on_gpu, serve_pool_on_gpu

pytestmark = [pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())), pytest.mark.matrix]

SMALL = {"width": 32, "height": 32, "steps": 3, "previews": 1}


def compared(pool: Any, spec: Any, on_cpu: Any, on_gpu: Any) -> None:
    """Pictures of two requests on CPUs and on fake GPUs; the ranks say where they compute."""
    found = []
    for function in (on_cpu, on_gpu):
        starts = [task(str(n), PROMPTS[n], seed=n, **SMALL) for n in range(2)]
        said = Owner(at_once(*starts), 2).serve(pool, [spec], function)
        assert {one.id for one in of(said, Finished)} == {"0", "1"}
        assert {one.id for one in of(said, Preview)} == {"0", "1"}
        found.append([picture(said, str(n)) for n in range(2)])
    for one, other in zip(*found, strict=True):
        assert abs(one - other).max() <= 1
    devices = {one.device for beat in of(said, Beat) for one in beat.ranks}
    assert devices == {"cuda:0"}


@pytest.mark.parametrize("config", [{}, {"ulysses": 2}, {"cfg": 2}], ids=str)
def test_ranks_that_serve(ranks, config):
    size = 2 if config else 1
    spec = pool_spec(0, **config)
    compared(ranks(size), spec, serve_rank, serve_on_gpu)


@pytest.mark.parametrize("seed", [3, 7])
def test_a_pool_hands_requests_from_rank_to_rank(ranks, seed):
    """Begun on one rank, recalled, gone on with on another or on both, decoded where the schedule says."""
    one, other = (partial(serve, scheduler=RandomScheduler(2, seed=seed)) for serve in (serve_pool, serve_pool_on_gpu))
    compared(ranks(2), pool_spec(2), one, other)
