"""Which stage has which blocks: estimated, given, measured, weighted. The picture never depends on it."""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.strategies.pipefusion.pipeline import PipeFusion
from ditmesh.strategies.pipefusion.stages import balanced, kinds_of
from support.clocks import SimulatedClock, measured_by
from support.models import relative_error, tiny
from support.pipelines import MAKERS, arguments, draw
from support.tensor import bits, same_bits

PATCHES = {"patches": 4, "warmup": "fixed(1)"}


def pipeline() -> Any:
    """Flux with two blocks of two streams and two of one; a copy, whose weights may be moved about."""
    pipe = MAKERS["flux"]()
    pipe.transformer = copy.deepcopy(pipe.transformer)
    return pipe


def drawn(pipe: Any) -> torch.Tensor:
    return draw(pipe, arguments("flux", [1, 2], steps=4))


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """The picture of one device that sweeps over four patches."""
    pipe = pipeline()
    with ditmesh.parallelized(pipe, PATCHES):
        return drawn(pipe)


def held(pipe: Any) -> list[bool]:
    """Whether this rank holds the weights of each block."""
    model = pipe.transformer
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    return [all(parameter.numel() > 0 for parameter in block.parameters()) for block in blocks]


def owns(rank: int, lengths: tuple[int, ...]) -> list[bool]:
    return [stage == rank for stage, length in enumerate(lengths) for _ in range(length)]


def cut(config: dict[str, Any], slow: str = "", slow_rank: int | None = None, again: bool = False) -> dict[str, Any]:
    """What a configuration cuts before, after one request and after another one, by a simulated clock.

    Args:
        config: how.
        slow: block list whose blocks take 100 ms more than the 20 ms of every block.
        slow_rank: the rank on which they do; None: on all.
        again: the blocks are no longer slow, and the second request measures again.
    """
    pipe = pipeline()
    before = bits(pipe.transformer)
    found: dict[str, Any] = {"rank": dist.get_rank()}
    blocks = pipe.transformer.get_submodule(slow) if slow else []
    nap = 0.1 if slow_rank in (None, dist.get_rank()) else 0.0
    clock = SimulatedClock()
    model = pipe.transformer
    for norm in [block.norm1 for block in model.transformer_blocks] + [b.norm for b in model.single_transformer_blocks]:
        norm.register_forward_pre_hook(lambda *_: clock.sleep(0.02))
    handles = [block.norm.register_forward_pre_hook(lambda *_: clock.sleep(nap)) for block in blocks]
    with measured_by(clock), ditmesh.parallelized(pipe, {**PATCHES, **config}, timeout=300):
        stages = ditmesh.engine_of(pipe).parts(PipeFusion)[0].stages
        found["before"], found["held before"] = stages.lengths, held(pipe)
        found["first"] = drawn(pipe)
        found["after"], found["held"], found["speeds"] = stages.lengths, held(pipe), stages.balance.speeds
        costs = stages.costs
        if again:
            for handle in handles:
                handle.remove()
            ditmesh.engine_of(pipe).rebalance()
        found["second"] = drawn(pipe)
        found["costs"], found["later costs"], found["later"] = costs, stages.costs, stages.lengths
        found["later speeds"] = stages.balance.speeds
    found["restored"] = same_bits(before, bits(pipe.transformer))
    return found


def check(results: list[dict[str, Any]], truth: torch.Tensor) -> dict[str, Any]:
    """What must hold for every cut; returns what the first rank found."""
    for result in results:
        assert torch.equal(result["first"], truth)
        assert torch.equal(result["second"], truth)
        assert result["held before"] == owns(result["rank"], result["before"])
        assert result["held"] == owns(result["rank"], result["after"])
        assert result["restored"]
        for what in ("before", "after", "later", "costs", "speeds", "later speeds"):
            assert result[what] == results[0][what], what
    return results[0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"stages": (1, 3)}, (1, 3)),
        pytest.param({"stages": (3, 1)}, (3, 1), marks=pytest.mark.matrix),
        pytest.param({"speeds": (3, 1)}, (3, 1), marks=pytest.mark.matrix),
        ({"speeds": (1, 3)}, (1, 3)),
    ],
    ids=str,
)
def test_given(ranks, alone, config, expected):
    """Blocks as they are said to lie, or as the speeds say; nothing moves later."""
    found = check(ranks(2).run(cut, {"pipe": 2, **config}), alone)
    assert found["before"] == found["after"] == found["later"] == expected


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_measured(ranks, alone, shared):
    """Blocks that take longer than their weights say: the first call finds out, and blocks move with their weights.

    The slow kind comes last, so that the second stage ends up with one of its two blocks.
    """
    slow = "single_transformer_blocks"
    found = check(
        ranks(2).run(cut, {"pipe": 2, "stages": "measured", "shared_memory": shared}, slow, None, True), alone
    )
    assert found["before"] == (2, 2)
    assert found["after"] == (3, 1)
    double, single = found["costs"][0], found["costs"][2]
    assert found["costs"] == [double, double, single, single]
    assert single > 3 * double
    # Measured again without the delay, mixed half and half with what it was.
    assert found["later costs"][2] / found["later costs"][0] < 0.9 * single / double


@pytest.mark.matrix
def test_measured_beside_ranks_that_share_rows(ranks, alone):
    """All ranks of the job cut alike, those of other rows included."""
    found = ranks(4).run(cut, {"pipe": 2, "data": 2, "stages": "measured"}, "single_transformer_blocks")
    assert {result["after"] for result in found} == {(3, 1)}
    assert all(torch.equal(result["first"], found[0]["first"]) and result["restored"] for result in found)
    # Rows run by themselves: other shapes, other last bits.
    assert relative_error(found[0]["first"], alone) <= 1e-5


