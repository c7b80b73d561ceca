"""Frozen weights in fewer bits, below adapters in float32.

A linear layer keeps its weight in a quantised form, in plain tensors, and computes in the dtype of its input (or of
autocast): in the forward and again in the backward pass the weight is dequantised, and given back. Nothing but the
quantised form stays for the backward pass, as in QLoRA (Dettmers et al. 2023, arXiv:2305.14314). Quantisers are those
of bitsandbytes (NF4) and torchao (int8, float8).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...errors import ConfigError, InputError
from ...generate.components import read_saved
from ...generate.model_info import ModelInfo
from ...generate.modular import download
from ...generate.weight_files import build_empty, fill_weights, weight_files
from ...requirements import not_installed
from ..config import SECOND, TrainConfig

# Linear layers outside of blocks are quantised where both sides are at least so wide: the projections from and to
# latents are small, and what they lose every token loses.
WIDE = 1024
# Numbers with one scale in NF4, and scales with one scale.
BLOCK, SCALES = 64, 256

QUANTISATION_PACKAGES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}

# The parts of a weight, and what makes the weight, (out, in), of them in a dtype.
Parts = Mapping[str, Tensor]
Restore = Callable[[Parts, torch.dtype], Tensor]


def quantised(weight: Tensor, precision: str) -> tuple[dict[str, Tensor], Restore]:
    """The parts of a weight, (out, in), and how they are put together; ``precision``: a value of ``base_precision``."""
    if precision == "bf16":
        return {"W_q": weight.detach().to(torch.bfloat16, copy=True)}, _cast
    weight = weight.detach().float()
    if precision == "nf4":
        from bitsandbytes import functional

        packed, state = cast(Any, functional).quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        parts = {"W_q": packed.flatten(), "absmax": state.absmax, "absmax2": state.state2.absmax}
        tables = {"offset": state.offset, "code": state.code, "code2": state.state2.code}
        return parts | tables, partial(nf4_weight, weight.shape)
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(layer, Int8WeightOnlyConfig() if precision == "int8" else Float8WeightOnlyConfig())
    return _of_torchao(layer.weight)


def _cast(parts: Parts, dtype: torch.dtype) -> Tensor:
    return parts["W_q"].to(dtype)


def nf4_weight(shape: torch.Size, parts: Parts, dtype: torch.dtype) -> Tensor:
    """A weight of bitsandbytes' NF4, with scales that are quantised as well.

    Args:
        parts: ``W_q`` (two numbers a byte), ``absmax`` (uint8, a scale for every 64), ``absmax2`` (float32, for every
            256 scales), ``offset`` (their mean) and the tables ``code`` and ``code2``.
    """
    from bitsandbytes import functional

    scales = functional.QuantState(absmax=parts["absmax2"], code=parts["code2"], blocksize=SCALES, dtype=torch.float32)
    state = functional.QuantState(
        absmax=parts["absmax"],
        shape=shape,
        code=parts["code"],
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=parts["offset"],
        state2=scales,
    )
    return functional.dequantize_4bit(parts["W_q"].unsqueeze(1), state)


def _of_torchao(tensor: Tensor) -> tuple[dict[str, Tensor], Restore]:
    names, about = cast(Any, tensor).__tensor_flatten__()
    kind, shape = type(tensor.data), tuple(tensor.shape)

    def restore(parts: Parts, dtype: torch.dtype) -> Tensor:
        inner = dict(zip(names, parts.values(), strict=True))
        return cast(Any, kind).__tensor_unflatten__(inner, about, shape, (shape[1], 1)).dequantize().to(dtype)

    return {"W_q" if not number else name: getattr(tensor, name) for number, name in enumerate(names)}, restore


def check_precision(precision: str | None, setting: str = "base_precision") -> None:
    """Reject a precision without the package for it. Raises `InputError`: with the command that installs it."""
    from importlib.util import find_spec

    package = QUANTISATION_PACKAGES.get(precision or "")
    if package is not None and find_spec(package) is None:
        raise InputError(not_installed(f"{setting}={precision!r}", package, "train"))


class FrozenLinear(nn.Linear):
    """A linear layer without a gradient of its weight, which it keeps in parts; its bias is frozen too.

    ``W_q`` and ``dequantize`` are the names by which peft asks for the weight (DoRA does).

    Args:
        shape: (out, in).

    Attributes:
        weight: of the shape and dtype float32, and without its numbers.
    """

    def __init__(self, parts: Parts, restore: Restore, shape: tuple[int, int], bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self._restore = restore
        # First: models ask the first parameter of some modules for its dtype.
        self.register_parameter("bias", bias)
        self.requires_grad_(False)
        self._scalars = {name: not value.dim() for name, value in parts.items()}
        for name, value in parts.items():
            # FSDP2 shards no scalars, and checkpoints leave frozen parameters out, not buffers.
            value = value if value.dim() else value.reshape(1)
            self.register_parameter(name, nn.Parameter(value.contiguous(), requires_grad=False))
        first = next(iter(parts.values()))
        self.register_buffer("_like", torch.zeros(1, 1, device=first.device), persistent=False)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return cast(Tensor, self._like).expand(self.out_features, self.in_features)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight, (out, in)."""
        stored = {name: cast(Tensor, getattr(self, name)) for name in self._scalars}
        return self._restore({name: one[0] if self._scalars[name] else one for name, one in stored.items()}, dtype)

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        product = cast(Tensor, _Product.apply(input, self, dtype))
        bias = cast("Tensor | None", self.bias)
        return product if bias is None else product + bias.to(dtype)


