"""Training on islands: outer steps between runs of their own, against the algorithm spelt out in one process."""

from __future__ import annotations

import csv
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from ditmesh.errors import ConfigError, InputError, RankFailed
from ditmesh.launch import RankPool
from ditmesh.train import TrainConfig
from ditmesh.train.islands.link import BLOCK, Compressor
from ditmesh.zoo import path as find
from support.islands import free_port, spelt_out, weights_of
from support.train import folder_of, settings

EVERY, STEPS = 2, 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("data"), 16)


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], list[RankPool]]]:
    """``pools(n)``: two islands of n ranks."""
    made: dict[int, list[RankPool]] = {}

    def get(size: int) -> list[RankPool]:
        if any(pool.closed for pool in made.get(size, ())):
            made.pop(size)
        return made.setdefault(size, [RankPool(size, threads=1, timeout=120.0) for _ in range(2)])

    yield get
    for pool in (pool for some in made.values() for pool in some):
        pool.close()


def on_islands(pools: list[RankPool], function: Callable[..., Any], *given: dict[str, Any]) -> list[Any]:
    """What a function returns on the first rank of every island, or raises; each with its own argument."""
    found: list[Any] = [None] * len(given)

    def run(index: int) -> None:
        try:
            found[index] = pools[index].run(function, given[index])[0]
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def runs(data: Path, out: Path, islands: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """The settings of two islands."""
    meet = f"127.0.0.1:{free_port()}"
    given = {"max_train_steps": STEPS, "learning_rate": 1e-3, "lora": {"rank": 4}, **more}
    return [settings(data, out, islands={"count": 2, "index": k, "meet": meet, **islands}, **given) for k in range(2)]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    scale = max(float(value.abs().max()) for value in other.values())
    for name, value in one.items():
        assert float((value - other[name]).abs().max()) <= tolerance * scale, name


DILOCO = {"every": EVERY}
LOCAL_SGD = {"every": EVERY, "learning_rate": 1.0, "momentum": 0.0}


@pytest.mark.parametrize(
    "islands",
    [
        pytest.param(DILOCO, marks=pytest.mark.matrix),
        pytest.param(LOCAL_SGD, marks=pytest.mark.matrix),
        pytest.param({**DILOCO, "compress": "int8"}, marks=pytest.mark.matrix),
        {**DILOCO, "start": 2, "compress": "int8"},
        {"every": 3, "delay": 1},
    ],
    ids=str,
)
def test_two_islands_are_the_algorithm_spelt_out_to_the_bit(pools, data, tmp_path, islands):
    given = runs(data, tmp_path / "out", islands)
    found = on_islands(pools(1), weights_of, *given)
    assert_equal(found[0]["weights"], found[1]["weights"])
    truth = spelt_out([settings(data, tmp_path / f"alone-{k}", **_plain(given[k])) for k in range(2)], **islands)
    assert_equal(found[0]["weights"], truth)
    # The sign: an outer step of zero length would leave what was there.
    assert found[0]["steps"] == STEPS


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    own = ("pretrained_model_name_or_path", "train_data_dir", "output_dir", "islands")
    return {name: value for name, value in given.items() if name not in own}


def test_one_island_is_a_run_without_islands(data, tmp_path):
    plain = settings(data, tmp_path / "plain", max_train_steps=2, lora={"rank": 2})
    one = settings(data, tmp_path / "one", max_train_steps=2, lora={"rank": 2}, islands={"count": 1})
    assert_equal(weights_of(one)["weights"], weights_of(plain)["weights"])


def test_exchanging_in_every_step_is_synchronous_training(pools, data, tmp_path):
    """With SGD, weights averaged in every step are those of one device with the samples of both islands."""
    given = {"optimizer": "SGD", "learning_rate": 1e-2, "max_train_steps": 3, "max_grad_norm": 0.0}
    outer = {"every": 1, "learning_rate": 1.0, "momentum": 0.0}
    found = on_islands(pools(1), weights_of, *runs(data, tmp_path / "out", outer, **given))
    whole = {**given, "lora": {"rank": 4}, "global_batch_size": 4}
    assert_equal(found[0]["weights"], weights_of(settings(data, tmp_path / "one", **whole))["weights"], 1e-6)


def test_gradients_of_the_start_are_those_of_all_islands(pools, data, tmp_path):
    given = {"max_train_steps": 3, "max_grad_norm": 0.5}
    found = on_islands(pools(1), weights_of, *runs(data, tmp_path / "out", {"start": 3}, **given))
    whole = {**given, "lora": {"rank": 4}, "learning_rate": 1e-3, "global_batch_size": 4}
    assert_equal(found[0]["weights"], weights_of(settings(data, tmp_path / "one", **whole))["weights"], 1e-4)


@pytest.mark.parametrize(
    ("parallel", "more"),
    [
        ({"data": 2}, {"global_batch_size": 4}),
        pytest.param({"tensor": 2}, {"lora": None, "max_train_steps": 3}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_islands_of_two_ranks(pools, data, tmp_path, parallel, more):
    """The curve depends on the islands and not on the ranks inside; equal ranks send a share of the changes each."""
    alone = on_islands(pools(1), weights_of, *runs(data, tmp_path / "1", DILOCO, **more))
    found = on_islands(pools(2), weights_of, *runs(data, tmp_path / "2", DILOCO, parallel=parallel, **more))
    assert_equal(found[0]["weights"], found[1]["weights"])
    assert_equal(found[0]["weights"], alone[0]["weights"], 1e-4)
    if "data" in parallel:
        assert found[0]["sent"] == pytest.approx(alone[0]["sent"] / 2, rel=0.01)


@pytest.mark.parametrize(
    "islands",
    [pytest.param(DILOCO, marks=pytest.mark.matrix), {"every": 3, "compress": "int8", "delay": 1}],
    ids=str,
)
def test_a_run_resumed_between_outer_steps_is_the_whole_run(pools, data, tmp_path, islands):
    more = {"max_train_steps": 6, "use_ema": True, "checkpointing_steps": 3}
    whole = on_islands(pools(1), weights_of, *runs(data, tmp_path / "whole", islands, **more))
    first = runs(data, tmp_path / "parts", islands, **more)
    half = on_islands(pools(1), weights_of, *({**one, "until": 3} for one in first))
    assert 3 <= half[0]["steps"] < 6
    again = runs(data, tmp_path / "parts", islands, **more, resume_from_checkpoint="latest")
    found = on_islands(pools(1), weights_of, *again)
    assert found[0]["resumed"] == half[0]["steps"]
    for key in ("weights", "average"):
        assert_equal(found[0][key], whole[0][key])
    with (tmp_path / "parts" / "islands.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    with (tmp_path / "whole" / "islands.csv").open(newline="") as file:
        assert [row["step"] for row in rows] == [row["step"] for row in csv.DictReader(file)]
    assert all(-1 <= float(row["agreement"]) <= 1 for row in rows)


def test_late_gradients_are_those_of_the_step_before(pools, data, tmp_path):
    given = {"optimizer": "SGD", "learning_rate": 1e-2, "max_grad_norm": 0.0, "max_train_steps": 2}
    found = on_islands(pools(1), weights_of, *runs(data, tmp_path / "out", {"exchange": "late_gradients"}, **given))
    # Two steps apply one gradient: the first step's.
    whole = {**given, "lora": {"rank": 4}, "global_batch_size": 4, "max_train_steps": 1}
    assert_equal(found[0]["weights"], weights_of(settings(data, tmp_path / "one", **whole))["weights"], 1e-6)
    assert_equal(found[0]["weights"], found[1]["weights"])


def test_auto_exchanges_as_often_as_its_share_of_the_time_allows(pools, data, tmp_path):
    given = runs(data, tmp_path / "out", {"every": "auto", "overhead": 1e-6}, max_train_steps=12)
    found = on_islands(pools(1), weights_of, *given)
    # The first exchange comes after ten steps, and the next one after as many as can be.
    assert [one["every"] for one in found] == [500, 500]
    assert_equal(found[0]["weights"], found[1]["weights"])


def test_islands_that_do_not_fit_together_are_refused_alike(pools, data, tmp_path):
    given = runs(data, tmp_path / "out", DILOCO)
    other = {**given[1], "learning_rate": 2e-3}
    found = on_islands(pools(1), weights_of, given[0], other)
    for error in found:
        assert isinstance(error, (InputError, RankFailed))
        assert "islands 0 and 1 differ in learning_rate: 0.001 and 0.002; give all islands the same" in str(error)


def test_islands_with_other_weights_are_refused(pools, data, tmp_path):
    """A model may lie in another folder on every host, and has to be the same one."""
    given = runs(data, tmp_path / "out", DILOCO)
    pipe = diffusers.DiffusionPipeline.from_pretrained(find("emoji-sd3"))
    pipe.save_pretrained(tmp_path / "same")
    with torch.no_grad():
        pipe.transformer.proj_out.bias[0] += 1e-3
    pipe.save_pretrained(tmp_path / "other")
    moved = {**given[1], "pretrained_model_name_or_path": str(tmp_path / "same"), "max_train_steps": 1}
    found = on_islands(pools(1), weights_of, {**given[0], "max_train_steps": 1}, moved)
    assert_equal(found[0]["weights"], found[1]["weights"])
    given = runs(data, tmp_path / "others", DILOCO)
    other = {**given[1], "pretrained_model_name_or_path": str(tmp_path / "other")}
    for error in on_islands(pools(1), weights_of, given[0], other):
        assert "islands 0 and 1 differ in weights: " in str(error)


def test_an_island_that_fails_ends_the_others_in_a_sentence(pools, data, tmp_path):
    given = runs(data, tmp_path / "out", DILOCO)
    found = on_islands(pools(1), weights_of, given[0], {**given[1], "fails": 3})
    assert "planted" in str(found[1])
    assert "another island than 0 has ended, or did not answer within" in str(found[0])


def test_islands_that_do_not_meet_are_named(data, tmp_path):
    (given, _) = runs(data, tmp_path / "out", DILOCO)
    with pytest.raises(InputError, match=r"island 0 has not met the other 1 at 127\.0\.0\.1:\d+ within 1 s"):
        weights_of({**given, "timeout": 1.0})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"islands": {"count": 2, "index": 2}}, r"index=2 is none of count=2 islands; use 0 to 1"),
        ({"islands": {"every": 5, "delay": 5}}, "delay=5 is not shorter than every=5 steps"),
        ({"islands": {"exchange": "late_gradients", "momentum": 0.5}}, "momentum is for exchange='weights'"),
        ({"islands": {"every": 5}, "mixed_precision": "fp16"}, "use bf16 or no"),
        ({"islands": {"evry": 5}}, "'islands.evry' is no training setting; did you mean 'every'"),
        ({"islands": {"meet": "nowhere"}}, "islands.meet"),
    ],
)
def test_settings_that_do_not_fit_are_refused(data, tmp_path, more, words):
    with pytest.raises(ConfigError, match=words):
        TrainConfig.read(settings(data, tmp_path, **more))


@pytest.mark.parametrize(("kind", "bound"), [("bf16", 2**-8), ("int8", 1 / 254)])
def test_compressed_changes_lose_nothing_in_the_long_run(kind, bound):
    """Rounding is bounded by the largest value of a block, and what it takes is sent later."""
    values = torch.randn(3 * BLOCK + 7, generator=torch.Generator().manual_seed(0))
    codec, sent = Compressor(kind), torch.zeros_like(values)
    assert len(codec.encode(values)) == (2 if kind == "bf16" else 1) * len(values) + (
        0 if kind == "bf16" else 4 * 4 + -len(values) % BLOCK
    )
    codec = Compressor(kind)
    for turn in range(1, 9):
        sent += codec.decode(codec.encode(values), len(values))
        largest = values.abs().max() + (0 if codec.lost is None else codec.lost.abs().max())
        assert float((sent - turn * values).abs().max()) <= float(largest) * bound * 1.01
