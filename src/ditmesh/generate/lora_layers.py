"""Which layers of a pipeline a LoRA file adapts, by name, and with which weights; what of the file is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING, Any, cast

from ..errors import InputError
from .lora_files import LoraContent, LoraLayer, Strength
from .lora_names import OriginalLayer, original_layers

if TYPE_CHECKING:
    from torch import Tensor, nn

# Beginnings of layers' names, by the component that they stand for; the transformer's may be left out.
_TRANSFORMER = (
    "base_model.model.transformer.", "base_model.model.", "transformer.", "model.diffusion_model.", "diffusion_model.",
    "lora_unet_", "lora_transformer_", "lycoris_", "model.",
)  # fmt: skip
_ENCODERS = {
    "text_encoder.": "text_encoder",
    "text_encoder_2.": "text_encoder_2",
    "text_encoder_3.": "text_encoder_3",
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te3_": "text_encoder_3",
    "text_encoders.clip_l.transformer.": "text_encoder",
    "text_encoders.clip_g.transformer.": "text_encoder_2",
    "text_encoders.t5xxl.transformer.": "text_encoder_3",
}
# Reasons why layers or tensors of a file are left out.
NOT_THERE = "of the {total} layers of {file} are none of {pipeline}'s"
NO_ENCODER = "of the {total} layers of {file} are of a text encoder into which diffusers loads no LoRA"
TWICE = "of the {total} layers of {file} are given twice, under two names"
DIFFERENCE = "differences of weights in {file} are not read"
OTHER = "other tensors of {file} are not read"


@dataclass
class FittedLora:
    """An adapter for a pipeline.

    Attributes:
        weights: under diffusers' names, each layer with the scale 1; layers: the names of those that get them, by
            component.
        left: the layers and tensors of the file that are left out, with the reason; total: how many layers it has.
    """

    weights: dict[str, Tensor]
    layers: dict[str, list[str]]
    left: dict[str, str]
    total: int

    def note(self, pipeline: str, file: str) -> str | None:
        """What is left out, in words; None: nothing."""
        parts = []
        for reason in dict.fromkeys(self.left.values()):
            names = [name for name, why in self.left.items() if why == reason]
            words = reason.format(total=self.total, file=file, pipeline=pipeline)
            parts.append(f"{len(names)} {words} ({names[0]}{', …' if len(names) > 1 else ''})")
        return "; ".join(parts) or None


# --- by the names of layers ---------------------------------------------------------------------------------------


class _Names:
    """The layers of a model by every name that a file may have for them."""

    def __init__(self, model: nn.Module) -> None:
        from torch import nn

        self.model = model
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        modules = {name: getattr(module, "base_layer", module) for name, module in model.named_modules()}
        self.modules: dict[str, Any] = {name: module for name, module in modules.items() if isinstance(module, kinds)}
        ours = [OriginalLayer(name, (name,)) for name in self.modules]
        self._known: dict[str, OriginalLayer] = {}
        theirs = [layer for layer in original_layers(model) if self.modules.keys() >= set(layer.parts)]
        # The model's own names come first.
        for layer in (*ours, *theirs):
            for name in (layer.name, layer.name.replace(".", "_")):
                self._known.setdefault(name, layer)

    def find(self, name: str) -> OriginalLayer | None:
        """The layer of a name without what stands for the component."""
        for spelling in (
            name,
            name.replace(".processor", ""),
            name.removeprefix("text_model."),
            name.removeprefix("text_model_"),
        ):
            for form in (spelling, f"{spelling}.0", f"{spelling}_0") if spelling.endswith("to_out") else (spelling,):
                if form in self._known:
                    return self._known[form]
        return None

    def size(self, path: str) -> tuple[int, int] | None:
        """The inputs and outputs of a linear layer; None: it is another one."""
        layer = self.modules[path]
        return (layer.in_features, layer.out_features) if hasattr(layer, "in_features") else None


def _component_of(layer: str) -> tuple[str, list[str]]:
    """The component that a layer's name stands for, and the rest of the name: the likeliest first."""
    for start, component in _ENCODERS.items():
        if layer.startswith(start):
            return component, [layer.removeprefix(start)]
    return "transformer", [layer.removeprefix(start) for start in (*_TRANSFORMER, "") if layer.startswith(start)]


def fitted(pipe: Any, content: LoraContent, component: str) -> FittedLora:
    """The adapter of a file for a pipeline, layer by layer; ``component``: what gets the transformer's.

    An `InputError`: a layer has another size than the pipeline's, or a part that changes the others cannot be used.
    """
    fitting = _Fitting(pipe, content, component)
    for layer in content.layers:
        if "down" in layer.tensors:
            fitting.add(layer)
            continue
        for kind, name in layer.tensors.items():
            if kind not in ("alpha", "diff", "diff_b"):
                fitting.lora.left[name] = OTHER
            elif kind != "alpha" and content.tensors[name].any():
                # A difference of zeros changes nothing.
                fitting.lora.left[name] = DIFFERENCE
    fitting.lora.left |= dict.fromkeys(content.others, OTHER)
    _complete(fitting.lora.weights)
    return fitting.lora