class _Product(torch.autograd.Function):
    """input @ weight.T; the weight is made for the forward and for the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: FrozenLinear, dtype: torch.dtype) -> Tensor:
        ctx.layer, ctx.dtypes = layer, (dtype, value.dtype)
        return F.linear(value.to(dtype), layer.dequantize(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        dtype, before = ctx.dtypes
        return (gradients[0].to(dtype) @ ctx.layer.dequantize(dtype)).to(before), None, None


# --- models --------------------------------------------------------------------------------------------------------


def layers_to_freeze(model: nn.Module) -> list[str]:
    """Names of the linear layers with weights in fewer bits: those in blocks, and wide ones elsewhere."""
    lists = tuple(f"{name}." for name, module in model.named_modules() if name and isinstance(module, nn.ModuleList))
    exact = tuple(getattr(type(model), "_keep_in_fp32_modules", None) or ())
    layers, seen = [], set[int]()
    for name, module in model.named_modules():
        # Not of a subclass: torch's attention reads the weight of its own, and bitsandbytes' layers are quantised.
        parts = name.split(".")
        if type(module) is not nn.Linear or any(part in exact or part.startswith("lora_") for part in parts):
            continue
        wide = min(module.in_features, module.out_features) >= WIDE
        if (wide or name.startswith(lists)) and id(module.weight) not in seen:
            seen.add(id(module.weight))
            layers.append(name)
    return layers


def freeze(model: nn.Module, precision: str | None) -> None:
    """Keep the weights of a model's linear layers in fewer bits, in place; None: of torchao's weights alone.

    Weights of torchao become layers that keep nothing but them for the backward pass.
    """
    there = [name for name, layer in model.named_modules() if _is_torchao_layer(layer)]
    for name in there if precision is None else layers_to_freeze(model):
        layer = cast(nn.Linear, model.get_submodule(name))
        if precision is not None and _is_torchao_layer(layer):
            raise ConfigError(
                f"base_precision={precision!r}: the weights are quantised already "
                f"({type(layer.weight.data).__name__} of torchao); leave it out"
            )
        parts, restore = quantised(layer.weight, precision) if precision else _of_torchao(layer.weight.data)
        # Of a tensor rank's slice the layer's own numbers of features are those of the whole.
        shape = cast("tuple[int, int]", tuple(layer.weight.shape))
        _replace(model, name, FrozenLinear(parts, restore, shape, layer.bias))


def encoders_to_freeze(names: Iterable[str], config: TrainConfig) -> list[str]:
    """The text encoders among a pipeline's components that ``encoder_precision`` is for."""
    asked = config.model.encoder_precision is not None
    return [one for one in names if asked and one.startswith("text_encoder") and one not in config.model.train_modules]


def freeze_encoders(pipe: Any, config: TrainConfig) -> None:
    """Keep the linear layers of a pipeline's text encoders in fewer bits, in place, as a run says."""
    for name in encoders_to_freeze(pipe.components, config):
        if isinstance(pipe.components[name], nn.Module):
            freeze(pipe.components[name], config.model.encoder_precision)


def _is_torchao_layer(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and type(layer.weight.data).__module__.startswith("torchao.")


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    layer.train(model.training)
    model.get_submodule(owner)._modules[leaf] = layer


def read_pipeline_frozen(info: ModelInfo, precision: str) -> Any:
    """A saved pipeline with its transformers in fewer bits, of which one weight at a time is read whole.

    Args:
        precision: a value of ``base_precision``.

    Raises:
        InputError, ConfigError: the weights do not fit the model, or are quantised already.
    """
    import diffusers

    if not info.local:
        info = replace(info, files=download(info), local=True)
    models: dict[str, nn.Module] = {}
    for name in ("transformer", SECOND):
        parts, folder = info.index.get(name), info.files / name
        if not parts or not parts[0] or not (folder / "config.json").is_file():
            continue
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = getattr(diffusers, str(settings.get("_class_name")), None)
        try:
            weight_files(folder)
        except InputError:
            # Of another format: diffusers reads them.
            continue
        if kind is not None and settings.get("quantization_config") is None:
            models[name] = _read_frozen(kind, folder, precision)
    # The base class takes no part in the place of one that a pipeline need not have, such as Wan's transformers.
    pipeline = getattr(diffusers, info.pipeline_class, None)
    return read_saved(info, pipeline, **models)


def _read_frozen(kind: type[Any], folder: Path, precision: str) -> nn.Module:
    model = build_empty(kind, folder, None)
    chosen = {f"{name}.weight" for name in layers_to_freeze(model)}
    frozen_weights: dict[str, tuple[dict[str, Tensor], Restore, tuple[int, int]]] = {}

    def read(name: str, stored: Any, dtype: torch.dtype) -> Tensor:
        value = stored[...]
        if name not in chosen:
            return value.to(dtype, copy=True)
        frozen_weights[name.removesuffix(".weight")] = (*quantised(value, precision), tuple(value.shape))
        return torch.empty(0)

    model = fill_weights(model, folder, None, None, "cpu", read)
    for name, (parts, restore, shape) in frozen_weights.items():
        layer = cast(nn.Linear, model.get_submodule(name))
        _replace(model, name, FrozenLinear(parts, restore, shape, layer.bias))
    return model
