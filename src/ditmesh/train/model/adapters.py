"""Adapters in training: where they go, and how they are saved."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...errors import ConfigError, InputError, did_you_mean, first_line
from ...generate.files import ADAPTER_LOADERS
from ...generate.lora_files import COMPONENT, METADATA
from ...generate.lora_names import original_layers, takes_comfyui_names
from ...generate.loras import activate, adapted, adapters_of, pipeline_has
from ...requirements import not_installed
from ..config import SECOND, LoraConfig, TrainConfig
from .frozen import freeze

logger = logging.getLogger(__name__)

# The name of the adapter that is trained.
TRAINED = "default"
# The adapter in ComfyUI's names.
COMFYUI_FILE = "comfyui.safetensors"


# --- where adapters go --------------------------------------------------------------------------------------------


def targets_of(model: nn.Module, lora: LoraConfig) -> list[str] | str:
    """The linear layers of a transformer with an adapter, as peft takes them: names, or a regular expression.

    Raises `ConfigError`: it has no such layers; names those that there are.
    """
    # torch's own attention reads the weights of its projections.
    heads = tuple(f"{name}." for name, one in model.named_modules() if isinstance(one, nn.MultiheadAttention))
    linear = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and not name.startswith(heads)]
    wanted = lora.target_modules
    if lora.comfyui and not takes_comfyui_names(model):
        raise ConfigError(
            f"lora.comfyui=True: ComfyUI's names for {type(model).__name__} are not known here; leave it out"
        )
    if wanted == "all-linear":
        return _exactly(linear, model)
    missing = [target for target in wanted if not any(name == target or name.endswith(f".{target}") for name in linear)]
    if "target_modules" not in lora.model_fields_set and len(missing) == len(wanted):
        projections = _projections(model, linear)
        if not projections:
            raise ConfigError(
                f"lora: no attention projections are known in {type(model).__name__}; name linear layers with "
                f"target_modules: it has {_in_short(linear)}"
            )
        return _exactly(projections, model)
    if missing and "target_modules" in lora.model_fields_set:
        ends = list(dict.fromkeys(map(_without_block, linear)))
        target = missing[0]
        near = did_you_mean(target, {".".join(end.split(".")[-target.count(".") - 1 :]) for end in ends})
        raise ConfigError(
            f"lora.target_modules: {type(model).__name__} has no linear layer {target!r}; it has "
            f"{_in_short(linear)}{near}"
        )
    return list(wanted)


def _projections(model: nn.Module, linear: Iterable[str]) -> list[str]:
    """Linear layers inside attention modules: those with a processor, as diffusers makes them, or with the name."""
    homes = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if name and (hasattr(module, "processor") or "Attention" in type(module).__name__)
    )
    return [name for name in linear if name.startswith(homes)]


def _exactly(names: Iterable[str], model: nn.Module) -> str:
    """A regular expression for these modules and no other, short where all blocks are alike."""
    wanted = set(names)
    kinds = dict.fromkeys(re.sub(r"(?<=\\\.)\d+(?=\\\.|$)", r"\\d+", re.escape(name)) for name in sorted(wanted))
    short = "|".join(kinds)
    if {name for name, _ in model.named_modules() if re.fullmatch(short, name)} == wanted:
        return short
    return "|".join(map(re.escape, sorted(wanted)))


def _in_short(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(map(_without_block, names)))


def _without_block(name: str) -> str:
    """The path behind the number of a block: ``attn.to_q`` of ``transformer_blocks.3.attn.to_q``."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), -1)
    inner = parts[number + 1 :] if number + 1 < len(parts) else parts
    return ".".join(inner)


def peft_config(lora: LoraConfig, targets: list[str] | str) -> Any:
    """The adapters as peft has them. Raises `InputError`: peft is not installed."""
    try:
        from peft import LoraConfig as PeftConfig
    except ImportError:
        raise InputError(not_installed("lora", "peft", "train")) from None
    return PeftConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.rank if lora.alpha is None else lora.alpha),
        lora_dropout=lora.dropout,
        init_lora_weights="gaussian",
        use_dora=lora.type == "dora",
        use_rslora=lora.rslora,
        target_modules=targets,
    )


# --- checks before anything is loaded -----------------------------------------------------------------------------


def check_modules(kind: type[Any], config: TrainConfig) -> None:
    """Reject adapters that cannot be loaded again. Raises `ConfigError`: naming the module."""
    if others := [name for name in config.model.train_modules if name != config.denoiser]:
        raise ConfigError(f"train_modules: lora adapts the transformer alone; leave {others[0]} out")
    if config.denoiser == SECOND and SECOND not in (getattr(kind, "_lora_loadable_modules", None) or ()):
        raise ConfigError(f"train_modules: diffusers loads no adapter into {SECOND} of {kind.__name__}; leave it out")


# --- adapters on a pipeline ---------------------------------------------------------------------------------------


