"""Frozen weights in host memory beside fake CUDA devices: where they are, what is copied, gradients those of CPUs."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

import ditmesh
from ditmesh.launch import RankPool
from ditmesh.train import reduce_gradients
from ditmesh.train.model.frozen import FrozenLinear, freeze
from rules.fake_cuda import cuda, move_, unavailable
from rules.requests import _moved
from support import gradients
from support.models import inputs, sizes, tiny


def trained(precision: str, share: float, again: bool) -> tuple[float, list[set[str]], int]:
    """A step on CPUs and on fake CUDA: the gradients' error; devices of weights on the host and of others; copies."""
    assert unavailable() is None
    found: list[dict[str, Any]] = []
    devices: list[set[str]] = [set(), set()]
    copies = 0
    for on_cuda in (False, True):
        model: Any = copy.deepcopy(tiny("Flux"))
        freeze(model, precision, share)
        torch.manual_seed(0)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q", "net.2"], init_lora_weights=False), model)
        if again:
            model.enable_gradient_checkpointing()
        given = inputs("Flux", sizes("Flux")["B=2 ragged"])
        arguments = {key: gradients.cast(value, torch.float32) for key, value in given.items()}
        with cuda() if on_cuda else nullcontext() as device:
            if device is not None:
                move_(model)
                arguments = _moved(arguments, {})
                layers = [one for one in model.modules() if isinstance(one, FrozenLinear)]
                devices[0] = {value.device.type for one in layers for value in one.on_host.values()}
                devices[1] = {value.device.type for value in model.parameters()}
            with ditmesh.parallelized(model, {"ulysses": 2, "shared_memory": False}):
                output = model(**arguments)[0]
                if device is not None:
                    device.launches.clear()
                (output.square().mean() + output.mean()).backward()
                reduce_gradients(model, ditmesh.engine_of(model).mesh)
            if device is not None:
                copies = device.launches["_to_copy"]
            values = device.values if device is not None else torch.clone
            found.append({key: values(p.grad) for key, p in model.named_parameters() if p.grad is not None})
    assert found[0]
    return gradients.error(found[1], found[0])[0], devices, copies


@pytest.mark.parametrize("again", [False, True])
def test_weights_on_the_host_stay_there(again):
    with RankPool(2, threads=1, timeout=120.0) as pool:
        every = pool.run(trained, "bf16", 0.5, again)
    for error, (host, others), copies in every:
        assert error <= 1e-4
        assert host == {"cpu"}
        assert others == {"cuda"}
        assert copies > 0