def test_speeds_are_measured(ranks, alone):
    """A slow rank gets fewer blocks; the costs stay estimates."""
    found = check(ranks(2).run(cut, {"pipe": 2, "speeds": "auto"}, "single_transformer_blocks", 1, True), alone)
    assert found["before"] == (2, 2)
    assert found["after"] == (3, 1)
    assert found["speeds"][0] > 2 * found["speeds"][1]
    assert found["speeds"][1] < found["later speeds"][1] < found["later speeds"][0]
    assert found["costs"] == found["later costs"]


def loaded(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """A pipeline loaded stage by stage whose blocks move in the first call."""
    absent = {key: None for key, part in MAKERS["flux"]().components.items() if part is None}
    whole = diffusers.DiffusionPipeline.from_pretrained(folder, **absent)
    pipe = ditmesh.load(folder, {**PATCHES, **config}, **absent)
    stages = ditmesh.engine_of(pipe).parts(PipeFusion)[0].stages
    clock = SimulatedClock()
    for block in pipe.transformer.transformer_blocks:
        block.norm1.register_forward_pre_hook(lambda *_: clock.sleep(0.02))
    for block in pipe.transformer.single_transformer_blocks:
        block.norm.register_forward_pre_hook(lambda *_: clock.sleep(0.12))
    before, first = stages.lengths, held(pipe)
    with measured_by(clock):
        picture = drawn(pipe)
    after, then = stages.lengths, held(pipe)
    ditmesh.restore(pipe)
    return {
        "cut": [before, after],
        "held": [first, then],
        "rank": dist.get_rank(),
        "picture": picture,
        "restored": same_bits(bits(whole.transformer), bits(pipe.transformer)),
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"stages": "measured"}, [(2, 2), (3, 1)]),
        pytest.param({"speeds": (1, 3)}, [(1, 3), (1, 3)], marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_loaded_stage_by_stage(ranks, alone, tmp_path, config, expected):
    """A rank reads the blocks of the first cut only; those that move come from the stage that has them."""
    pipeline().save_pretrained(tmp_path)
    for result in ranks(2).run(loaded, str(tmp_path), {"pipe": 2, **config}):
        assert result["cut"] == expected
        assert result["held"] == [owns(result["rank"], lengths) for lengths in expected]
        assert torch.equal(result["picture"], alone)
        assert result["restored"]


def test_speeds_in_the_cut():
    assert balanced([1] * 12, 2, (2, 1)) == (8, 4)
    assert balanced([1] * 12, 3, (1, 1, 4)) == (2, 2, 8)
    assert balanced([2, 2, 1, 1, 1, 1], 2, (3, 1)) == (4, 2)
    # Against all cuts, by brute force.
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        costs = torch.randint(1, 9, (7,), generator=generator).tolist()
        speeds = torch.randint(1, 5, (3,), generator=generator).tolist()

        def slowest(a: int, b: int, costs: list[int] = costs, speeds: list[int] = speeds) -> float:
            parts = costs[:a], costs[a:b], costs[b:]
            return max(sum(part) / speed for part, speed in zip(parts, speeds, strict=True))

        first, second, _ = balanced(costs, 3, speeds)
        assert slowest(first, first + second) == min(slowest(a, b) for a in range(1, 6) for b in range(a + 1, 7))


def test_kinds():
    """Blocks that differ in their weights cost differently: SD3.5's first has a second attention, its last no text."""
    models = {name: tiny(name) for name in ("DiT", "Flux", "SD3", "HunyuanDiT")}
    found = {name: kinds_of(model, ditmesh.layout.layout_of(model)) for name, model in models.items()}
    assert found == {"DiT": [0, 0, 0], "Flux": [0, 0, 1, 1], "SD3": [0, 1, 2], "HunyuanDiT": [0, 0, 0, 1]}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipe": 2, "stages": (1, 2, 3)}, r"stages=\[1, 2, 3\] are not the blocks of pipe=2"),
        ({"pipe": 2, "stages": (4, 0)}, "one number from 1 up"),
        ({"stages": (4,), "speeds": (1,)}, "leave speeds"),
        ({"pipe": 2, "stages": "guessed"}, "estimated, measured"),
        ({"pipe": 2, "speeds": (1, 2, 3)}, "the 2 stages; give one speed for each"),
        ({"pipe": 2, "ulysses": 2, "speeds": (1, 1, 2, 2)}, "sequence ranks of a stage share evenly"),
        ({"patches": 2, "ulysses": 2, "speeds": (1, 2)}, "use pipe=2 or more, or leave speeds out"),
    ],
)
def test_refused(settings, words):
    with pytest.raises(ditmesh.ConfigError, match=words):
        ditmesh.ParallelConfig(**settings)


def test_stages_that_are_not_the_model_s_blocks():
    """Told before ranks are asked for anything."""
    with pytest.raises(ditmesh.ConfigError, match=r"stages=\[2, 3\] are 5 blocks, but Flux.* has 4"):
        ditmesh.parallelize(tiny("Flux"), {"pipe": 2, "stages": (2, 3)})


def nothing_measured() -> str:
    with ditmesh.parallelized(tiny("Flux"), {"pipe": 2, "stages": (2, 2)}) as model:
        try:
            ditmesh.engine_of(model).rebalance()
        except ditmesh.ConfigError as error:
            return str(error)
    return ""


def test_given_stages_are_not_measured(ranks):
    assert all("or stages='measured'" in message for message in ranks(2).run(nothing_measured))
