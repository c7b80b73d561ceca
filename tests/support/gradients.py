"""What the tests of gradients run on every rank: one training step in parallel against one device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FirstBlockCacheConfig
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ditmesh
from ditmesh.attention import kernels
from ditmesh.core.digests import digest, tensor_digest
from ditmesh.core.intercept import sdpa
from ditmesh.layout.conventions import Size
from ditmesh.strategies.determinism import deterministic
from ditmesh.strategies.tensor.parallel import TensorParallel, _adapter_parameters, _base_parameters
from ditmesh.train import reduce_gradients
from ditmesh.train.gradients.ordered import OrderedGradients, weight_gradients
from support import lora
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
    return weighted(output_of(model, arguments))


def output_of(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    # Of a model of video and sound, both.
    parts = [output for part in model(**arguments)[:] for output in (part if isinstance(part, list) else [part])]
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])


def weighted(output: Tensor) -> Tensor:
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


def sliced(whole: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """One device's gradients as this rank of a parallel model is to have them, after its first call."""
    tensor = ditmesh.engine_of(model).context.models[0].find(TensorParallel)
    if tensor is None:
        return whole
    cut = {
        id(parameter): (dim, site.cut)
        for site in tensor.plan.sites
        for parameter, dim in _base_parameters(site, tensor._base(site))
    }
    for site, outer in tensor._linears():
        cut.update({id(parameter): (dim, site.cut) for parameter, dim in _adapter_parameters(site, outer)})
    ids, found = {key: id(parameter) for key, parameter in model.named_parameters()}, {}
    for key, value in whole.items():
        dim, part = cut.get(ids.get(key, 0), (None, None))
        if part is None:
            found[key] = value
        elif dim is None:
            found[key] = value if tensor.link.rank == 0 else torch.zeros_like(value)
        else:
            found[key] = part.copy(value, dim, tensor.link.rank)
    return found


@contextmanager
def in_double(name: str) -> Iterator[None]:
    """A model that goes to float32 in places, on one device as well, goes to float64 there."""
    # Made in here, the model that is kept for later tests would have tables in float64.
    tiny(name)
    cast_to = Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        stays = tensor.dtype == torch.float64 and torch.float32 in args
        return tensor if stays else cast_to(tensor, *args, **kwargs)

    with mock.patch.object(Tensor, "float", Tensor.double), mock.patch.object(Tensor, "to", to):
        yield


def training_step(
    name: str, config: dict[str, Any], dtype: str = "float64", size: str = "B=2 ragged", adapted: bool = False
) -> dict[str, tuple[float, str]]:
    """Steps in parallel against the unmodified model: the worst error of a gradient, and whose it is.

    One as it is, one after a forward without gradients with activation checkpointing, and one in which two calls of
    different sizes are under way.

    ``adapted``: train LoRA adapters only.
    """
    with in_double(name) if dtype == "float64" else nullcontext():
        return _training_step(name, config, getattr(torch, dtype), size, adapted)


def _training_step(
    name: str, config: dict[str, Any], dtype: torch.dtype, size: str, adapted: bool
) -> dict[str, tuple[float, str]]:
    model = copy.deepcopy(tiny(name)).to(dtype)
    if adapted:
        torch.manual_seed(5)
        model.add_adapter(lora.settings(4))
    own = config.get("inputs") == "per-data-rank"
    data = config.get("data", 1) if own else 1
    # The last one is of another size.
    shapes = [sizes(name)[size]] * data + [sizes(name)["B=1"]]
    truths = [gradients(model, fresh(name, shape, dtype, seed)) for seed, shape in enumerate(shapes)]
    truth = {key: sum(one[key] for one in truths[:-1]) / data for key in truths[0]}
    found = {}
    with ditmesh.parallelized(model, config):
        mesh = ditmesh.engine_of(model).mesh
        seed = mesh.data.rank if own else 0

        def finished(*calls: dict[str, Any]) -> dict[str, Tensor]:
            leaves = [leaf for call in calls for leaf in call.values() if isinstance(leaf, Tensor)]
            reduce_gradients(model, mesh, leaves)
            return collected(model, calls[0])

        model.zero_grad(set_to_none=True)
        arguments = fresh(name, shapes[0], dtype, seed)
        loss_of(model, arguments).backward()
        expected, of_other = sliced(truth, model), sliced(truths[-1], model)
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
        found["the other call"] = error(finished(other), of_other)
        model.disable_gradient_checkpointing()
    return found