def add_adapters(pipe: Any, config: TrainConfig) -> None:
    """Put the adapters of a run on a pipeline's transformer; only they want gradients.

    The weights below them are put into the form of ``base_precision``.

    Raises:
        ConfigError: they do not fit the model.
        InputError: peft is not installed.
    """
    lora = config.lora
    assert lora is not None
    check_modules(type(pipe), config)
    # Whole weights say which layers there are, not layers with adapters.
    model = getattr(pipe, config.denoiser)
    targets = targets_of(model, lora)
    if not config.quantises_slices:
        freeze(model, config.model.base_precision)
    try:
        if hasattr(model, "add_adapter"):
            model.add_adapter(peft_config(lora, targets), TRAINED)
        else:
            from peft import inject_adapter_in_model

            inject_adapter_in_model(peft_config(lora, targets), model, TRAINED)
    except ValueError as error:
        raise ConfigError(f"lora: {first_line(error)}") from None
    for _, part in adapted(pipe):
        activate(part, adapters_of(part), {TRAINED: 1.0})
        for path, parameter in part.named_parameters():
            parameter.requires_grad_(TRAINED in path.split("."))


# --- saving -------------------------------------------------------------------------------------------------------


def save_adapters(pipe: Any, weights: Mapping[str, Tensor], config: TrainConfig, folder: Path) -> None:
    """Save the trained adapters in diffusers' format, with their settings, and in ComfyUI's names if that is set.

    The scale is in the weights, which are whole here: programs that do not read the settings take it for 1.
    """
    from peft import get_peft_model_state_dict

    kind, name = type(pipe), config.denoiser
    model = getattr(pipe, name)
    state = {path.removeprefix(f"{name}."): value for path, value in weights.items()}
    about = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in model.peft_config[TRAINED].to_dict().items()
    }
    layers = _with_scale(get_peft_model_state_dict(model, state, TRAINED), about)
    layers = {path: value.contiguous() for path, value in layers.items()}
    if config.lora is not None and config.lora.comfyui:
        save_file(dict(_in_comfyui_names(model, layers)), folder / COMFYUI_FILE, {"format": "pt"})
    file = folder / ADAPTER_LOADERS["lora"][1]
    if pipeline_has(kind):
        # Files for either of two transformers have one form: `load_into_transformer_2` says which one it is for.
        more: dict[str, Any] = {"transformer_lora_layers": layers, "transformer_lora_adapter_metadata": about}
        kind.save_lora_weights(str(folder), **more)
        if name == SECOND:
            with safe_open(file, "pt") as saved:
                told, tensors = saved.metadata() or {}, {key: saved.get_tensor(key) for key in saved.keys()}  # noqa: SIM118
            save_file(tensors, file, {**told, COMPONENT: SECOND})
        return
    packed = {f"transformer.{path}": value for path, value in layers.items()}
    told = {f"transformer.{key}": value for key, value in about.items()}
    save_file(packed, file, {"format": "pt", METADATA: json.dumps(told, indent=2, sort_keys=True)})


def _with_scale(weights: Mapping[str, Tensor], about: dict[str, Any]) -> Mapping[str, Tensor]:
    """The weights of a LoRA with its scale in them, and the settings changed to a scale of 1."""
    rank = about["r"]
    scale = about["lora_alpha"] / (sqrt(rank) if about["use_rslora"] else rank)
    about |= {"lora_alpha": rank, "use_rslora": False}
    return {path: value * scale if ".lora_B." in path and scale != 1 else value for path, value in weights.items()}


def _in_comfyui_names(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a LoRA whose scale is 1 under ComfyUI's names, with ``.alpha`` for programs that ask for it.

    Layers that are one there have one pair of matrices: those of the parts, of which each gives its own rows.
    """
    left = {path.removesuffix(".lora_A.weight") for path in weights if path.endswith(".lora_A.weight")}
    for layer in original_layers(model):
        parts = [part for part in layer.parts if part in left]
        if not parts:
            continue
        left.difference_update(parts)
        ups = [weights[f"{part}.lora_B.weight"] if part in parts else None for part in layer.parts]
        # An adapter's layer says how many outputs it has as the linear layer below it does.
        modules = [cast(Any, model.get_submodule(part)) for part in layer.parts]
        rows = [getattr(module, "base_layer", module).out_features for module in modules]
        down = torch.cat([weights[f"{part}.lora_A.weight"] for part in parts])
        matrix, top, column = down.new_zeros(sum(rows), len(down)), 0, 0
        for up, length in zip(ups, rows, strict=True):
            if up is not None:
                matrix[top : top + length, column : column + up.shape[1]] = up
                column += up.shape[1]
            top += length
        yield from _pair(layer.name, down, torch.cat(matrix.chunk(2)[::-1]) if layer.swapped else matrix)
    for path in sorted(left):
        yield from _pair(path, weights[f"{path}.lora_A.weight"], weights[f"{path}.lora_B.weight"])


def _pair(name: str, down: Tensor, up: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield f"diffusion_model.{name}.lora_A.weight", down.contiguous()
    yield f"diffusion_model.{name}.lora_B.weight", up.contiguous()
    yield f"diffusion_model.{name}.alpha", torch.tensor(float(len(down)))
