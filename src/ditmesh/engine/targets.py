"""The targets of `parallelize`: a pipeline or its transformers, and the place of the engine of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..config import ParallelConfig
from ..core.patching import refuse_pickling
from ..errors import InputError
from ..layout import TokenLayout, layout_of
from ..layout.probe import probe
from ..layout.types import GIVEN

if TYPE_CHECKING:
    from .engine import Engine

T = TypeVar("T")
ConfigLike = ParallelConfig | Mapping[str, Any] | str | Path

# The attribute that holds a parallelised object's engine.
ENGINE = "_ditmesh_engine"
# The attribute of a model with copies on other ranks (`ranks.FollowedModel`).
FOLLOWED = "_ditmesh_followed"

# Components of diffusers' pipelines that hold the denoising transformer. Wan has two, for early and for late steps;
# MiniMax-H3 has another one for references; Ideogram 4 has one for each branch of guidance; Kandinsky's and Shap-E's
# denoises an embedding.
DENOISERS = ("transformer", "transformer_2", "transformer_ref", "unconditional_transformer", "prior")


# The methods by which `copy.deepcopy` lets an object copy itself, and pickle asks it for its state.
COPY, REDUCE = "__deepcopy__", "__reduce_ex__"


def mark(owner: Any, engine: Any) -> Callable[[], None]:
    """Attach an engine, or a pending first call, to an object for `engine_of`; returns the undo.

    The object refuses to be copied, and its modules to be pickled: a copy would hold links to other ranks.
    """
    attributes, name = vars(owner), type(owner).__name__

    def refuse_copy(*_: Any) -> Any:
        raise InputError(
            f"this {name} is parallelised, and a copy of it would be connected to other ranks as it is; call "
            "ditmesh.restore(...) first, or copy it before ditmesh.parallelize(...)"
        )

    attributes[ENGINE], attributes[COPY] = engine, refuse_copy
    modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
    for module in modules:
        vars(module)[REDUCE] = partial(refuse_pickling, type(module), name, module)

    def undo() -> None:
        attributes.pop(ENGINE, None)
        attributes.pop(COPY, None)
        for module in modules:
            vars(module).pop(REDUCE, None)

    return undo


def engine_of(target: Any) -> Engine:
    """The engine of a parallelised ``target``, with its config, mesh and byte counters.

    Before a first call that is to show the layout, it knows its configuration and its mesh only. `InputError`: there is
    none.
    """
    engine = getattr(target, ENGINE, None)
    if engine is None:
        raise InputError(f"this {type(target).__name__} is not parallelised; call ditmesh.parallelize(...) first")
    return engine


def restore(target: T) -> T:
    """Undo `parallelize` exactly. Every rank calls it; the program alone does for a model of `Followers`.

    `InputError`: ``target`` is not parallelised.
    """
    engine = engine_of(target)
    if (followed := vars(target).get(FOLLOWED)) is not None:
        followed.close()
    else:
        engine.detach(target)
    return target


def refuse_twice(target: Any) -> None:
    """Refuse a target that is parallelised already."""
    if getattr(target, ENGINE, None) is not None:
        raise InputError(f"this {type(target).__name__} is parallelised already; call ditmesh.restore(...) on it first")


def denoisers(target: Any) -> list[nn.Module]:
    """The denoising transformers of a pipeline, or the transformer itself.

    `InputError`: there is none, or it is compiled as a whole.
    """
    models = [target] if isinstance(target, nn.Module) else [getattr(target, name, None) for name in DENOISERS]
    transformers = [model for model in models if isinstance(model, nn.Module)]
    for model in transformers:
        inner = vars(model).get("_modules", {}).get("_orig_mod")
        if inner is not None or model._compiled_call_impl is not None:
            raise InputError(
                f"this {type(inner or model).__name__} is compiled as a whole, and ranks cannot meet inside its graph; "
                "parallelise the model that is not compiled, and compile its blocks: ParallelConfig(compile='inductor')"
            )
    if not transformers:
        raise InputError(
            f"{type(target).__name__} has no transformer ({' or '.join(DENOISERS)}); ditmesh parallelises diffusers' "
            "Diffusion Transformer pipelines, not U-Nets"
        )
    return transformers


def controls(pipe: Any) -> list[nn.Module]:
    """The ControlNets of a pipeline, one by one."""
    found = getattr(pipe, "controlnet", None)
    several = getattr(found, "nets", None)
    networks = [*several] if isinstance(several, nn.ModuleList) else [found]
    return [network for network in networks if isinstance(network, nn.Module)]


def find_layout(model: nn.Module) -> TokenLayout:
    """The reviewed layout of the model's class, else one derived by probing the model.

    `LayoutError`: no reviewed layout, and the probe failed; says why.
    """
    return layout_of(model) or probe(model)


def given_layout(layout: TokenLayout | None, model: nn.Module) -> TokenLayout | None:
    """A layout passed by the user; None if it is the reviewed one of the model's class."""
    return layout if layout is None or layout == layout_of(model) else replace(layout, source=GIVEN)


def device_of(model: nn.Module) -> torch.device | None:
    """The device on which a transformer computes; its weights lie elsewhere between calls when they are offloaded."""
    from diffusers.hooks.group_offloading import _get_group_onload_device

    for module in model.modules():
        # accelerate's hooks.
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    with suppress(ValueError):
        return _get_group_onload_device(model)
    devices = [parameter.device for parameter in model.parameters()]
    # Weights of modules that `precompute` computes ahead may wait in host memory.
    return next((device for device in devices if device.type not in ("cpu", "meta")), devices[0] if devices else None)
