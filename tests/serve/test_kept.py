"""Requests that keep something from step to step take turns: each picture has the bits that it has alone."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch

from ditmesh import zoo
from ditmesh.config import ParallelConfig
from ditmesh.core.kept import KeptStates
from ditmesh.generate.job import job_for
from ditmesh.generate.model_info import find_model
from ditmesh.request import PictureRequest
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.worker.protocol import Cancel, Cancelled, Finished, ModelReady, Paused, TaskFailed, TaskStepped
from ditmesh.serve.worker.room import open_requests
from ditmesh.serve.worker.turns import Waiting, next_turn
from support.batching import Owner, of, picture, task
from support.kept import Asked, in_turns

# Two sizes, and three numbers of steps.
ASKED = [Asked(0, 4), Asked(1, 3, side=96), Asked(2, 5)]
DISPLACED = {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}
PIPE = {"pipe": 2, "patches": 2, "warmup": "fixed(1)"}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        # Error feedback, prediction, drift that decides which steps are synchronous, guidance in two calls.
        ("flux", {**DISPLACED, "compress": "residual4", "predict": "linear", "warmup": "adaptive(0.1)"}),
        ("sd3", {**PIPE, "patches": 3}),
    ],
    ids=["displaced", "pipe"],
)
def test_requests_in_turns_have_the_bits_of_each_alone(ranks, name, config):
    for found in ranks(2).run(in_turns, name, config, ASKED, [0, 1]):
        assert "requests take turns by the step" in found["why"]
        assert found["same"] == [[True] * 3] * 2, found["failures"]
        assert found["others"] == 0
        assert found["switches"] >= 10
        # What was cancelled has left nothing, either.
        assert found["left"] == [0, 0]
        assert found["restored"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "size", "config"),
    [
        ("sd3", 2, {**DISPLACED, "exchange": "naive"}),
        ("sd3", 4, {**DISPLACED, "ring": 4, "text": "shard"}),
        ("sd3", 4, {**DISPLACED, "ring": 4, "warmup": "fixed(0)", "compress": "int8"}),
        ("flux", 4, {**DISPLACED, "cfg": 2}),
        ("wan", 2, DISPLACED),
        ("qwen_image", 2, DISPLACED),
        ("flux", 4, {**PIPE, "ulysses": 2}),
        ("flux", 4, {**PIPE, "pipe": 4, "patches": 4}),
        ("flux", 4, {**PIPE, "cfg": 2, "warmup": "adaptive(0.1)"}),
        ("wan", 2, PIPE),
        ("dit", 2, {**PIPE, "warmup": "fixed(0)"}),
        ("sd3", 2, {**PIPE, "reproducible": True}),
        ("sd3", 1, {"patches": 2, "warmup": "fixed(1)"}),
    ],
)
def test_random_schedules(ranks, name, size, config):
    for found in ranks(size).run(in_turns, name, config, ASKED, list(range(6))):
        assert found["same"] == [[True] * 3] * 6, found["failures"]
        assert found["left"] == [0] * 6


@pytest.mark.parametrize("config", [DISPLACED, pytest.param(PIPE, marks=pytest.mark.matrix)], ids=["displaced", "pipe"])
def test_one_state_for_all_requests_is_seen(ranks, config):
    """The planted fault."""
    for found in ranks(2).run(in_turns, "sd3", config, ASKED, [0], True):
        assert not all(found["same"][0])


# --- in a server -------------------------------------------------------------------------------------------------


PROMPTS = ["a red apple", "a green frog", "a yellow star"]


def spec(**config: Any) -> ModelSpec:
    return ModelSpec("emoji", str(zoo.path()), ParallelConfig(**config))


def serve_broken(specs: Any, *, report: Any, call: int) -> None:
    """As `serve_rank`; rank 1 has no memory in one of its calls of a served request."""
    import torch.distributed as dist
    from diffusers import SD3Transformer2DModel

    from ditmesh.serve.worker.worker import TaskScheduler, serve_rank

    whole, whole_round = SD3Transformer2DModel.forward, TaskScheduler.round
    served, calls = [], []

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        calls.extend([hidden_states.shape] if served else ())
        if len(calls) == call and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory: no room")
        return whole(self, hidden_states, *args, **kwargs)

    def one_round(self: Any) -> None:
        # The model has been looked at.
        served.append(True)
        whole_round(self)

    forward.__signature__ = inspect.signature(whole)
    SD3Transformer2DModel.forward, TaskScheduler.round = forward, one_round  # type: ignore[method-assign]
    try:
        serve_rank(specs, report=report)
    finally:
        SD3Transformer2DModel.forward, TaskScheduler.round = whole, whole_round  # type: ignore[method-assign]


def test_a_server_pauses_cancels_and_loses_one_request_alone(ranks):
    """Two requests in turns, an urgent one, one that is cancelled, one that fails on one rank; then each alone."""
    alone = [("0", "0 alone"), ("1", "1 alone"), ("2", "2 alone")]
    more: dict[str, Any] = {"1": {"width": 32, "height": 32}, "2": {"priority": 3}}
    sent = set()

    def start(id: str) -> Any:
        number = int(id[0])
        return task(id, PROMPTS[number % 3], seed=number, **more.get(id[0], {}))

    def script(message: Any, send: Any) -> None:
        if isinstance(message, ModelReady):
            for id in ("0", "1", "3"):
                send(start(id))
        if isinstance(message, TaskStepped) and (message.id, message.step) == ("0", 2):
            send(Cancel("3"))
            send(start("2"))
        ended = {one.id for one in owner.said if isinstance(one, (Finished, TaskFailed, Cancelled))}
        following = "4" if "2" in ended else None
        if {"0", "1", "2", "3", "4"} <= ended:
            following = next((id for _, id in alone if id not in ended), None)
        if following is not None and following not in sent:
            sent.add(following)
            send(start(following))

    owner = Owner(script, 8)
    broken = partial(serve_broken, call=16)
    said = owner.serve(ranks(2), [spec(**DISPLACED)], broken)
    (ready,) = of(said, ModelReady)
    assert not ready.card["batching"]
    assert "take turns by the step" in ready.card["why"]
    steps = [(one.id, one.step) for one in of(said, TaskStepped)]
    # In turns.
    assert steps.index(("1", 1)) < steps.index(("0", 2))
    (cancelled,) = of(said, Cancelled)
    assert (cancelled.id, 1 <= cancelled.step <= 3) == ("3", True)
    # Those of its key wait for the urgent one.
    assert {"0", "1"} <= {one.id for one in of(said, Paused)}
    urgent = steps.index(("2", 1))
    assert steps[urgent : urgent + 5] == [("2", n + 1) for n in range(5)]
    (failed,) = of(said, TaskFailed)
    assert (failed.id in ("0", "1", "4"), failed.code) == (True, "out_of_memory")
    for id, again in alone:
        if failed.id != id:
            assert (picture(said, id) == picture(said, again)).all()
    assert max(one.batch for one in of(said, TaskStepped)) == 2
    assert picture(said, "1 alone").shape != picture(said, "0 alone").shape
    assert abs(picture(said, "0 alone") - picture(said, "2 alone")).max() > 1


# --- decisions ---------------------------------------------------------------------------------------------------


def test_turns():
    def waiting(priority: int = 0, served: int = 0, owner: str = "a", size: float = 1.0) -> Waiting:
        return Waiting(owner, priority, size, served > 0, served)

    # The one that has waited longest; new ones first.
    assert next_turn([waiting(served=5), waiting(served=4), waiting()], 8, 16) == (2, [])
    assert next_turn([waiting(served=5), waiting(served=4), waiting(served=6)], 8, 16) == (1, [])
    # Of one owner the urgent ones; another owner's go on.
    assert next_turn([waiting(served=1), waiting(3, served=5), waiting(served=2, owner="b")], 8, 16) == (2, [0])
    # No more than take turns, and no more than there is room for: then those that are open go on.
    assert next_turn([waiting(served=1), waiting(served=2), waiting()], 2, 16) == (0, [])
    assert next_turn([waiting(served=1), waiting(served=2), waiting(3)], 2, 2) == (0, [])
    assert next_turn([waiting(served=1), waiting(served=2), waiting(3)], 2, 3) == (2, [0, 1])
    assert next_turn([waiting(served=1), waiting(served=2), waiting(3, size=4)], 8, 4) == (0, [])
    # One may be open however large it is; paused ones go on where they leave no room.
    assert next_turn([waiting(size=40)], 8, 4) == (0, [])
    assert next_turn([waiting(served=1), waiting(3, size=2)], 1, 2) == (0, [])


def test_states_are_values():
    kept = KeptStates()
    settled: list[list[int]] = []
    keeper = kept.keeper(list, settle=settled.append, size=len)
    one, two = kept.new(), kept.new()
    kept.take_up(one)
    keeper.value.append(1)
    kept.put_aside()
    kept.take_up(two)
    assert keeper.value == []
    keeper.value.append(2)
    kept.put_aside()
    kept.take_up(one)
    assert keeper.value == [1]
    assert settled == [[1], [2]]
    assert (kept.nbytes(one), kept.nbytes(two), len([*keeper.every()])) == (1, 1, 2)
    del two
    assert [*keeper.every()] == [[1]]


def test_open_requests_fit_into_memory():
    """Beside weights and one request's peak, each further one takes what is kept of it."""
    info = find_model(str(zoo.path()))
    config = ParallelConfig(**DISPLACED)
    job = job_for(info, PictureRequest(prompt="a red apple"), "", config=config, dtype="float32")

    def fit(limit: float | None, each: float) -> int:
        limited = job.changed(memory_limit=limit)
        return open_requests(limited, info, torch.device("cpu"), each, 16, lambda value: [value] * 2, 0)

    assert fit(None, 1e3) == 16
    assert fit(1e12, 1e3) == 16
    assert fit(1e6, 1e3) == 1
    few = [fit(200e6, each) for each in (1e6, 10e6, 100e6)]
    assert sorted(few, reverse=True) == few
    assert few[-1] < few[0]
