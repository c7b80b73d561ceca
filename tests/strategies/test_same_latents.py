"""Latents and results that differ from rank to rank are named before the request ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.strategies.same_latents import ROUGH, SUMS, relative_distance, sums_of
from support import ruled
from support.models import relative_error
from support.pipelines import MAKERS, arguments, draw

TOLERANCE = 1e-4


def called(config: dict[str, Any], what: str, name: str = "sd3") -> str:
    """What a request with a callback ends in: a sentence, or its error against one device with that callback."""
    rank = dist.get_rank()
    pipe = MAKERS[name]()
    generator = torch.Generator().manual_seed(0)

    def callback(_, step, __, tensors):
        latents = tensors["latents"]
        if what == "noise" and step == 1:
            own = torch.Generator().manual_seed(rank)
            return {"latents": latents + 0.3 * torch.randn(latents.shape, generator=own)}
        if what == "last" and step == 3:
            return {"latents": latents * (1 + 0.3 * rank)}
        if what == "nan" and step == 1:
            return {"latents": latents * (torch.nan if rank else 1.0)}
        if what == "nan everywhere" and step == 1:
            return {"latents": latents * torch.nan}
        if what == "mirrored" and step == 1:
            return {"latents": latents.flip(-1) if rank else latents}
        if what == "alike":
            return {"latents": latents + 0.1 * torch.randn(latents.shape, generator=generator)}
        return {}

    made = arguments(name, [1, 2], steps=4)
    truth = None
    if what == "alike":
        truth = draw(pipe, {**made, "callback_on_step_end": callback})
        generator.manual_seed(0)
        made = arguments(name, [1, 2], steps=4)
    with ditmesh.parallelized(pipe, config):
        try:
            picture = draw(pipe, {**made, "callback_on_step_end": callback})
        except ruled.refusal(ditmesh.InputError) as error:
            # The ranks go on with the next request.
            draw(pipe, arguments(name, [1], steps=1))
            return str(error)
    return "drawn" if truth is None else f"off by {relative_error(picture, truth):.1e}"


@pytest.mark.parametrize(
    "config",
    [
        {"tensor": 2},
        {"cfg": 2},
        {"ulysses": 2, "reproducible": True},
        {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
    ],
    ids=str,
)
def test_latents_that_differ_are_named(ranks, config):
    for words in ranks(2).run(called, config, "noise"):
        assert "rank 1 has other latents in step 3 than rank 0" in words


@pytest.mark.parametrize(
    ("what", "named"), [("nan", "latents in step 3"), ("mirrored", "latents in step 3"), ("last", "images at the end")]
)
def test_whatever_differs_is_named(ranks, what, named):
    for words in ranks(2).run(called, {"ring": 2}, what):
        assert f"rank 1 has other {named} than rank 0" in words


def test_what_is_the_same_on_all_ranks_is_not_stopped(ranks):
    assert ranks(2).run(called, {"ring": 2}, "nan everywhere") == ["drawn", "drawn"]
    for words in ranks(2).run(called, {"ulysses": 2}, "alike"):
        assert float(words.removeprefix("off by ")) < TOLERANCE


def test_ranks_that_are_trusted_are_not_compared(ranks):
    assert ranks(2).run(called, {"ring": 2, "inputs": "trust"}, "noise") == ["drawn", "drawn"]


@pytest.mark.parametrize("size", [1, SUMS - 1, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_tell_what_is_other(size, dtype):
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = sums_of(values)
    assert len(sums) <= 2 * SUMS
    assert relative_distance(sums, sums_of(values.clone())) == 0
    assert relative_distance(sums, sums_of(values * 1.2)) > ROUGH
    assert relative_distance(sums, sums_of(torch.cat([values, values]))) > ROUGH
    holed = values.clone()
    holed[-1] = torch.nan
    assert relative_distance(sums, sums_of(holed)) == relative_distance(sums_of(holed), sums) == float("inf")
    assert relative_distance(sums_of(holed), sums_of(holed.clone())) == 0
    # What rounds in another way is the same.
    assert relative_distance(sums, sums_of(values * (1 + 1e-6))) < 1e-4
    if size == 1000:
        assert relative_distance(sums, sums_of(values.flip(0))) > ROUGH
        noise = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert relative_distance(sums, sums_of(values + 0.1 * noise)) > ROUGH