def bytes_of_a_step(name: str, config: dict[str, Any]) -> list[dict[str, int]]:
    """Bytes that this rank sends by axis in a forward, and in its backward."""
    model, size = copy.deepcopy(tiny(name)), sizes(name)["B=2 ragged"]
    with ditmesh.parallelized(model, config):
        traffic = ditmesh.engine_of(model).mesh.traffic
        # The first call is compared with one device.
        loss_of(model, fresh(name, size, torch.float32))
        traffic.reset()
        loss = loss_of(model, fresh(name, size, torch.float32))
        forward = dict(traffic.bytes_sent)
        traffic.reset()
        loss.backward()
        return [forward, dict(traffic.bytes_sent)]


def three_steps(model: nn.Module, call: nn.Module, name: str, seeds: list[int], finish: Any) -> dict[str, Tensor]:
    """Three steps of AdamW on means over calls with inputs of these seeds; the parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(3):
        for seed in seeds:
            (
                loss_of(call, fresh(name, sizes(name)["B=2 ragged"], torch.float64, 10 * step + seed)) / len(seeds)
            ).backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
    return {
        key: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for key, p in model.named_parameters()
    }


def trained(name: str, config: dict[str, Any], how: str, checkpointing: bool) -> tuple[float, str]:
    """Three optimizer steps with torch's own data parallelism over the gradient group, against one device."""
    with in_double(name):
        return _trained(name, config, how, checkpointing)


def _trained(name: str, config: dict[str, Any], how: str, checkpointing: bool) -> tuple[float, str]:
    # In float64: AdamW divides by what is next to nothing for some parameters.
    alone, model = (copy.deepcopy(tiny(name)).double() for _ in range(2))
    before = {key: p.detach().clone() for key, p in alone.named_parameters()}
    data = config.get("data", 1)
    truth = three_steps(alone, alone, name, list(range(data)), lambda: None)
    if checkpointing:
        model.enable_gradient_checkpointing()
    ditmesh.parallelize(model, config)
    mesh = ditmesh.engine_of(model).mesh
    truth, before = sliced(truth, model), sliced(before, model)
    call: nn.Module = model
    finish = lambda: None  # noqa: E731
    if how == "DDP":
        call = DistributedDataParallel(model, process_group=mesh.gradient_group, find_unused_parameters=True)
    elif how == "FSDP2":
        # torch remembers meshes by their ranks and names, and this one's group is gone after `restore`.
        over = DeviceMesh.from_group(mesh.gradient_group, "cpu", mesh_dim_names=(mesh.gradient_group.group_name,))
        for block in (*model.transformer_blocks, *getattr(model, "single_transformer_blocks", ())):
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
    else:
        finish = partial(reduce_gradients, model, mesh)
    values = three_steps(model, call, name, [mesh.data.rank], finish)
    changed = {key: values[key] - before[key] for key in before}
    # In place there is no way back from shards of slices.
    with pytest.raises(ditmesh.PeerError) if how == "FSDP2" and mesh.tensor.size > 1 else nullcontext():
        ditmesh.restore(model)
    return error(changed, {key: truth[key] - before[key] for key in before})


STALE = [
    {"ring": 2, "exchange": "displaced"},
    {"ring": 2, "exchange": "naive"},
    {"pipe": 2},
    {"cfg": 2},
    {"ulysses": 2, "compile": "eager"},
]


class Frozen:
    """A kernel without a gradient."""

    name = "frozen"
    deterministic = True

    def supports(self, q: Tensor, mask: Tensor | None) -> bool:
        return True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        return sdpa(q.detach(), k.detach(), v.detach(), attn_mask=mask, scale=scale)


def refusals() -> dict[str, str]:
    """What is said to who asks for gradients that there are none of."""
    model, found = copy.deepcopy(tiny("Flux")), {}
    arguments = fresh("Flux", sizes("Flux")["B=2 ragged"], torch.float32)

    def note(what: str, config: dict[str, Any], **others: Any) -> None:
        with ditmesh.parallelized(model, config):
            try:
                model(**{**arguments, **others})
                found[what] = ""
            except ditmesh.DitmeshError as refused:
                found[what] = str(refused)

    for config in STALE:
        note(ditmesh.ParallelConfig(**config).describe(), config)
    with mock.patch.dict(kernels.KERNELS):
        kernels.register(Frozen())
        note("kernel", {"ulysses": 2, "attention": "frozen"})
        note("kernel by tiles", {"ulysses": 2, "attention": "frozen", "reproducible": True})
    note("rows", {"data": 2, "reproducible": True})
    block = model.transformer_blocks[1]
    block.dropping = torch.nn.Dropout(0.1)
    note("dropout", {"ulysses": 2, "reproducible": True})
    del block.dropping
    note("inputs", {"ulysses": 2}, hidden_states=arguments["hidden_states"].detach() + dist.get_rank())
    note(
        "leaves", {"ulysses": 2}, hidden_states=arguments["hidden_states"].detach().requires_grad_(dist.get_rank() > 0)
    )
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    note("cache", {"ulysses": 2})
    model.disable_cache()
    model.requires_grad_(False)
    for leaf in LEAVES:
        arguments[leaf] = arguments[leaf].detach()
    note("nothing to train", {"ring": 2, "exchange": "displaced"})
    return found


