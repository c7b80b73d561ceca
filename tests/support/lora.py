"""LoRA adapters for the tiny models, and what happens to them on every rank."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import nn

import ditmesh
from support.models import RAGGED, inputs, relative_error, run, tiny
from support.tensor import bits, same_bits

# Column, row and gathered linears, and linears that tensor parallelism leaves whole (x_embedder, pos_embed.proj).
TARGETS = [
    "to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out", "proj", "net.2",
    "proj_mlp", "proj_out", "norm1.linear", "norm.linear", "context_embedder",
]  # fmt: skip


def settings(rank: int, **options: Any) -> LoraConfig:
    """A LoRA on every kind of linear, with random weights (as made, lora_B is zero and changes nothing)."""
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, init_lora_weights=False, **options)


@cache
def adapter(name: str, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """Weights of an adapter of a family's tiny model, the same in every process."""
    model = copy.deepcopy(tiny(name))
    torch.manual_seed(seed)
    model.add_adapter(settings(rank))
    return {f"transformer.{key}": 3 * value for key, value in get_peft_model_state_dict(model).items()}


def load(model: nn.Module, weights: dict[str, torch.Tensor], name: str, **options: Any) -> None:
    """Load an adapter as diffusers' pipelines do."""
    model.load_lora_adapter({**weights}, adapter_name=name, prefix="transformer", **options)


def unload(model: nn.Module) -> None:
    """Take all adapters off. diffusers collects garbage after every layer, which takes seconds in all."""
    with mock.patch("gc.collect"):
        model.unload_lora()


