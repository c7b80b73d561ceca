"""Whole pipelines of many families: what the ranks draw together is what the unmodified pipeline draws.

Not here: nothing that diffusers 0.42 has a DiT pipeline and a reviewed layout for has been left out.
"""

from __future__ import annotations

from typing import Any

import pytest

import ditmesh
from ditmesh.engine import denoisers
from ditmesh.layout import layout_of
from support.models import relative_error
from support.more_pipelines import FAMILIES, draw

TOLERANCE = 1e-4  # of latents; float32

SEQUENTIAL = [name for name, family in FAMILIES.items() if family.guidance == "sequential"]
BATCHED = [name for name, family in FAMILIES.items() if family.guidance == "batched"]
GUIDED = [name for name, family in FAMILIES.items() if family.guidance]


def compared(name: str, config: dict[str, Any], prompts: list[int], steps: int = 3) -> tuple[float, float, int]:
    """Draws the prompts together, in parallel, and each alone, by the unmodified pipeline in the same process.

    Returns:
        The largest error of any result against its own prompt drawn alone, the smallest difference from another
        prompt drawn with the same noise, and how often this rank ran the transformers' first blocks.
    """
    pipe = FAMILIES[name].make()
    alone = [draw(name, pipe, [prompt], seed=row, steps=steps) for row, prompt in enumerate(prompts)]
    # Another prompt with the first one's noise: how far off a mixed-up prompt would be.
    other = [draw(name, pipe, [prompt + 5], seed=row, steps=steps) for row, prompt in enumerate(prompts)]
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    handles = []
    for model in denoisers(pipe):
        layout = layout_of(model)
        assert layout is not None
        first = model.get_submodule(layout.regions[0].blocks)[0]
        handles.append(first.register_forward_pre_hook(count))
    try:
        with ditmesh.parallelized(pipe, config):
            together = draw(name, pipe, prompts, steps=steps)
    finally:
        for handle in handles:
            handle.remove()
    assert len(together) == len(prompts)
    own = max(relative_error(result, truth[0]) for result, truth in zip(together, alone, strict=True))
    wrong = min(relative_error(result, truth[0]) for result, truth in zip(together, other, strict=True))
    return own, wrong, runs


def belongs(results: list[tuple[float, float, int]]) -> None:
    for own, wrong, _ in results:
        assert own < TOLERANCE
        assert wrong > 100 * TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_over_two_ranks(ranks, name):
    belongs(ranks(2).run(compared, name, {"ulysses": 2}, [1]))


@pytest.mark.parametrize("name", FAMILIES)
def test_three_prompts_over_two_ranks(ranks, name):
    belongs(ranks(2).run(compared, name, {"data": 2}, [1, 2, 3]))


@pytest.mark.parametrize("name", GUIDED)
def test_guidance_over_two_ranks(ranks, name):
    belongs(ranks(2).run(compared, name, {"cfg": 2}, [1]))


@pytest.mark.parametrize("name", ["wan", "qwen_image", "pixart", "z_image"])
def test_guidance_and_tokens_over_four_ranks(ranks, name):
    belongs(ranks(4).run(compared, name, {"cfg": 2, "ulysses": 2}, [1, 2]))
