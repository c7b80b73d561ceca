"""Frozen weights in fewer bits, below adapters in float32.

A linear layer keeps its weight in a quantised form, in plain tensors, and computes in the dtype of its input (or of
autocast): in the forward and again in the backward pass the weight is dequantised, some rows at a time, and given back.
Nothing but the quantised form stays for the backward pass, as in QLoRA (Dettmers et al. 2023, arXiv:2305.14314).
Quantisers are those of bitsandbytes (NF4) and torchao (int8, float8).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...core.digests import digest, tensor_digest
from ...errors import ConfigError, InputError
from ...generate.components import read_saved
from ...generate.loading import build_empty, fill_weights, weight_files
from ...generate.model_info import ModelInfo
from ...requirements import not_installed
from ..config import SECOND, TrainConfig
from ..staging import onto

# Linear layers outside of blocks are quantised where both sides are at least so wide: the projections from and to
# latents are small, and what they lose every token loses.
WIDE = 1024
# Numbers of a weight that are dequantised at a time.
PIECE = 1 << 23
# Numbers with one scale in NF4, and scales with one scale.
BLOCK, SCALES = 64, 256

QUANTISATION_PACKAGES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Form(Protocol):
    """The form in which the parts of a weight make up the weight."""

    @property
    def step(self) -> int:
        """Rows can be made from every multiple of this."""
        ...

    def rows(self, parts: Mapping[str, Tensor], low: int, high: int, dtype: torch.dtype) -> Tensor:
        """The rows from ``low`` to ``high``, (high - low, in), in ``dtype``."""
        ...


@dataclass(frozen=True)
class Cast:
    """A weight in another floating-point dtype; its part is ``W_q``, (out, in)."""

    step: int = 1

    def rows(self, parts: Mapping[str, Tensor], low: int, high: int, dtype: torch.dtype) -> Tensor:
        return parts["W_q"][low:high].to(dtype)


@dataclass(frozen=True)
class Nf4:
    """NF4 of bitsandbytes, with scales that are quantised as well.

    Parts: ``W_q`` (two numbers a byte), ``absmax`` (uint8, a scale for every 64), ``absmax2`` (float32, for every 256
    scales), ``offset`` (their mean) and the tables ``code`` and ``code2``.
    """

    width: int

    @property
    def step(self) -> int:
        return BLOCK * SCALES // gcd(self.width, BLOCK * SCALES)

    def rows(self, parts: Mapping[str, Tensor], low: int, high: int, dtype: torch.dtype) -> Tensor:
        functional = _bitsandbytes()
        first, last = low * self.width, high * self.width
        scales = functional.QuantState(
            absmax=parts["absmax2"][first // (BLOCK * SCALES) : -(-last // (BLOCK * SCALES))],
            code=parts["code2"],
            blocksize=SCALES,
            dtype=torch.float32,
        )
        state = functional.QuantState(
            absmax=parts["absmax"][first // BLOCK : -(-last // BLOCK)],
            shape=torch.Size((high - low, self.width)),
            code=parts["code"],
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=dtype,
            offset=parts["offset"],
            state2=scales,
        )
        return functional.dequantize_4bit(parts["W_q"][first // 2 : -(-last // 2)].unsqueeze(1), state)


@dataclass(frozen=True)
class TorchAo:
    """A weight of torchao, by the tensors that it consists of; ``names``: of the parts in torchao, in order."""

    kind: type[Any]
    names: tuple[str, ...]
    about: Any
    shape: tuple[int, int]

    @property
    def step(self) -> int:
        return self.shape[0]

    def rows(self, parts: Mapping[str, Tensor], low: int, high: int, dtype: torch.dtype) -> Tensor:
        inner = dict(zip(self.names, parts.values(), strict=True))
        tensor = self.kind.__tensor_unflatten__(inner, self.about, self.shape, (self.shape[1], 1))
        return tensor.dequantize().to(dtype)[low:high]


def quantised(weight: Tensor, precision: str) -> tuple[dict[str, Tensor], Form]:
    """The parts of a weight, and how they are put together.

    Args:
        weight: (out, in), floating point.
        precision: a value of ``base_precision``.
    """
    if precision in CASTS:
        return {"W_q": weight.detach().to(CASTS[precision], copy=True)}, Cast()
    weight = weight.detach().float()
    if precision == "nf4":
        packed, state = _bitsandbytes().quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        parts = {"W_q": packed.flatten(), "absmax": state.absmax, "absmax2": state.state2.absmax}
        tables = {"offset": state.offset, "code": state.code, "code2": state.state2.code}
        return parts | tables, Nf4(weight.shape[1])
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(layer, Int8WeightOnlyConfig() if precision == "int8" else Float8WeightOnlyConfig())
    return _of_torchao(layer.weight)


def _of_torchao(tensor: Tensor) -> tuple[dict[str, Tensor], Form]:
    names, about = cast(Any, tensor).__tensor_flatten__()
    parts = {"W_q" if not number else name: getattr(tensor, name) for number, name in enumerate(names)}
    return parts, TorchAo(type(tensor.data), tuple(names), about, cast("tuple[int, int]", tuple(tensor.shape)))


def _bitsandbytes() -> Any:
    import bitsandbytes.functional

    return bitsandbytes.functional


def check_precision(precision: str | None, setting: str = "base_precision") -> None:
    """Reject a precision without the package for it.

    Raises:
        InputError: with the command that installs it.
    """
    from importlib.util import find_spec

    package = QUANTISATION_PACKAGES.get(precision or "")
    if package is not None and find_spec(package) is None:
        raise InputError(not_installed(f"{setting}={precision!r}", package, "train"))


class FrozenLinear(nn.Linear):
    """A linear layer without a gradient of its weight, which it keeps in parts.

    ``W_q`` and ``dequantize`` are the names by which peft asks for the weight (DoRA does).

    Args:
        parts: of the weight.
        form: how they are put together.
        shape: (out, in).
        bias: of the layer, frozen.

    Attributes:
        weight: of the shape and dtype float32, and without its numbers.
        on_host: the parts, in host memory, after `keep_on_host`; empty: they are parameters.
    """

    on_host: dict[str, Tensor]

    def __init__(
        self, parts: Mapping[str, Tensor], form: Form, shape: tuple[int, int], bias: nn.Parameter | None
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self.form = form
        # First: models ask the first parameter of some modules for its dtype.
        self.register_parameter("bias", bias)
        self.requires_grad_(False)
        self.on_host = {}
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

    def keep_on_host(self) -> None:
        """Keep the parts in host memory, where no move of the module takes them, and copy them for each product."""
        for name in [] if self.on_host else self._scalars:
            value = cast(Tensor, self._parameters.pop(name)).detach().cpu()
            # A copy that does not wait needs memory that stays where it is.
            self.on_host[name] = value.pin_memory() if torch.cuda.is_available() else value

    def pieces(self, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
        """Rows of the weight, from and to, in ``dtype``: some at a time."""
        if self.on_host:
            device = cast(Tensor, self._like).device
            stored = {name: onto(value, device) for name, value in self.on_host.items()}
        else:
            stored = {name: cast(Tensor, getattr(self, name)) for name in self._scalars}
        parts = {name: value[0] if self._scalars[name] else value for name, value in stored.items()}
        step = max(1, PIECE // (self.in_features * self.form.step)) * self.form.step
        for low in range(0, self.out_features, step):
            high = min(low + step, self.out_features)
            yield low, high, self.form.rows(parts, low, high, dtype)

    def dequantize(self) -> Tensor:
        """The weight, (out, in), float32."""
        return torch.cat([rows for _, _, rows in self.pieces(torch.float32)])

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
        value = value.to(dtype)
        found = [F.linear(value, rows) for _, _, rows in layer.pieces(dtype)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        (dtype, before), total = ctx.dtypes, None
        for low, high, rows in ctx.layer.pieces(dtype):
            part = gradients[0][..., low:high].to(dtype) @ rows
            total = part if total is None else total.add_(part)
        return cast(Tensor, total).to(before), None, None


# --- models --------------------------------------------------------------------------------------------------------


def layers_to_freeze(model: nn.Module) -> list[str]:
    """Names of the linear layers with weights in fewer bits: those in blocks, and wide ones elsewhere."""
    lists = tuple(f"{name}." for name, module in model.named_modules() if name and isinstance(module, nn.ModuleList))
    exact = tuple(getattr(type(model), "_keep_in_fp32_modules", None) or ())
    found, seen = [], set[int]()
    for name, module in model.named_modules():
        # Not of a subclass: torch's attention reads the weight of its own, and bitsandbytes' layers are quantised.
        parts = name.split(".")
        if type(module) is not nn.Linear or any(part in exact or part.startswith("lora_") for part in parts):
            continue
        wide = min(module.in_features, module.out_features) >= WIDE
        if (wide or name.startswith(lists)) and id(module.weight) not in seen:
            seen.add(id(module.weight))
            found.append(name)
    return found


def freeze(model: nn.Module, precision: str | None, share: float = 0.0) -> None:
    """Keep the weights of a model's linear layers in fewer bits, or in host memory, in place.

    Weights of torchao become layers that keep nothing but them for the backward pass.

    Args:
        model: whole, without adapters.
        precision: a value of ``base_precision``; None: of torchao's weights alone.
        share: of the layers, those that stay in host memory; evenly over the model.
    """
    there = any(isinstance(one, FrozenLinear) or _is_torchao_layer(one) for one in model.modules())
    _convert(model, "fp32" if share and precision is None and not there else precision)
    layers = [one for one in model.modules() if isinstance(one, FrozenLinear)]
    for number, layer in enumerate(layers):
        if int((number + 1) * share) > int(number * share):
            layer.keep_on_host()


def encoders_to_freeze(names: Iterable[str], config: TrainConfig) -> list[str]:
    """The text encoders among a pipeline's components that ``encoder_precision`` is for."""
    asked = config.encoder_precision is not None
    return [one for one in names if asked and one.startswith("text_encoder") and one not in config.train_modules]