def outputs(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """What a model with adapters ``a`` and ``b`` draws under every setting of them."""
    arguments = inputs(name, RAGGED)
    drawn: dict[str, torch.Tensor] = {}
    model.set_adapters("a")
    drawn["a"] = run(model, arguments)
    model.set_adapters("b")
    drawn["b"] = run(model, arguments)
    model.set_adapters(["a", "b"], [0.7, -0.4])
    drawn["both, weighted"] = run(model, arguments)
    model.set_adapters("a")
    key = "attention_kwargs" if name == "Wan" else "joint_attention_kwargs"
    drawn["scaled in the call"] = run(model, {**arguments, key: {**arguments.get(key, {}), "scale": 0.3}})
    model.disable_adapters()
    drawn["disabled"] = run(model, arguments)
    model.enable_adapters()
    drawn["enabled"] = run(model, arguments)
    return drawn


def story(name: str, config: dict[str, Any], before: bool) -> dict[str, Any]:
    """Adapters loaded before or after parallelising; every use of them against one device; then back again."""
    alone, model, arguments = copy.deepcopy(tiny(name)), copy.deepcopy(tiny(name)), inputs(name, RAGGED)
    weights = {"a": adapter(name, 1), "b": adapter(name, 2, rank=6)}
    plain, untouched = run(alone, arguments), bits(model)
    for key, value in weights.items():
        load(alone, value, key)
    truths = outputs(alone, name)
    spread = min(relative_error(truths[key], plain) for key in truths if key != "disabled")

    if before:
        for key, value in weights.items():
            load(model, value, key)
        whole = bits(model)
    ditmesh.parallelize(model, config)
    if not before:
        base = relative_error(run(model, arguments), plain)
        assert base < 1e-5
        load(model, weights["a"], "a")
        run(model, arguments)
        load(model, weights["b"], "b")
    errors = {key: relative_error(value, truths[key]) for key, value in outputs(model, name).items()}
    if before:
        ditmesh.restore(model)
        kept = same_bits(whole, bits(model))
        errors["restored"] = max(relative_error(v, truths[key]) for key, v in outputs(model, name).items())
        unload(model)
    else:
        model.delete_adapters("a")
        model.set_adapters("b")
        errors["one deleted"] = relative_error(run(model, arguments), truths["b"])
        unload(model)
        errors["unloaded"] = relative_error(run(model, arguments), plain)
        load(model, weights["b"], "b")
        errors["loaded again"] = relative_error(run(model, arguments), truths["b"])
        unload(model)
        ditmesh.restore(model)
        kept = True
    return {
        "errors": errors,
        "spread": spread,
        "kept": kept,
        "untouched": same_bits(untouched, bits(model)),
        "output": torch.equal(run(model, arguments), plain),
    }


def fused(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """An adapter fused into the weights right after loading, unfused, swapped in place, restored."""
    alone, model, arguments = copy.deepcopy(tiny(name)), copy.deepcopy(tiny(name)), inputs(name, RAGGED)
    plain = run(alone, arguments)
    first, second = adapter(name, 1, rank=6), adapter(name, 2, rank=4)
    load(alone, first, "a")
    truth = run(alone, arguments)
    unload(alone)
    load(alone, second, "a")
    swapped = run(alone, arguments)
    errors = {}
    with ditmesh.parallelized(model, config):
        load(model, first, "a")
        model.fuse_lora()
        errors["fused"] = relative_error(run(model, arguments), truth)
        model.unfuse_lora()
        errors["unfused"] = relative_error(run(model, arguments), truth)
        # The new adapter has a lower rank: peft copies it into the old one's tensors.
        load(model, second, "a", hotswap=True)
        errors["swapped"] = relative_error(run(model, arguments), swapped)
        model.fuse_lora()
        errors["swapped and fused"] = relative_error(run(model, arguments), swapped)
    errors["restored, fused"] = relative_error(run(model, arguments), swapped)
    model.unfuse_lora()
    unload(model)
    errors["unloaded"] = relative_error(run(model, arguments), plain)
    return errors


def with_bias(name: str, config: dict[str, Any]) -> dict[str, float]:
    """Adapters whose lora_B has a bias: added once, not once a rank."""
    alone, model, arguments = copy.deepcopy(tiny(name)), copy.deepcopy(tiny(name)), inputs(name, RAGGED)
    for each in (alone, model):
        torch.manual_seed(3)
        each.add_adapter(settings(4, lora_bias=True))
        for key, parameter in each.named_parameters():
            if "lora_B" in key and key.endswith("bias"):
                parameter.data.add_(0.1)
    truth, whole = run(alone, arguments), bits(model)
    with ditmesh.parallelized(model, config):
        error = relative_error(run(model, arguments), truth)
    return {"error": error, "restored": same_bits(whole, bits(model))}


def refused(options: dict[str, Any]) -> str:
    """The message for an adapter that tensor parallelism does not know."""
    model = copy.deepcopy(tiny("SD3"))
    model.add_adapter(settings(4, **options))
    try:
        ditmesh.parallelize(model, {"tensor": 2})
    except ditmesh.InputError as error:
        return str(error)
    return "not refused"


def through_the_pipeline(config: dict[str, Any], model: str = "SD3") -> dict[str, float]:
    """A LoRA loaded, weighted, swapped, fused and unloaded by the pipeline's own methods; errors against one device."""
    from support.pipelines import MAKERS, arguments, draw

    made: dict[str, list[torch.Tensor]] = {"alone": [], "parallel": []}
    name = model.lower()
    for how, pictures in made.items():
        pipe = MAKERS[name]()
        pipe.register_modules(transformer=copy.deepcopy(tiny(model)))
        if how == "parallel":
            ditmesh.parallelize(pipe, config)
        pictures.append(draw(pipe, arguments(name, [1, 2])))
        pipe.load_lora_weights({key: value.clone() for key, value in adapter(model, 1).items()}, adapter_name="a")
        pictures.append(draw(pipe, arguments(name, [1, 2])))
        pipe.set_adapters(["a"], [0.5])
        pictures.append(draw(pipe, arguments(name, [1, 2])))
        pipe.load_lora_weights(
            {key: value.clone() for key, value in adapter(model, 2).items()}, adapter_name="a", hotswap=True
        )
        pictures.append(draw(pipe, arguments(name, [1, 2])))
        pipe.fuse_lora(components=["transformer"], lora_scale=0.8)
        pictures.append(draw(pipe, arguments(name, [1, 2])))
        pipe.unfuse_lora(components=["transformer"])
        with mock.patch("gc.collect"):
            pipe.unload_lora_weights()
        pictures.append(draw(pipe, arguments(name, [1, 2])))
        if how == "parallel":
            ditmesh.restore(pipe)
            pictures.append(draw(pipe, arguments(name, [1, 2])))
        else:
            pictures.append(pictures[-1])
    names = ["plain", "loaded", "weighted", "swapped", "fused", "unloaded", "restored"]
    errors = [relative_error(a, b) for a, b in zip(made["parallel"], made["alone"], strict=True)]
    return {**dict(zip(names, errors, strict=True)), "matters": relative_error(made["alone"][1], made["alone"][0])}
