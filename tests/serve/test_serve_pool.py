"""A pool of ranks that change between the steps of a request: every picture is the one that one rank draws."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from ditmesh.serve.schedule.core import Scheduler
from ditmesh.serve.worker.adaptive import serve_pool
from ditmesh.serve.worker.protocol import Beat, Finished, ModelReady, TaskFailed, TaskStepped
from support.batching import Owner, alone, at_once, of, picture, save_lora, task
from support.pool import PROMPTS, InTurn, RandomScheduler, drawn, drawn_by_schedules, pictures, pool_spec, serve_with

SEEDS = (0, 1, 2)
# Random schedules in the matrix, and how many of them ranks follow that load the model once.
SCHEDULES, TOGETHER = int(os.environ.get("DITMESH_TEST_SCHEDULES", "50")), 25
# Three steps: ranks, batches and pauses change twice.
SMALL = {"width": 32, "height": 32, "steps": 3}


@pytest.fixture(scope="module")
def of_one_rank_small(ranks: Any) -> list[np.ndarray]:
    """Pictures of one rank with the settings of reproducible mode."""
    said = drawn(ranks(1), pool_spec(1, reproducible=True), Scheduler(1), SEEDS, **SMALL)
    return pictures(said, SEEDS)


def test_a_random_schedule_gives_the_bits_of_one_rank(ranks, of_one_rank_small):
    said = drawn(ranks(2), pool_spec(2, reproducible=True), RandomScheduler(2, seed=7), SEEDS, **SMALL)
    for found, expected in zip(pictures(said, SEEDS), of_one_rank_small, strict=True):
        assert np.array_equal(found, expected)
    # The ranks have shared calls, or there would be nothing to compare.
    assert of(said, Beat)[-1].bytes


def test_requests_change_ranks_where_no_call_is_shared(ranks, of_one_rank_small):
    spec = replace(pool_spec(2, reproducible=True), widest=1)
    starts = [task(str(seed), PROMPTS[seed % 4], seed=seed, **SMALL) for seed in SEEDS]
    # Without a backlog a rank goes on with a request as soon as it has a result of another rank's.
    for serve in (serve_pool, partial(serve_with, "adaptive.BACKLOG", 0)):
        own = partial(serve, scheduler=RandomScheduler(2, seed=3))
        said = Owner(at_once(*starts), len(SEEDS)).serve(ranks(2), [spec], own)
        for found, expected in zip(pictures(said, SEEDS), of_one_rank_small, strict=True):
            assert np.array_equal(found, expected)
        (ready,) = of(said, ModelReady)
        assert set(ready.modes) == {(1, 1)}
        assert not sum(of(said, Beat)[-1].bytes.values())


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 1000 + SCHEDULES, TOGETHER))
def test_random_schedules_give_the_bits_of_one_rank(ranks, of_one_rank_small, first):
    """Ranks, batches, pauses and joins at random; one more request of each schedule is cancelled."""
    numbers = range(first, min(first + TOGETHER, 1000 + SCHEDULES))
    found, sent = drawn_by_schedules(ranks(2), pool_spec(2, reproducible=True), numbers, SEEDS, **SMALL)
    assert sorted(found) == list(numbers)
    for number, drawn_ in found.items():
        for one, expected in zip(drawn_, of_one_rank_small, strict=True):
            assert np.array_equal(one, expected), number
    # In every schedule the ranks have shared calls.
    assert len(set(sent)) == len(numbers)


def test_pictures_of_a_pool_are_those_of_one_device(ranks):
    starts = [task(str(n), prompt, seed=n) for n, prompt in enumerate(PROMPTS)]
    starts.append(task("size", PROMPTS[0], width=66, height=64))
    said = Owner(at_once(*starts), 5).serve(ranks(2), [pool_spec(2)], serve_pool)
    (ready,) = of(said, ModelReady)
    assert ready.card["batching"]
    assert set(ready.modes) == {(1, 1), (2, 1), (1, 2)}
    (failed,) = of(said, TaskFailed)
    assert (failed.id, failed.code) == ("size", "invalid_request")
    for n, prompt in enumerate(PROMPTS):
        assert abs(picture(said, str(n)) - alone(prompt, n)).max() <= 1
        assert [one.step for one in of(said, TaskStepped, str(n))] == [1, 2, 3, 4, 5]
    # Four requests on two ranks: some have shared calls of two branches each.
    assert max(one.batch for one in of(said, TaskStepped)) > 2
    assert {one.id for one in of(said, Finished)} == {"0", "1", "2", "3"}


def test_requests_with_and_without_an_adapter_take_turns_in_shared_calls(ranks, tmp_path):
    """The copies of the transformer that ranks share have those adapters on that the call is for."""
    loras = {"oil": str(save_lora(tmp_path, 1))}
    starts = [task(str(n), PROMPTS[n], seed=n, steps=3, loras=[{"name": "oil"}][: n % 2]) for n in (0, 1)]
    drawn_by = []
    for size, scheduler in ((1, Scheduler(1)), (2, InTurn(2))):
        spec = replace(pool_spec(size, reproducible=True), loras=loras)
        said = Owner(at_once(*starts), 2).serve(ranks(size), [spec], partial(serve_pool, scheduler=scheduler))
        drawn_by.append(pictures(said, (0, 1)))
    assert of(said, Beat)[-1].bytes
    for expected, found in zip(*drawn_by, strict=True):
        assert np.array_equal(found, expected)


def serve_broken(specs: Any, *, report: Any) -> None:
    """As `serve_pool`; the second call that two ranks share fails on rank 1."""
    import torch.distributed as dist

    from ditmesh.serve.worker.placements import Placement

    whole, calls = Placement.call, []

    def broken(self: Any, *of: Any) -> Any:
        calls.append(of)
        if len(calls) == 2 and dist.get_rank() == 1:
            raise RuntimeError("on purpose")
        return whole(self, *of)

    Placement.call = broken  # type: ignore[method-assign]
    try:
        serve_pool(specs, report=report)
    finally:
        Placement.call = whole  # type: ignore[method-assign]


@pytest.mark.matrix
def test_a_call_that_fails_on_one_of_two_ranks_costs_no_request(ranks):
    """The request begins again on one rank, the links are made again, and the next request is shared."""

    def script(message: Any, send: Any) -> None:
        at_once(task("0", PROMPTS[0]))(message, send)
        if isinstance(message, Finished) and message.id == "0":
            send(task("1", PROMPTS[1], seed=1))

    said = Owner(script, 2).serve(ranks(2), [pool_spec(2)], serve_broken)
    for n in (0, 1):
        assert abs(picture(said, str(n)) - alone(PROMPTS[n], n)).max() <= 1
    steps = [one.step for one in of(said, TaskStepped, "0")]
    assert steps[-5:] == [1, 2, 3, 4, 5]
    assert of(said, Beat)[-1].bytes