def freeze_encoders(pipe: Any, config: TrainConfig) -> None:
    """Keep the linear layers of a pipeline's text encoders in fewer bits, in place, as a run says."""
    for name in encoders_to_freeze(pipe.components, config):
        if isinstance(pipe.components[name], nn.Module):
            freeze(pipe.components[name], config.encoder_precision)


def _convert(model: nn.Module, precision: str | None) -> None:
    there = [name for name, one in model.named_modules() if _is_torchao_layer(one)]
    for name in there if precision is None else layers_to_freeze(model):
        layer = cast(nn.Linear, model.get_submodule(name))
        if precision is not None and _is_torchao_layer(layer):
            raise ConfigError(
                f"base_precision={precision!r}: the weights are quantised already "
                f"({type(layer.weight.data).__name__} of torchao); leave it out"
            )
        parts, form = quantised(layer.weight, precision) if precision else _of_torchao(layer.weight.data)
        # Of a tensor rank's slice the layer's own numbers of features are those of the whole.
        shape = cast("tuple[int, int]", tuple(layer.weight.shape))
        _replace(model, name, FrozenLinear(parts, form, shape, layer.bias))


def _is_torchao_layer(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and type(layer.weight.data).__module__.startswith("torchao.")


def host_digest(model: nn.Module) -> str:
    """A digest of the weights that are kept in host memory; those on the device are compared as parameters are."""
    held = [
        (name, part, tensor_digest(value))
        for name, layer in model.named_modules()
        if isinstance(layer, FrozenLinear)
        for part, value in layer.on_host.items()
    ]
    return digest(held)


@contextmanager
def weights_in_state_dicts(model: nn.Module) -> Iterator[None]:
    """Let a model's state dict have the weights of its `FrozenLinear` layers, without their numbers.

    diffusers compares an adapter's shapes with them while it loads the adapter.
    """

    def add(layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = layer.weight

    layers = [layer for layer in model.modules() if isinstance(layer, FrozenLinear)]
    hooks = [layer.register_state_dict_post_hook(add) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    if not info.local:
        info = replace(info, files=Path(DiffusionPipeline.download(info.name)), local=True)
    found: dict[str, nn.Module] = {}
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
            found[name] = _read_frozen(kind, folder, precision)
    # The base class takes no part in the place of one that a pipeline need not have, such as Wan's transformers.
    pipeline = getattr(diffusers, info.pipeline_class, None)
    return read_saved(info, pipeline, **found)


def _read_frozen(kind: type[Any], folder: Path, precision: str) -> nn.Module:
    model = build_empty(kind, folder, None)
    chosen = {f"{name}.weight" for name in layers_to_freeze(model)}
    made: dict[str, tuple[dict[str, Tensor], Form, tuple[int, int]]] = {}

    def read(name: str, stored: Any, dtype: torch.dtype) -> Tensor:
        value = stored[...]
        if name not in chosen:
            return value.to(dtype, copy=True)
        made[name.removesuffix(".weight")] = (*quantised(value, precision), tuple(value.shape))
        return torch.empty(0)

    model = fill_weights(model, folder, None, None, "cpu", read)
    for name, (parts, form, shape) in made.items():
        layer = cast(nn.Linear, model.get_submodule(name))
        _replace(model, name, FrozenLinear(parts, form, shape, layer.bias))
    return model
