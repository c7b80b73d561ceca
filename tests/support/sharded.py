"""What the tests of weights in pieces run on every rank."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch import nn

import ditmesh
from ditmesh import zoo
from ditmesh.comm import PeerError
from ditmesh.comm.mesh import Mesh
from ditmesh.config import ParallelConfig
from ditmesh.core.digests import weights_fingerprint
from ditmesh.generate import loading, shares
from ditmesh.generate.model_info import find_model
from ditmesh.layout import layout_of
from ditmesh.parts.part import whole_of
from ditmesh.strategies.sharded import ShardedWeights
from ditmesh.strategies.text_encoders import TextEncoders
from support.models import RAGGED, inputs, run, tiny
from support.pipelines import MAKERS, arguments, draw
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


def uneven(config: dict[str, Any], prompts: list[int], shard: int) -> bool:
    """Whether rows, or branches, that are not equally many on every rank give the bits they give without ``shard``."""
    pictures = []
    for extra in ({}, {"shard": shard}):
        pipe = MAKERS["flux"]()
        pipe.transformer = copy.deepcopy(pipe.transformer)
        with ditmesh.parallelized(pipe, {**config, **extra}):
            pictures.append(draw(pipe, arguments("flux", prompts, steps=2)))
    return torch.equal(*pictures)


def broken_off(config: dict[str, Any], interrupted: bool = False) -> dict[str, Any]:
    """A request that fails on rank 1 in a block of its second step; the next one, and what restore gives back.

    Args:
        config: of the ranks.
        interrupted: it fails as by Ctrl-C, of which torch tells no hook.
    """
    pipe = MAKERS["sd3"]()
    model = pipe.transformer = copy.deepcopy(pipe.transformer)
    before, made = bits(model), lambda: arguments("sd3", [1, 2], steps=2)
    with ditmesh.parallelized(pipe, {**config, "shard": 1}):
        truth = draw(pipe, made())
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == 1:
            raise KeyboardInterrupt("on purpose") if interrupted else RuntimeError("on purpose")

    found: dict[str, Any] = {}
    ditmesh.parallelize(pipe, config)
    handle = model.transformer_blocks[1].register_forward_pre_hook(fail)
    try:
        draw(pipe, made())
    except (RuntimeError, KeyboardInterrupt, ditmesh.PeerError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    sharded = ditmesh.engine_of(pipe).models[0].get(ShardedWeights)
    found["let go"] = bytes_of(model) + sharded.held < 0.6 * sum(value.nbytes for value in before.values())
    found["next"] = torch.equal(draw(pipe, made()), truth)
    calls = 0
    with suppress(RuntimeError, KeyboardInterrupt):
        draw(pipe, made())
    handle.remove()
    ditmesh.restore(pipe)
    found["restored"] = same_bits(before, bits(model))
    return found


def refused(case: str) -> str:
    """What is said of a model that cannot be shared in pieces."""
    model, given = copy.deepcopy(tiny("Flux")), inputs("Flux", RAGGED, False)
    config: dict[str, Any] = {"ulysses": 2, "shard": 2}
    layout = None
    if case == "offload":
        cpu = torch.device("cpu")
        model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    if case == "layout":
        reviewed = layout_of(model)
        assert reviewed is not None
        layout = replace(reviewed, source="derived")
    mesh = Mesh(ParallelConfig(ulysses=2)) if case == "mesh" else None
    before = bits(model)
    try:
        ditmesh.parallelize(model, config, mesh=mesh, layout=layout)
        if case == "cast":
            model.to(torch.bfloat16)
        if case == "changed":
            with torch.no_grad():
                model.transformer_blocks[0].norm1.linear.bias.mul_(2)
        if case == "assigned":
            bias = model.transformer_blocks[0].norm1.linear.bias
            bias.data = 2 * bias.data
        if case == "gradient":
            flat(model.forward(**given))
        else:
            run(model, given)
    except (ditmesh.ConfigError, ditmesh.InputError, PeerError) as error:
        # A rank that is later at its own check may be told first that another one has refused the call, and why.
        said = str(error)
    else:
        said = "nothing"
    if hasattr(model, "_ditmesh_engine"):
        ditmesh.restore(model)
    if case != "cast" and not same_bits(before, bits(model)):
        said += " (and weights are lost)"
    return said


def fingerprints(folder: str, config: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Of a pipeline in pieces before and after parallelize, and of the whole one."""
    mesh = Mesh(ParallelConfig(**config))
    pipe = loading.read_pipeline(find_model(folder), mesh.config, mesh, **options)
    found = [shares.fingerprint(pipe, mesh)]
    ditmesh.parallelize(pipe, config, mesh=mesh)
    found.append(shares.fingerprint(pipe, mesh))
    ditmesh.restore(pipe)
    mesh.close()
    whole = type(pipe).from_pretrained(folder, **options)
    return [*found, weights_fingerprint(whole), weights_fingerprint(pipe)]


def of_words(pipe: Any, prompt: str, steps: int = 2) -> torch.Tensor:
    """Latents of a prompt that the text encoders read."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    kind = {"output_type": "latent", "generator": generator, "max_sequence_length": 16, "height": 64, "width": 64}
    with torch.no_grad():
        return pipe(prompt, num_inference_steps=steps, **kind).images


def alike(how: str, image: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether an image is the same: to the bit, unless ranks add up embeddings of which each computes a part."""
    return torch.allclose(image, truth, atol=1e-4) if how == "tensor" else torch.equal(image, truth)


def with_encoders(how: str) -> tuple[Any, list[torch.nn.Module]]:
    """A pipeline, and its text encoders; for slices one whose encoders have several heads."""
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(zoo.path("emoji-flux" if how == "tensor" else "emoji-sd3"))
    return pipe, [component for name, component in pipe.components.items() if name.startswith("text_encoder")]


def encoded(how: str, config: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Pictures of a prompt with text encoders in their place and elsewhere, and what a rank holds of them."""
    pipe, encoders = with_encoders(how)
    before, whole = [bits(one) for one in encoders], sum(map(bytes_of, encoders))
    prompts = ("a red apple", "a blue fish")
    with ditmesh.parallelized(pipe, config):
        truth = [of_words(pipe, prompt, steps) for prompt in prompts]
    ditmesh.parallelize(pipe, {**config, "text_encoder": how})
    found: dict[str, Any] = {
        "images": all(alike(how, of_words(pipe, p, steps), t) for p, t in zip(prompts, truth, strict=True))
    }
    placed = [each for _, each, _ in ditmesh.engine_of(pipe).context.get(TextEncoders)._placed.values()]
    held = sum(map(bytes_of, encoders)) + sum(one.held for one in placed if isinstance(one, ShardedWeights))
    found["held"] = held / whole
    ditmesh.restore(pipe)
    found["restored"] = all(same_bits(a, bits(b)) for a, b in zip(before, encoders, strict=True))
    return found


def not_of_its_files(later: bool) -> str:
    """What is said of an encoder whose weights are changed before it is parallelised, or after."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(zoo.path("emoji-sd3"))
    pipe.set_progress_bar_config(disable=True)

    def change() -> None:
        with torch.no_grad():
            next(pipe.text_encoder_2.parameters()).add_(1)

    try:
        if not later:
            change()
        ditmesh.parallelize(pipe, {"ulysses": 2, "text_encoder": "freed"})
        change()
        pipe("a red apple", num_inference_steps=1, output_type="latent", max_sequence_length=16)
    except ditmesh.InputError as error:
        return str(error)
    finally:
        with suppress(ditmesh.InputError):
            ditmesh.restore(pipe)
    return "nothing"
