"""LoRA files of any trainer: their layers with the strength of each, as they are written, without a pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, reason_of

if TYPE_CHECKING:
    from torch import Tensor

# The metadata entry of diffusers with peft's settings, which begin with the name of a component; and another entry,
# which says for which transformer of several an adapter is: diffusers' own files do not.
METADATA = "lora_adapter_metadata"
COMPONENT = "ditmesh_component"
# What peft writes into a folder.
PEFT_FILE, PEFT_SETTINGS = "adapter_model.safetensors", "adapter_config.json"
# Limits of what strangers' files may ask for.
SETTINGS_BYTES = 4 << 20
MOST_TENSORS = 100_000
NAME_LENGTH = 300
LARGEST_NUMBER = 1e9
# Names become parts of patterns in peft: nothing in them may mean anything there but a dot.
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")
# Of LoCon: a layer is a product of three matrices.
_THIRD_MATRIX = ".lora_mid."

# Ends of tensors' names, and what these tensors are. All of them are short, and none repeats a group.
_ENDS = {
    "down": re.compile(
        r"(?:[._]lora\.down|\.lora_A|\.lora_down|\.lora_linear_layer\.down|(?<=lora)\.down|(?<=lora[12])\.down)"
        r"(?:\.default(?:_\d+)?)?\.weight$"
    ),
    "up": re.compile(
        r"(?:[._]lora\.up|\.lora_B|\.lora_up|\.lora_linear_layer\.up|(?<=lora)\.up|(?<=lora[12])\.up)"
        r"(?:\.default(?:_\d+)?)?\.weight$"
    ),
    "bias": re.compile(r"\.lora_(?:B|up)(?:\.default(?:_\d+)?)?\.bias$"),
    "magnitude": re.compile(r"\.lora_magnitude_vector(?:\.default(?:_\d+)?)?(?:\.weight)?$"),
    "dora_scale": re.compile(r"\.dora_scale$"),
    "alpha": re.compile(r"\.alpha$"),
    "diff": re.compile(r"\.diff$"),
    "diff_b": re.compile(r"\.diff_b$"),
}
# Settings of peft that say nothing on what the tensors mean.
_IDLE = {
    "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "init_weights", "layers_pattern", "layers_to_transform", "lora_bias",
    "lora_dropout", "loftq_config", "megatron_core", "module_dropout", "peft_type", "peft_version", "qalora_group_size",
    "rank_dropout", "rank_dropout_scale", "revision", "target_modules", "task_type",
}  # fmt: skip
_READ = {
    "alpha_pattern", "lora_alpha", "r", "rank_pattern", "use_dora", "use_rslora",
}  # fmt: skip
# Ways of peft to begin a training that change the weights below the adapter.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "milora")


@dataclass(frozen=True)
class Strength:
    """Which settings of an adapter say how strong it is, as peft has them.

    Attributes:
        rank, alpha: of the layers that no pattern names.
        ranks, alphas: by the end of a layer's name.
        rslora: the scale is alpha / sqrt(rank), not alpha / rank.
        dora: each layer has magnitudes.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False

    def of(self, layer: str, rank: int) -> float:
        """The scale of a layer.

        Args:
            layer: its name in the model.
            rank: that of its matrices.

        Raises:
            InputError: the settings say another rank.
        """
        told = int(_of_pattern(self.ranks, layer, self.rank))
        if told != rank:
            raise InputError(
                f"its settings say rank {told} for {layer!r}, whose matrices have {rank}; take a whole file"
            )
        alpha = _of_pattern(self.alphas, layer, self.alpha)
        return alpha / (sqrt(rank) if self.rslora else rank)


def _of_pattern(patterns: Mapping[str, float], layer: str, otherwise: float) -> float:
    ends = {layer, *(layer[at + 1 :] for at, letter in enumerate(layer) if letter == ".")}
    fitting = ends & patterns.keys()
    if len(fitting) > 1:
        # As peft does it: the first that fits.
        return next(value for name, value in patterns.items() if name in fitting)
    return patterns[fitting.pop()] if fitting else otherwise


@dataclass
class LoraLayer:
    """A layer of a file: the names of its tensors, by what they are (the keys of ``_ENDS``)."""

    name: str
    tensors: dict[str, str]


@dataclass
class LoraContent:
    """What is in a file.

    Attributes:
        path: the file.
        layers: with two matrices each, or with differences alone.
        others: names of tensors that are none of a layer.
        settings: by component; under "" those of all.
        component: the transformer that the file is for, where it says so.
    """

    path: Path
    layers: list[LoraLayer]
    others: list[str]
    settings: dict[str, Strength]
    component: str | None

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the file."""
        from safetensors.torch import load_file

        return load_file(self.path)


def read_lora(path: Path) -> LoraContent:
    """What a LoRA file holds, without reading its tensors.

    Raises:
        InputError: it is no safetensors file, holds no LoRA, or settings that cannot be followed; the message
            is for use behind the file's name.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as tensors:
            names, metadata = list(tensors.keys()), tensors.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InputError(f"is not a safetensors file ({reason_of(error)}); save it as one") from None
    _check_names(names)
    layers, others = _sorted_out(names)
    if not any("down" in layer.tensors for layer in layers):
        some = ", ".join(names[:3]) or "nothing"
        raise InputError(f"holds no LoRA (it has {some}); give the adapter's file")
    return LoraContent(path, layers, others, _settings(path, metadata), metadata.get(COMPONENT))


