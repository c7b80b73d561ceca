"""What the tests of weights in pieces run on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import ditmesh
from ditmesh.strategies.pipefusion.lazy import whole_of
from ditmesh.strategies.sharded import ShardedWeights
from support.models import RAGGED, inputs, run, tiny
from support.tensor import bits, same_bits


def flat(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [tensor for item in output for tensor in flat(item)]


def values(model: nn.Module, arguments: Any, config: dict[str, Any]) -> list[torch.Tensor]:
    """What three calls return: the layout of the first shows which unit follows which; stale steps follow."""
    with ditmesh.parallelized(model, config):
        found = []
        for _ in range(3):
            found += [tensor.clone() for tensor in flat(whole_of(run(model, arguments)))]
            ditmesh.engine_of(model).clock.advance()
        return found


def bytes_of(model: nn.Module) -> int:
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


def compared(name: str, config: dict[str, Any], shard: int) -> dict[str, Any]:
    """A configuration with and without ``shard``: bits, what is held, what is back."""
    model, arguments = copy.deepcopy(tiny(name)), inputs(name, RAGGED, False)
    before, identities = bits(model), [id(p) for p in model.parameters()]
    try:
        plain = values(model, arguments, config)
    except (ditmesh.ConfigError, ditmesh.InputError) as error:
        return {"refused": str(error)}
    shared = values(model, arguments, {**config, "shard": shard})
    found: dict[str, Any] = {
        "equal": len(plain) == len(shared) and all(map(torch.equal, plain, shared)),
        "restored": same_bits(before, bits(model)) and identities == [id(p) for p in model.parameters()],
        "whole": bytes_of(model),
    }
    with ditmesh.parallelized(model, {**config, "shard": shard}):
        sharded = ditmesh.engine_of(model).models[0].get(ShardedWeights)
        run(model, arguments)
        found["held"] = sharded.held + bytes_of(model)
        found["units"] = len(sharded.units)
    return found
