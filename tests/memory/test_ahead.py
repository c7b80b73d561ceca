"""Weights that are away while a rank denoises: what docs/memory.md says of every model of the catalogue."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ditmesh.config import ParallelConfig
from ditmesh.layout.conventions import Size
from ditmesh.layout.without_values import WithoutValues, by_any_call, model_on_meta
from ditmesh.memory.catalogue import shapes
from ditmesh.memory.check import components_of_shape
from ditmesh.memory.phases import computed_ahead, needs
from ditmesh.memory.sizes import workload_of
from ditmesh.strategies.ahead import found_ahead_of

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
# By model: GB of the transformer, of what is left of it, and of the values for 50 steps of two branches.
ROWS = {
    name: [float(number) for number in numbers]
    for name, *numbers in re.findall(r"^\| `(.+?)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.MULTILINE)
}
QUICK = ("pixart-sigma", "sd3.5-medium")


def test_the_page_has_every_model() -> None:
    assert ROWS.keys() == shapes().keys()


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.matrix) for n in ROWS if n not in QUICK)])
def test_weights_that_are_away(name: str) -> None:
    shape = shapes()[name]
    workload = replace(workload_of(shape), branches=2, steps=50)
    ahead = computed_ahead(shape.transformer, shape.config, 1, workload, torch.bfloat16)
    components = replace(components_of_shape(shape), encoders={}, vae=None)
    (without,) = needs(components, ParallelConfig(), workload, torch.bfloat16, gpu=True)
    (rank,) = needs(components, ParallelConfig(precompute=True), workload, torch.bfloat16, gpu=True)
    loaded, denoising = rank.phases
    whole = without.phases[0].weights
    assert [whole / 1e9, loaded.weights / 1e9, ahead.kept / 1e9] == pytest.approx(ROWS[name], abs=0.06)
    assert loaded.weights == pytest.approx(whole - ahead.weights)
    assert denoising.weights == pytest.approx(loaded.weights + ahead.kept)
    # On a CPU host memory is where they are.
    (cpu,) = needs(components, ParallelConfig(precompute=True), workload, torch.bfloat16)
    assert cpu.phases == without.phases


OPERATIONS = {
    name: (float(share), float(total))
    for name, share, total in re.findall(r"`([\w.-]+)` ([\d.]+) % of ([\d.e+]+)", PAGE)
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.matrix) if "wan" in n else n for n in OPERATIONS])
def test_operations_that_are_saved(name: str) -> None:
    """Counted by torch, in a step of the model's own size without values."""
    shape = shapes()[name]
    workload = replace(workload_of(shape), branches=2, steps=50)
    model = model_on_meta(shape.transformer, json.dumps(shape.config, default=str))
    batch, _ = workload.calls(workload.pictures, workload.branches)
    size = Size(workload.rows, workload.cols, workload.text, batch, workload.frames)
    paths = found_ahead_of(model, size, workload.steps, torch.bfloat16).modules

    def counted(make: Any) -> tuple[int, int]:
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), WithoutValues(), counter:
            model(**make.inputs(size))
        counts = counter.get_flop_counts()
        ahead = [counts.get(f"{type(model).__name__}.{path}", {}) for path in paths]
        return sum(counts["Global"].values()), sum(sum(each.values()) for each in ahead)

    total, ahead = by_any_call(model, torch.bfloat16, counted)
    assert (round(100 * ahead / total, 2), float(f"{total:.3g}")) == OPERATIONS[name]


def test_what_goes_ahead_is_not_in_pieces() -> None:
    shape = shapes()["pixart-sigma"]
    workload = replace(workload_of(shape), branches=2, steps=50)
    components = replace(components_of_shape(shape), encoders={}, vae=None)
    config = {"ulysses": 2, "shard": 2}
    away = computed_ahead(shape.transformer, shape.config, 1, workload, torch.bfloat16)
    (pieces,), (rank,), (cpu,) = (
        needs(components, ParallelConfig(**config, precompute=ahead), workload, torch.bfloat16, gpu=gpu)
        for ahead, gpu in ((False, True), (True, True), (True, False))
    )
    loaded, denoising = rank.phases
    # What is away was half in pieces.
    assert pieces.phases[0].weights - loaded.weights == pytest.approx(away.weights / 2, rel=0.03)
    assert cpu.phases[0].weights - pieces.phases[0].weights == pytest.approx(away.weights / 2, rel=0.03)
    assert denoising.weights == pytest.approx(loaded.weights + away.kept)
    # A part that ranks cut is read onto the device.
    ((first, denoising),) = (
        each.phases
        for each in needs(components, ParallelConfig(tensor=2, precompute=True), workload, torch.bfloat16, gpu=True)
    )
    assert first.weights + away.kept == pytest.approx(denoising.weights + away.weights / 2)


def test_slices_and_branches_share_them() -> None:
    shape = shapes()["pixart-sigma"]
    workload = replace(workload_of(shape), branches=2, steps=20)
    whole = computed_ahead(shape.transformer, shape.config, 1, workload, torch.bfloat16)
    slices = computed_ahead(shape.transformer, shape.config, 2, workload, torch.bfloat16)
    half = computed_ahead(shape.transformer, shape.config, 1, replace(workload, branches=1), torch.bfloat16)
    assert slices.weights == whole.weights / 2
    assert 0 < half.kept < whole.kept
