"""Weights that are away while a rank denoises: what docs/memory.md says of every model of the catalogue."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ditmesh.config import ParallelConfig
from ditmesh.memory.ahead import computed_ahead
from ditmesh.memory.catalogue import shapes
from ditmesh.memory.check import components_of_shape
from ditmesh.memory.phases import needs
from ditmesh.memory.sizes import workload_of

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


def test_slices_and_branches_share_them() -> None:
    shape = shapes()["pixart-sigma"]
    workload = replace(workload_of(shape), branches=2, steps=20)
    whole = computed_ahead(shape.transformer, shape.config, 1, workload, torch.bfloat16)
    slices = computed_ahead(shape.transformer, shape.config, 2, workload, torch.bfloat16)
    half = computed_ahead(shape.transformer, shape.config, 1, replace(workload, branches=1), torch.bfloat16)
    assert slices.weights == whole.weights / 2
    assert 0 < half.kept < whole.kept