class _Fitting:
    """The making of a `FittedLora`."""

    def __init__(self, pipe: Any, content: LoraContent, component: str) -> None:
        self._pipe, self._component = pipe, component
        self._settings, self._tensors = content.settings, content.tensors
        self._loadable = getattr(type(pipe), "_lora_loadable_modules", None) or ("transformer",)
        self._names: dict[str, _Names] = {}
        self.lora = FittedLora({}, {}, {}, sum("down" in layer.tensors for layer in content.layers))

    def add(self, layer: LoraLayer) -> None:
        """Add a layer of the file, or the reason why it is left out."""
        part, rests = _component_of(layer.name)
        component = self._component if part == "transformer" else part
        model = getattr(self._pipe, component, None)
        if part != "transformer" and (part not in self._loadable or model is None):
            self.lora.left[layer.name] = NO_ENCODER
            return
        if model is not None and component not in self._names:
            self._names[component] = _Names(model)
        names = self._names.get(component)
        place = next((place for rest in rests if names and (place := names.find(rest)) is not None), None)
        if names is None or place is None:
            self.lora.left[layer.name] = NOT_THERE
        elif not set(place.parts).isdisjoint(self.lora.layers.get(component, ())):
            self.lora.left[layer.name] = TWICE
        else:
            settings = self._settings.get(part)
            if settings is None and "alpha" not in layer.tensors:
                settings = self._settings.get("")
            self._put(f"{part}.", names, layer, place, self._rows(layer, place, settings))
            self.lora.layers.setdefault(component, []).extend(place.parts)

    def _rows(self, layer: LoraLayer, place: OriginalLayer, settings: Strength | None) -> dict[str, Tensor]:
        """The tensors of a layer, with the scale in them."""
        tensors = {kind: _computable(self._tensors[name]) for kind, name in layer.tensors.items()}
        rank = tensors["down"].shape[0]
        if tensors["up"].shape[1] != rank:
            raise InputError(f"has matrices of {layer.name!r} that do not fit together; take a whole file")
        scale = _scale(layer.name, place.parts[0], rank, tensors.get("alpha"), settings)
        down, up = _with_scale(tensors["down"], tensors["up"], scale)
        rows: dict[str, Tensor] = {"lora_A.weight": down, "lora_B.weight": up}
        if "bias" in tensors:
            rows["lora_B.bias"] = _times(tensors["bias"], scale)
        elif "diff_b" in tensors:
            rows["lora_B.bias"] = tensors["diff_b"]
        if "diff" in tensors and tensors["diff"].any():
            self.lora.left[layer.tensors["diff"]] = DIFFERENCE
        magnitude = tensors.get("magnitude", tensors.get("dora_scale"))
        if settings is not None and settings.use_dora and magnitude is None:
            raise InputError(f"is a DoRA by its settings and has no magnitudes of {layer.name!r}; take a whole file")
        if magnitude is not None:
            if magnitude.numel() != tensors["up"].shape[0]:
                raise InputError(
                    f"has magnitudes of {layer.name!r} by input, not by output, which are not read; merge it into the "
                    "model's weights"
                )
            rows["lora_magnitude_vector"] = magnitude.flatten()
        return rows

    def _put(
        self, start: str, names: _Names, layer: LoraLayer, place: OriginalLayer, rows: Mapping[str, Tensor]
    ) -> None:
        """Give the pipeline's layers their rows of the tensors, under names with this start."""
        import torch

        sizes = [names.size(path) for path in place.parts]
        given = rows["lora_A.weight"].shape[1], rows["lora_B.weight"].shape[0]
        lengths = [given[1] if size is None else size[1] for size in sizes]
        wanted = given if None in sizes else (sizes[0][0], sum(lengths))  # type: ignore[index]
        # diffusers widens FLUX's first layer for the LoRA of a control image.
        widened = hasattr(self._pipe, "_maybe_expand_transformer_param_shape_or_error_") and given[1] == wanted[1]
        if given != wanted and not widened:
            raise InputError(
                f"has {layer.name!r} for {given[0]} inputs and {given[1]} outputs, and that of "
                f"{type(names.model).__name__} has {wanted[0]} and {wanted[1]}; take a LoRA of this model"
            )
        for kind, tensor in rows.items():
            if kind == "lora_A.weight":
                # Layers that share a matrix in the file have one each: adapters may be changed in place.
                pieces = [tensor.clone() for _ in lengths] if len(lengths) > 1 else [tensor]
            else:
                whole = torch.cat(tensor.chunk(2)[::-1]) if place.swapped else tensor
                pieces = [piece.contiguous() for piece in whole.split(lengths)]
            for path, piece in zip(place.parts, pieces, strict=True):
                self.lora.weights[f"{start}{path}.{kind}"] = piece


