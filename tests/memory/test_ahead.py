"""Weights that are away while a rank denoises: what docs/memory.md says of every model of the catalogue."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ditmesh.config import ParallelConfig
from ditmesh.core import values
from ditmesh.core.alive import LiveBytes, manual_collection
from ditmesh.core.arguments import Arguments, parameter_names
from ditmesh.core.clock import CallClock
from ditmesh.core.patching import CallChain
from ditmesh.layout.conventions import Conventions, Size
from ditmesh.layout.without_values import WithoutValues, by_any_call, model_on_meta
from ditmesh.memory.catalogue import shapes
from ditmesh.memory.check import components_of_shape
from ditmesh.memory.phases import computed_ahead, needs
from ditmesh.memory.sizes import workload_of
from ditmesh.strategies.ahead import found_ahead_of, modules_ahead
from ditmesh.strategies.precomputed import PrecomputedModel

DOCS = Path(__file__).parents[2] / "docs"
PAGE, LAB = ((DOCS / page).read_text(encoding="utf-8") for page in ("memory.md", "lab/exact.md"))


def by_model(page: str, numbers: str) -> dict[str, list[float]]:
    """The numbers of such rows of a page."""
    found = re.findall(rf"^\| `(.+?)` (\| {numbers} \|)$", page, re.MULTILINE)
    return {name: [float(size) for size in re.findall(r"[\d.]+", sizes)] for name, sizes in found}


# GB of the transformer, of what is left of it, and of the values for 50 steps of two branches.
ROWS = by_model(PAGE, r"[\d.]+ \| [\d.]+ \| [\d.]+")
# GB on the device: loaded whole and with values ahead, and the most, with what is predicted of the latter.
PEAKS = by_model(LAB, r"[\d.]+ \| [\d.]+ \(.+")
QUICK = ("pixart-sigma",)


def test_the_page_has_every_model() -> None:
    assert ROWS.keys() == shapes().keys() > PEAKS.keys() > {"flux.1-dev", "qwen-image", "hunyuan-video", "minimax-h3"}
    assert OPERATIONS.keys() == {"pixart-sigma", "ltx-video", "wan-1.3b"}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.matrix) for n in ROWS if n not in QUICK)])
def test_weights_that_are_away(name: str) -> None:
    shape = shapes()[name]
    workload = replace(workload_of(shape), branches=2, steps=50)
    ahead = computed_ahead(shape.transformer, shape.config, 1, workload, torch.bfloat16)
    components = replace(components_of_shape(shape), encoders={}, vae=None, other=0.0)
    (without,) = needs(components, ParallelConfig(), workload, torch.bfloat16, gpu=True)
    (rank,) = needs(components, ParallelConfig(precompute=True), workload, torch.bfloat16, gpu=True)
    loaded, denoising = rank.phases
    whole = without.phases[0].weights
    assert [whole / 1e9, loaded.weights / 1e9, ahead.kept / 1e9] == pytest.approx(ROWS[name], abs=0.06)
    assert loaded.weights == pytest.approx(whole - ahead.weights)
    assert denoising.weights == pytest.approx(loaded.weights + ahead.kept)


class OnDevice(LiveBytes):
    """The most bytes of tensors and of weights that are on the device, of a model whose weights leave it."""

    def __init__(self, model: nn.Module) -> None:
        held = (*model.parameters(), *model.buffers())
        super().__init__(held)
        self.whole = sum({id(one): one.nbytes for one in held}.values())
        self.most, self.part = 0.0, cast("PrecomputedModel | None", None)

    @property
    def weights(self) -> float:
        away = {} if self.part is None else self.part._away
        return self.whole - sum(value.nbytes for parameter, value in away.items() if not parameter.numel())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.now + self.weights)
        return out


def counted_bytes(name: str, ahead: bool, steps: int) -> tuple[float, float, float]:
    """Bytes of a model of its own size on the device: when it is loaded, the most in a request, and of values.

    What computes is the strategy itself, behind weights that wait in host memory as `ditmesh.load` leaves them.
    """
    shape = shapes()[name]
    workload = workload_of(shape)
    size = Size(workload.rows, workload.cols, workload.text, 1, workload.frames)
    model = model_on_meta(shape.transformer, json.dumps(shape.config, default=str))

    def requested(make: Conventions) -> tuple[float, float, float]:
        call, alive = make.inputs(size), OnDevice(model)
        given = Arguments(parameter_names(type(model).forward), (), call)
        mesh, plain = SimpleNamespace(device=torch.device("cpu")), ParallelConfig()
        context = SimpleNamespace(clock=CallClock(), mesh=mesh, pipe=None, config=plain)
        parallel = SimpleNamespace(model=model, layout=None, chain=CallChain(model), find=lambda _: None)
        part = PrecomputedModel(parallel, context)  # type: ignore[arg-type]
        part.frees_weights = True
        paths = modules_ahead(model) if ahead else ()
        part._homeless = {each for path in paths for each in model.get_submodule(path).parameters()}
        alive.part = part
        # There are no values by which a scheduler's timesteps could be found.
        part._later = lambda time: [{path: seen.value for path, seen in time.items()}] * (steps - 1)  # type: ignore[method-assign]
        with (
            mock.patch.object(values, "PLAIN_TYPES", (*values.PLAIN_TYPES, FakeTensor)),
            mock.patch.object(torch.Tensor, "data_ptr", lambda one: one.numel() and one.untyped_storage()._cdata),
            WithoutValues(),
            torch.no_grad(),
        ):
            part.begin(ahead)
            loaded = alive.weights
            with alive:
                for _ in range(steps if ahead else 1):
                    part.around_call(lambda one: model(*one.args, **one.kwargs), given)
            rows = [row.row for row in part._rows]
            kept = {id(leaf): leaf.nbytes for leaf in tree_leaves(rows) if isinstance(leaf, torch.Tensor)}
            assert part.hits == (steps - 1) * ahead
            part.close()
        return loaded, alive.most, float(sum(kept.values()))

    with manual_collection():
        return by_any_call(model, torch.bfloat16, requested)


# None of them in the quick tests: a model of its own size takes half a minute.
@pytest.mark.matrix
@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_is_lower_by_what_goes_ahead(name: str) -> None:
    """Counted in a request of four steps at the model's own size, by the bytes of tensors without values."""
    shape = shapes()[name]
    workload = replace(workload_of(shape), branches=1, steps=4)
    components = replace(components_of_shape(shape), encoders={}, vae=None, other=0.0)
    away = computed_ahead(shape.transformer, shape.config, 1, workload, torch.bfloat16)
    whole, before, _ = counted_bytes(name, False, 4)
    loaded, most, kept = counted_bytes(name, True, 4)
    (rank,) = needs(components, ParallelConfig(precompute=True), workload, torch.bfloat16, gpu=True)
    predicted = [phase.total for phase in rank.phases]
    sizes = [size / 1e9 for size in (whole, loaded, predicted[0], before, most, predicted[1])]
    assert sizes == pytest.approx(PEAKS[name], abs=0.06)
    assert kept == pytest.approx(away.kept, rel=0.01)
    assert abs(whole - loaded - away.weights) < 0.03 * whole
    assert abs(before - most - away.weights + away.kept) < 0.03 * whole
    assert predicted == pytest.approx([loaded, most], rel=0.1)


OPERATIONS = {
    name: (float(share), float(total))
    for name, share, total in re.findall(r"`([\w.-]+)` ([\d.]+) % of ([\d.e+]+)", LAB)
}


@pytest.mark.parametrize(
    "name", [n if "pixart" in n else pytest.param(n, marks=pytest.mark.matrix) for n in OPERATIONS]
)
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
    components = replace(components_of_shape(shape), encoders={}, vae=None, other=0.0)
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
    # Encoders are cut before they are there.
    components, cut = components_of_shape(shape), ParallelConfig(tensor=2, text_encoder="tensor")
    ((load, encode, *_),) = (each.phases for each in needs(components, cut, workload, torch.bfloat16, gpu=True))
    assert load.weights == encode.weights
