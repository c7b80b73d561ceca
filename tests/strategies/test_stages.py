"""Which stage has which blocks: estimated or given. The picture never depends on it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.strategies.pipefusion.pipeline import PipeFusion
from ditmesh.strategies.pipefusion.stages import balanced
from support.models import tiny
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


def cut(config: dict[str, Any]) -> dict[str, Any]:
    """Which blocks a rank holds, what it draws twice, and whether it is restored."""
    pipe = pipeline()
    before = bits(pipe.transformer)
    with ditmesh.parallelized(pipe, {**PATCHES, **config}, timeout=300):
        stages = ditmesh.engine_of(pipe).parts(PipeFusion)[0].stages
        found = {"rank": dist.get_rank(), "lengths": stages.lengths, "held": held(pipe), "drawn": drawn(pipe)}
    found["restored"] = same_bits(before, bits(pipe.transformer))
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"stages": (1, 3)}, (1, 3)),
        pytest.param({"stages": (3, 1)}, (3, 1), marks=pytest.mark.matrix),
        pytest.param({}, (2, 2), marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_given(ranks, alone, config, expected):
    """Blocks as they are said to lie, or as they are estimated."""
    for result in ranks(2).run(cut, {"pipe": 2, **config}):
        assert torch.equal(result["drawn"], alone)
        assert result["lengths"] == expected
        assert result["held"] == owns(result["rank"], expected)
        assert result["restored"]


def test_balanced_stages():
    assert balanced([1] * 12, 5) == (3, 3, 2, 2, 2)
    assert balanced([4, 1, 1, 1, 1], 2) == (1, 4)
    assert balanced([3.0], 1) == (1,)
    with pytest.raises(ditmesh.ConfigError, match="3 blocks cannot be shared by pipe=4"):
        balanced([1, 1, 1], 4)
    assert balanced([2, 2, 1, 1, 1, 1], 2) == (2, 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipe": 2, "stages": (1, 2, 3)}, r"stages=\[1, 2, 3\] are not the blocks of pipe=2"),
        ({"pipe": 2, "stages": (4, 0)}, "one number from 1 up"),
        ({"pipe": 2, "stages": "measured"}, "input should be 'estimated'"),
        ({"pipe": 2, "speeds": (1, 2)}, r"\(stages\), or leave speeds out"),
        ({"patches": 2, "ulysses": 2, "speeds": "auto"}, r"\(stages\), or leave speeds out"),
    ],
)
def test_refused(settings, words):
    with pytest.raises(ditmesh.ConfigError, match=words):
        ditmesh.ParallelConfig(**settings)


def test_stages_that_are_not_the_model_s_blocks():
    """Told before ranks are asked for anything."""
    with pytest.raises(ditmesh.ConfigError, match=r"stages=\[2, 3\] are 5 blocks, but Flux.* has 4"):
        ditmesh.parallelize(tiny("Flux"), {"pipe": 2, "stages": (2, 3)})