def _computable(tensor: Tensor) -> Tensor:
    """A tensor in a type in which it can be multiplied."""
    import torch

    return tensor.to(torch.bfloat16) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _with_scale(down: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Two matrices whose product has a scale; each gets about half of it, so that float16 keeps its digits."""
    half = 2.0 ** round(log2(scale) / 2) if scale > 0 else 1.0
    return _times(down, half), _times(up, scale / half)


def _times(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1 else (tensor.double() * scale).to(tensor.dtype)


def _scale(layer: str, path: str, rank: int, alpha: Tensor | None, settings: Strength | None) -> float:
    """The scale of a layer, from its ``.alpha`` or the settings; 1 without either."""
    told = settings.of(path, rank) if settings is not None else None
    if alpha is None:
        return 1.0 if told is None else told
    if alpha.numel() != 1 or not alpha.isfinite().all():
        raise InputError(f"has an alpha of {layer!r} that is no number; take a whole file")
    scale = float(alpha) / rank
    if told is not None and abs(told - scale) > 1e-3 * abs(scale):
        raise InputError(f"says two strengths for {layer!r}: {scale:g} by its alpha, {told:g} by its settings")
    return scale


def _complete(weights: dict[str, Tensor]) -> None:
    """Give all layers a bias if one has it, as peft wants it; reject magnitudes of some layers alone."""
    import torch

    for part in {name.partition(".")[0] for name in weights}:
        ends = (".lora_B.weight", ".lora_B.bias", ".lora_magnitude_vector")
        layers, biases, magnitudes = (
            [name.removesuffix(end) for name in weights if name.startswith(f"{part}.") and name.endswith(end)]
            for end in ends
        )
        if magnitudes and len(magnitudes) < len(layers):
            plain = next(layer for layer in layers if layer not in magnitudes)
            raise InputError(
                f"has magnitudes (DoRA) for {len(magnitudes)} of its layers and none for {plain}, which is not read; "
                "merge it into the model's weights"
            )
        for layer in layers if biases else ():
            up = weights[f"{layer}.lora_B.weight"]
            weights.setdefault(f"{layer}.lora_B.bias", torch.zeros(len(up), dtype=up.dtype))


# --- as diffusers reads it ----------------------------------------------------------------------------------------


def as_diffusers_reads(pipe: Any, content: LoraContent) -> FittedLora | None:
    """The adapter of a file as diffusers' conversions for the pipeline read it, where all of the file goes in.

    Some conversions drop what they do not know without a word: all numbers of the second matrices have to come out of
    one again, in layers that are there.
    """
    read = getattr(type(pipe), "lora_state_dict", None)
    layers = [layer for layer in content.layers if "down" in layer.tensors]
    plain = all(layer.tensors.keys() <= {"down", "up", "alpha"} for layer in content.layers)
    if read is None or content.settings or content.others or not plain:
        return None
    models = [(name, model) for name, model in pipe.components.items() if hasattr(model, "named_modules")]
    places = {f"{name}.{path}" for name, model in models for path, _ in model.named_modules()}
    # Some conversions know peft's ends of names alone, and others kohya's.
    for ends in ((".lora_A.weight", ".lora_B.weight"), None):
        weights, numbers = _scaled(content, layers, ends), 0
        try:
            converted = cast(Any, read)(dict(weights))
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception:
            # They fail in any way at names that they do not know.
            continue
        paths: dict[str, list[str]] = {}
        for key, value in converted.items():
            component, _, rest = key.partition(".")
            path, end, _ = rest.partition(".lora_B.weight")
            if end and f"{component}.{path}" in places:
                paths.setdefault(component, []).append(path)
                numbers += value.numel()
        if numbers == sum(content.tensors[layer.tensors["up"]].numel() for layer in layers):
            return FittedLora(weights, paths, {}, len(layers))
    return None


def _scaled(content: LoraContent, layers: Iterable[LoraLayer], ends: tuple[str, str] | None) -> dict[str, Tensor]:
    """The matrices of a file with the scales in them, under its names, perhaps with other ``ends``."""
    import torch

    weights: dict[str, Tensor] = {}
    for layer in layers:
        names = [layer.tensors[kind] for kind in ("down", "up")]
        down, up = (_computable(content.tensors[name]) for name in names)
        if (alpha := layer.tensors.get("alpha")) is not None:
            rank = down.shape[0]
            down, up = _with_scale(down, up, _scale(layer.name, layer.name, rank, content.tensors[alpha], None))
            if ends is None:
                # Conversions of kohya's names ask for it.
                weights[alpha] = torch.tensor(float(rank))
        weights |= zip(names if ends is None else [f"{layer.name}{end}" for end in ends], (down, up), strict=True)
    return weights
