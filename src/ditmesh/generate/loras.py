"""Adapters of any pipeline (LoRA, DoRA, LoKr), also where diffusers has no methods for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.patching import parts_readable
from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

# The names of the files' metadata entry and of the parameters of adapters.
METADATA = "lora_adapter_metadata"
# Of another entry, which says for which transformer of several an adapter is: diffusers' own files do not.
COMPONENT = "ditmesh_component"
LAYERS = ("lora_", "lokr_")


def takes_loras(kind: type[Any]) -> bool:
    """True if adapters can be loaded into pipelines of a class: diffusers has a method, or there is a transformer."""
    return hasattr(kind, "load_lora_weights") or "transformer" in signature(kind.__init__).parameters


def pipeline_has(kind: type[Any]) -> bool:
    """True if a pipeline class has diffusers' methods for adapters of its transformer."""
    return "transformer" in (getattr(kind, "_lora_loadable_modules", None) or ())


def load_lora(pipe: Any, file: Path, name: str, component: str | None = None) -> None:
    """Load an adapter of a safetensors file into a pipeline and make it active.

    diffusers' own loader takes every file but those that it does not know for this pipeline: adapters of pipelines
    without ``load_lora_weights``, and LoKr under the transformer's own names.

    Args:
        name: of the adapter in the pipeline.
        component: the transformer, of two, that gets it; None: the one that the file names, else the first.

    Raises:
        InputError: the pipeline has no such transformer, or the file says nothing of the adapter's rank and scale,
            which is needed here.
        Exception: any of diffusers' and peft's own.
    """
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        names = list(tensors.keys())
        component = component or (tensors.metadata() or {}).get(COMPONENT, "transformer")
    if component != "transformer" and getattr(pipe, component, None) is None:
        raise InputError(f"{file} is for the {component} of a pipeline with two, and {type(pipe).__name__} has none")
    plain = any(".lokr_" in one for one in names) and all(one.startswith("transformer.") for one in names)
    # Pipelines with a UNet are diffusers' own business.
    known = pipeline_has(type(pipe)) if hasattr(pipe, "transformer") else hasattr(pipe, "load_lora_weights")
    if known and not plain:
        second = {} if component == "transformer" else {f"load_into_{component}": True}
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name, **second)
        return
    model = getattr(pipe, component)
    if hasattr(model, "load_lora_adapter"):
        model.load_lora_adapter(str(file.parent), weight_name=file.name, adapter_name=name, prefix="transformer")
    else:
        _inject(model, file, name)


def _inject(model: nn.Module, file: Path, name: str) -> None:
    """A stand-in for diffusers' ``load_lora_adapter``, for transformers that do not have it."""
    from peft import LoKrConfig, LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    from safetensors import safe_open

    prefix = "transformer."
    with safe_open(file, "pt") as tensors:
        about = json.loads((tensors.metadata() or {}).get(METADATA, "{}"))
        weights: dict[str, Tensor] = {
            one.removeprefix(prefix): tensors.get_tensor(one)
            for one in tensors.keys()  # noqa: SIM118 (not a mapping)
            if one.startswith(prefix)
        }
    settings = {key.removeprefix(prefix): value for key, value in about.items() if key.startswith(prefix)}
    if not weights or not settings:
        what = f"weights under {prefix!r}" if not weights else f"settings of its adapter ({METADATA})"
        raise InputError(f"{file} has no {what}, without which {type(model).__name__} cannot take it")
    kind = LoKrConfig if any(".lokr_" in one for one in weights) else LoraConfig
    inject_adapter_in_model(kind(**settings), model, adapter_name=name, state_dict=weights)
    with parts_readable():
        set_peft_model_state_dict(model, weights, name)


def adapters_of(model: nn.Module) -> list[str]:
    """The names of a model's adapters."""
    return list(getattr(model, "peft_config", None) or ())


def adapted(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """The components with adapters, by name."""
    from torch import nn

    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and adapters_of(part):
            yield name, part


def loras_of(pipe: Any) -> dict[str, list[str]]:
    """The adapters' names, by component."""
    return {name: adapters_of(part) for name, part in adapted(pipe)}


def set_loras(pipe: Any, scales: Mapping[str, float]) -> None:
    """Make exactly these adapters active, by name, with their scales."""
    if pipeline_has(type(pipe)):
        pipe.set_adapters(list(scales), adapter_weights=list(scales.values()))
    else:
        for _, part in adapted(pipe):
            activate(part, [one for one in scales if one in adapters_of(part)], scales)


def activate(model: nn.Module, names: Sequence[str], scales: Mapping[str, float]) -> None:
    """Make exactly these adapters of a model active; all of them are marked as trained then."""
    from diffusers.utils.peft_utils import set_weights_and_activate_adapters

    set_weights_and_activate_adapters(model, list(names), [scales[name] for name in names])


def switch_loras(pipe: Any, on: bool) -> None:
    """Switch all adapters of a pipeline on or off."""
    from diffusers.utils.peft_utils import set_adapter_layers

    if pipeline_has(type(pipe)):
        pipe.enable_lora() if on else pipe.disable_lora()
    else:
        for _, part in adapted(pipe):
            set_adapter_layers(part, enabled=on)
