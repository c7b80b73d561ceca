"""Adapters of any pipeline (LoRA and DoRA), also where diffusers has no methods for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.patching import parts_readable
from ..errors import InputError
from .lora_files import read_lora
from .lora_layers import as_diffusers_reads, fitted

if TYPE_CHECKING:
    from torch import Tensor, nn

# The beginning of a part of the names of adapters' parameters.
LAYERS = "lora_"


def takes_loras(kind: type[Any]) -> bool:
    """True if adapters can be loaded into pipelines of a class: diffusers has a method, or there is a transformer."""
    return hasattr(kind, "load_lora_weights") or "transformer" in signature(kind.__init__).parameters


def pipeline_has(kind: type[Any]) -> bool:
    """True if a pipeline class has diffusers' methods for adapters of its transformer."""
    return "transformer" in (getattr(kind, "_lora_loadable_modules", None) or ())


def load_lora(pipe: Any, file: Path, name: str) -> str | None:
    """Load an adapter of a safetensors file into a pipeline and make it active, each layer with the scale 1.

    Of two transformers the one that the file names gets it, else the first. Names of any trainer and strengths are read
    here, since diffusers leaves out what it does not know of a file. Returns a note on what is left out; None: nothing
    is.

    Raises:
        InputError: the pipeline has no such transformer or layers, or the file cannot be read; the message is for use
            behind the file's name.
        Exception: any of diffusers' and peft's own.
    """
    content = read_lora(file)
    component = content.component or "transformer"
    if component != "transformer" and getattr(pipe, component, None) is None:
        raise InputError(f"is for the {component} of a pipeline with two, and {type(pipe).__name__} has none")
    adapter = fitted(pipe, content, component)
    if adapter.left:
        # diffusers knows more families' names.
        adapter = as_diffusers_reads(pipe, content) or adapter
    if not adapter.weights:
        some = ", ".join(layer.name for layer in content.layers[:2])
        raise InputError(f"adapts no layer of {type(pipe).__name__} (it has {some}); take a LoRA of this model")
    _put(pipe, adapter.weights, name, component)
    for part, layers in adapter.layers.items():
        modules = dict(getattr(pipe, part).named_modules())
        for path in layers:
            layer = modules.get(path)
            if name not in getattr(layer, "lora_A", ()) or abs(layer.scaling[name] - 1) > 1e-6:  # type: ignore[union-attr]
                raise InputError(f"was not loaded as it is: {path} of the {part} has another adapter, or none")
    return adapter.note(type(pipe).__name__, file.name)


def _put(pipe: Any, weights: dict[str, Tensor], name: str, component: str) -> None:
    # Pipelines with a UNet are diffusers' own business.
    known = pipeline_has(type(pipe)) if hasattr(pipe, "transformer") else hasattr(pipe, "load_lora_weights")
    if known:
        second = {} if component == "transformer" else {f"load_into_{component}": True}
        pipe.load_lora_weights(weights, adapter_name=name, **second)
        return
    model = getattr(pipe, component)
    if hasattr(model, "load_lora_adapter"):
        model.load_lora_adapter(weights, adapter_name=name, prefix="transformer")
    else:
        # What diffusers' method does, for transformers that do not have it.
        from peft import inject_adapter_in_model, set_peft_model_state_dict

        plain = {key.removeprefix("transformer."): value for key, value in weights.items()}
        inject_adapter_in_model(_lora_config(plain), model, adapter_name=name, state_dict=plain)
        with parts_readable():
            set_peft_model_state_dict(model, plain, name)


def _lora_config(weights: Mapping[str, Tensor]) -> Any:
    """peft's settings for weights of peft's names, each layer with the scale 1."""
    from peft import LoraConfig

    end = ".lora_B.weight"
    ranks = {key.removesuffix(end): value.shape[1] for key, value in weights.items() if key.endswith(end)}
    usual = next(iter(ranks.values()))
    others = {f"^{layer.replace('.', chr(92) + '.')}": rank for layer, rank in ranks.items() if rank != usual}
    return LoraConfig(
        r=usual,
        lora_alpha=usual,
        rank_pattern=others,
        alpha_pattern=others,
        target_modules=list(ranks),
        use_dora=any("lora_magnitude_vector" in key for key in weights),
        lora_bias=any(key.endswith(".lora_B.bias") for key in weights),
    )


def adapters_of(model: nn.Module) -> list[str]:
    """The names of a model's adapters."""
    return list(getattr(model, "peft_config", None) or ())


def adapted(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """The components with adapters, by name."""
    from torch import nn

    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and adapters_of(part):
            yield name, part


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
