"""What the tensor-parallel tests run on every rank, and the figures they expect, from shapes alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

import ditmesh
from ditmesh.comm import Link
from ditmesh.layout.conventions import Size
from support.models import inputs, relative_error, run, sizes, tiny
from support.parity import parity
from support.patched import everything, same


def without_sum(name: str, config: dict[str, Any], size: Size) -> float:
    """The negative control: error of `parity` when no rank adds the others' partial results."""
    with mock.patch.object(Link, "all_reduce", lambda self, tensor: tensor):
        return parity(name, config, size)["error"]


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    # Not by state_dict(), which a model with parts of its weights refuses.
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in named}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def memory(name: str, config: dict[str, Any]) -> dict[str, float]:
    """Bytes of the parameters' own memory on this rank, whole and cut."""
    model = tiny(name)
    whole = _storage(model)
    with ditmesh.parallelized(model, config):
        cut = _storage(model)
    return {"whole": whole, "cut": cut, "after": _storage(model)}


def _storage(model: nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def replicated(name: str) -> int:
    """Parameters of the tiny models that tensor parallelism leaves whole, counted by hand from their modules."""
    model = tiny(name)
    linear = {
        "DiT": "pos_embed proj_out_1 proj_out_2",
        "PixArt": "pos_embed caption_projection adaln_single.linear proj_out scale_shift_table",
        "SD3": "pos_embed context_embedder time_text_embed.text_embedder proj_out",
        "Flux": "context_embedder x_embedder time_text_embed.text_embedder proj_out",
    }[name].split()
    ends = ("to_out.0.bias", "to_add_out.bias", "net.2.bias", "linear_2.bias", "proj_out.bias")
    inner = ("norm_q.", "norm_k.", "norm_added_q.", "norm_added_k.", "embedding_table", "scale_shift_table")
    return sum(
        p.numel()
        for key, p in model.named_parameters()
        if key.startswith(tuple(linear)) or key.endswith(ends) or any(part in key for part in inner)
    )


def restored(name: str, config: dict[str, Any]) -> dict[str, bool]:
    """Parallelise, run, restore, three times over: what stayed the same."""
    model, arguments = tiny(name), inputs(name, sizes(name)["B=2 ragged"])
    truth, before, weights = run(model, arguments), everything(model), bits(model)
    identities = [id(p) for p in model.parameters()]
    for _ in range(2):
        ditmesh.parallelize(model, config)
        changed = relative_error(run(model, arguments), truth) < 1e-5 and not same_bits(weights, bits(model))
        ditmesh.restore(model)
    return {
        "changed between": changed,
        "weights": same_bits(weights, bits(model)),
        "parameters": identities == [id(p) for p in model.parameters()],
        "attributes and hooks": same(before, everything(model)),
        "output": torch.equal(run(model, arguments), truth),
    }