def mixed_precision(config: dict[str, Any]) -> tuple[float, float]:
    """Under autocast to bfloat16: how far gradients are from one device's under autocast, and those from float32's."""
    model, size = copy.deepcopy(tiny("SD3")), sizes("SD3")["B=2 ragged"]
    exact = gradients(model, fresh("SD3", size, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        truth = gradients(model, fresh("SD3", size, torch.float32))
        model.zero_grad(set_to_none=True)
        with ditmesh.parallelized(model, config):
            arguments = fresh("SD3", size, torch.float32)
            loss_of(model, arguments).backward()
            leaves = [leaf for leaf in arguments.values() if isinstance(leaf, Tensor)]
            reduce_gradients(model, ditmesh.engine_of(model).mesh, leaves)
            found = collected(model, arguments)

    def off(values: dict[str, Tensor]) -> float:
        return max(float((values[key] - exact[key]).norm() / exact[key].norm()) for key in exact)

    return off(found), off(truth)


def ordered_step(
    name: str, config: dict[str, Any], size: str = "B=2 ragged"
) -> dict[str, tuple[tuple[float, str], str, bool]]:
    """Gradients in reproducible mode: their worst error against the unmodified model, and a digest of their bits.

    Of two calls under way, without activation checkpointing and with it; and whether both have the outputs of calls
    without gradients before them, to the bit.
    """
    model = copy.deepcopy(tiny(name))
    shapes = [sizes(name)[size], sizes(name)["B=1"]]
    truths = [gradients(model, fresh(name, shape, torch.float32, seed)) for seed, shape in enumerate(shapes)]
    found = {}
    with ditmesh.parallelized(model, {**config, "reproducible": True}):
        mesh = ditmesh.engine_of(model).mesh
        with deterministic("cpu"):
            # HunyuanDiT's class has none.
            for checkpointing in (False, True) if model._supports_gradient_checkpointing else (False,):
                model.zero_grad(set_to_none=True)
                calls = [fresh(name, shape, torch.float32, seed) for seed, shape in enumerate(shapes)]
                if checkpointing:
                    model.enable_gradient_checkpointing()
                with torch.no_grad():
                    drawn = [output_of(model, call) for call in calls]
                outputs = [output_of(model, call) for call in calls]
                same = all(map(torch.equal, drawn, outputs))
                for what, output, call, truth in zip(("one", "other"), outputs, calls, truths, strict=True):
                    weighted(output).backward()
                    reduce_gradients(model, mesh)
                    values = collected(model, call)
                    bits = digest(sorted((key, tensor_digest(value)) for key, value in values.items()))
                    found[f"{what} call, checkpointing={checkpointing}"] = error(values, truth), bits, same
                    model.zero_grad(set_to_none=True)
        if model._supports_gradient_checkpointing:
            model.disable_gradient_checkpointing()
    return found


def ordered_data(name: str, data: int) -> tuple[tuple[float, str], str]:
    """As `ordered_step`, of four micro-batches shared out over data ranks: the mean of their gradients."""
    model, size = copy.deepcopy(tiny(name)), sizes(name)["B=1"]
    truths = [gradients(model, fresh(name, size, torch.float32, seed)) for seed in range(4)]
    truth = {key: sum(one[key] for one in truths) / 4 for key in truths[0] if not key.startswith("input")}
    with ditmesh.parallelized(model, {"data": data, "reproducible": True, "inputs": "per-data-rank"}):
        mesh = ditmesh.engine_of(model).mesh
        parameters = list(model.parameters())
        ordered = OrderedGradients(parameters, weight_gradients(model), mesh)
        # Every rank has others, and not in a row.
        shares = [range(rank, 4, data) for rank in range(data)]
        model.zero_grad(set_to_none=True)
        with deterministic("cpu"):
            for number in shares[mesh.data.rank]:
                (loss_of(model, fresh(name, size, torch.float32, number)) / 4).backward()
                ordered.take(number, 4)
            ordered.reduce(shares)
        found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return error(found, truth), digest(sorted((key, tensor_digest(value)) for key, value in found.items()))
