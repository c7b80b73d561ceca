"""What the tests of gradients run on every rank: one training step in parallel against one device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import ditmesh
from ditmesh.layout.conventions import Size
from ditmesh.strategies.tensor.slices import plan
from ditmesh.train import reduce_gradients
from support.models import inputs, sizes, tiny

# What may require a gradient besides parameters: latents, and what text encoders make.
LEAVES = ("hidden_states", "encoder_hidden_states", "pooled_projections")


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A copy of arguments, with floating-point tensors in a dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value.clone()
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, dtype) for item in value)
    return value


def fresh(name: str, size: Size, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    """Arguments of a call of which latents and embeddings require gradients, other ones for every seed."""
    arguments = cast(inputs(name, size), dtype)
    generator = torch.Generator().manual_seed(seed)
    for leaf in LEAVES:
        if isinstance(arguments.get(leaf), Tensor):
            value = arguments[leaf]
            arguments[leaf] = (
                value + 0.1 * torch.randn(value.shape, generator=generator, dtype=dtype)
            ).requires_grad_()
    return arguments


def loss_of(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """A loss of the whole output in which every element has a weight of its own."""
    output = model(**arguments)[0]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (output * weights.to(output.dtype)).mean() + output.square().mean()


def gradients(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of parameters and inputs by name; those that the loss does not depend on are left out."""
    model.zero_grad(set_to_none=True)
    loss_of(model, arguments).backward()
    return collected(model, arguments)


def collected(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    found = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    leaves = {f"input {leaf}": arguments[leaf] for leaf in LEAVES if isinstance(arguments.get(leaf), Tensor)}
    found.update({key: leaf.grad.clone() for key, leaf in leaves.items() if leaf.grad is not None})
    return found


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, str]:
    """The worst relative error of a gradient, and whose it is; of tiny ones relative to the largest of all."""
    if found.keys() != truth.keys():
        return float("inf"), f"gradients of {sorted(found.keys() ^ truth.keys())}"
    floor = 1e-3 * max(float(value.abs().max()) for value in truth.values())
    return max(
        (float((found[key] - value).abs().max() / max(float(value.abs().max()), floor)), key)
        for key, value in truth.items()
    )


def sliced(whole: dict[str, Tensor], model: nn.Module, degree: int, rank: int) -> dict[str, Tensor]:
    """One device's gradients as a tensor-parallel rank is to have them."""
    if degree == 1:
        return whole
    cut = {key: (dim, part) for key, dim, part in plan(model, degree).parameters()}
    found = {}
    for key, value in whole.items():
        dim, part = cut.get(key, (None, None))
        if key in cut and dim is None:
            value = value if rank == 0 else torch.zeros_like(value)
        elif part is not None and dim is not None:
            value = part.copy(value, dim, rank)
        found[key] = value
    return found


@contextmanager
def in_double() -> Iterator[None]:
    """Models that go to float32 in places, on one device as well, go to float64 there."""
    cast_to = Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        stays = tensor.dtype == torch.float64 and torch.float32 in args
        return tensor if stays else cast_to(tensor, *args, **kwargs)

    with mock.patch.object(Tensor, "float", Tensor.double), mock.patch.object(Tensor, "to", to):
        yield


def training_step(
    name: str, config: dict[str, Any], dtype: str = "float64", size: str = "B=2 ragged"
) -> dict[str, tuple[float, str]]:
    """Steps in parallel against the unmodified model: the worst error of a gradient, and whose it is.

    One as it is, one after a forward without gradients with activation checkpointing, and one in which two calls of
    different sizes are under way.
    """
    with in_double() if dtype == "float64" else nullcontext():
        return _training_step(name, config, getattr(torch, dtype), size)


def _training_step(name: str, config: dict[str, Any], dtype: torch.dtype, size: str) -> dict[str, tuple[float, str]]:
    model = copy.deepcopy(tiny(name)).to(dtype)
    own = config.get("inputs") == "per-data-rank"
    data, tensor = config.get("data", 1) if own else 1, config.get("tensor", 1)
    # The last one is of another size.
    shapes = [sizes(name)[size]] * data + [sizes(name)["B=1"]]
    truths = [gradients(model, fresh(name, shape, dtype, seed)) for seed, shape in enumerate(shapes)]
    truth = {key: sum(one[key] for one in truths[:-1]) / data for key in truths[0]}
    found = {}
    with ditmesh.parallelized(model, config):
        mesh = ditmesh.engine_of(model).mesh
        seed = mesh.data.rank if own else 0
        expected = sliced(truth, tiny(name), tensor, mesh.tensor.rank)

        def finished(*calls: dict[str, Any]) -> dict[str, Tensor]:
            leaves = [leaf for call in calls for leaf in call.values() if isinstance(leaf, Tensor)]
            reduce_gradients(model, mesh, leaves)
            return collected(model, calls[0])

        model.zero_grad(set_to_none=True)
        arguments = fresh(name, shapes[0], dtype, seed)
        loss_of(model, arguments).backward()
        found["plain"] = error(finished(arguments), expected)
        model.enable_gradient_checkpointing()
        with torch.no_grad():
            model(**arguments)
        model.zero_grad(set_to_none=True)
        arguments, other = fresh(name, shapes[0], dtype, seed), fresh(name, shapes[-1], dtype, data)
        first, second = loss_of(model, arguments), loss_of(model, other)
        first.backward()
        found["checkpointing"] = error(finished(arguments), expected)
        model.zero_grad(set_to_none=True)
        second.backward()
        found["the other call"] = error(finished(other), sliced(truths[-1], tiny(name), tensor, mesh.tensor.rank))
        model.disable_gradient_checkpointing()
    return found