def _check_names(names: list[str]) -> None:
    if len(names) > MOST_TENSORS:
        raise InputError(f"has {len(names):,} tensors, and an adapter may have {MOST_TENSORS:,}; take another file")
    for name in names:
        if len(name) > NAME_LENGTH or not _PLAIN.fullmatch(name):
            raise InputError(
                f"has a tensor {name[:80]!r}, which no layer is called (letters, digits, '.', '_', '-', '/', at most "
                f"{NAME_LENGTH}); take another file"
            )
        if _THIRD_MATRIX in name:
            # Its layer would be another one without it.
            raise InputError(f"holds a third matrix ({name}), which is not read; merge it into the model's weights")


def _sorted_out(names: Iterable[str]) -> tuple[list[LoraLayer], list[str]]:
    """Layers, and other tensors."""
    layers: dict[str, LoraLayer] = {}
    others = []
    for name in names:
        for kind, end in _ENDS.items():
            if (match := end.search(name)) is not None:
                layer = name[: match.start()]
                layers.setdefault(layer, LoraLayer(layer, {})).tensors[kind] = name
                break
        else:
            others.append(name)
    for layer in layers.values():
        if ("down" in layer.tensors) != ("up" in layer.tensors):
            raise InputError(f"has one of the two matrices of {layer.name!r} alone; take a whole file")
    return list(layers.values()), others


# --- settings -----------------------------------------------------------------------------------------------------


def settings_file(path: Path) -> Path | None:
    """The settings beside the weights that peft has saved; None: these are other weights."""
    beside = path.with_name(PEFT_SETTINGS)
    return beside if path.name == PEFT_FILE and beside.is_file() else None


def _settings(path: Path, metadata: Mapping[str, str]) -> dict[str, Strength]:
    beside = settings_file(path)
    if beside is not None:
        try:
            with beside.open("rb") as file:
                text = file.read(SETTINGS_BYTES + 1)
        except OSError as error:
            raise InputError(f"cannot read {PEFT_SETTINGS} beside it ({reason_of(error)})") from None
        return {"": _strength(_parsed(text, PEFT_SETTINGS))}
    if METADATA not in metadata:
        return {}
    about = _parsed(metadata[METADATA].encode(), METADATA)
    parts: dict[str, dict[str, Any]] = {}
    for key, value in about.items():
        component, dot, name = key.partition(".")
        if not dot:
            raise InputError(f"has a setting {key[:80]!r} of no component in {METADATA}; save it with diffusers again")
        parts.setdefault(component, {})[name] = value
    return {component: _strength(own) for component, own in parts.items()}


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    if len(text) > SETTINGS_BYTES:
        raise InputError(f"has more than {SETTINGS_BYTES >> 20} MiB of settings in {where}; take another file")
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"has settings in {where} that are no JSON; take another file") from None
    if not isinstance(about, dict):
        raise InputError(f"has settings in {where} that are no JSON object; take another file")
    return about


def _strength(about: Mapping[str, Any]) -> Strength:
    """What settings of peft say of the strength. Names of layers in them are compared, and no pattern is run.

    Raises:
        InputError: a setting means something else, or is out of range.
    """
    kind = about.get("peft_type", "LORA")
    if kind != "LORA":
        raise InputError(f"is an adapter of peft's type {str(kind)[:40]!r}, which is not read; take a LoRA")
    for name, value in about.items():
        if name not in _IDLE and name not in _READ and value not in (None, False, {}, [], ""):
            raise InputError(
                f"has a setting {name[:80]!r} of its adapter that is not followed here; merge it into the model's "
                "weights"
            )
    begun = about.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGED_BASE):
        raise InputError(
            f"has init_lora_weights={begun[:40]!r}, which changed the weights below it; save it with peft's "
            "path_initial_model_for_weight_conversion"
        )
    if about.get("bias") not in (None, "none"):
        raise InputError(f"has bias={str(about['bias'])[:40]!r}, whose biases are not read; train it with bias='none'")
    rank = _number(about, "r", 8)
    alpha = _number(about, "lora_alpha", 8)
    ranks = {name: int(value) for name, value in _patterns(about, "rank_pattern").items()}
    rslora, dora = (about.get(name) is True for name in ("use_rslora", "use_dora"))
    return Strength(int(rank), alpha, ranks, _patterns(about, "alpha_pattern"), rslora, dora)


def _number(about: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = about.get(name, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_NUMBER:
        raise InputError(f"has {name}={str(value)[:40]!r} in its settings, which is no such number; take another file")
    return value


def _patterns(about: Mapping[str, Any], name: str) -> dict[str, float]:
    given = about.get(name) or {}
    if not isinstance(given, dict):
        raise InputError(f"has {name}={str(given)[:40]!r} in its settings, which is no table; take another file")
    plain = {}
    for pattern in given:
        # diffusers anchors names, and a careful writer escapes their dots.
        layer = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if len(pattern) > NAME_LENGTH or not _PLAIN.fullmatch(layer):
            raise InputError(
                f"has {pattern[:80]!r} in {name}, which is no layer's name; patterns of files are not run: save it "
                "with whole names"
            )
        plain[layer] = _number(given, pattern, 0)
    return plain
