"""LoRA files of any trainer: their layers with the strength of each, as they are written, without a pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from ..errors import InputError, problem_text, reason_of

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
LARGEST_NUMBER = 10**9
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
# Ways of peft to begin a training that change the weights below the adapter.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "milora")


def _plain_name(pattern: str) -> str:
    # diffusers anchors names, and a careful writer escapes their dots.
    layer = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
    if len(pattern) > NAME_LENGTH or not _PLAIN.fullmatch(layer):
        raise ValueError(
            f"{pattern[:80]!r} is no layer's name; patterns of files are not run: save it with whole names"
        )
    return layer


Number = Annotated[FiniteFloat, Field(ge=0, le=LARGEST_NUMBER)]
Rank = Annotated[int, Field(ge=0, le=LARGEST_NUMBER)]
LayerName = Annotated[str, AfterValidator(_plain_name)]


class Strength(BaseModel):
    """The settings of an adapter that say how strong it is, with peft's names and defaults."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    peft_type: Literal["LORA"] = "LORA"
    bias: Literal["none"] | None = None
    r: Rank = 8
    lora_alpha: Number = 8.0
    rank_pattern: dict[LayerName, Rank] | None = None
    alpha_pattern: dict[LayerName, Number] | None = None
    use_rslora: bool = False
    use_dora: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_meanings(cls, about: Mapping[str, Any]) -> Mapping[str, Any]:
        for name, value in about.items():
            if name not in _IDLE and name not in cls.model_fields and value not in (None, False, {}, [], ""):
                raise ValueError(f"the setting {name[:80]!r} is not followed here; merge it into the model's weights")
        begun = about.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_CHANGED_BASE):
            raise ValueError(
                f"init_lora_weights={begun[:40]!r} changed the weights below it; save it with peft's "
                "path_initial_model_for_weight_conversion"
            )
        return about

    def of(self, layer: str, rank: int) -> float:
        """The scale of a LoRA layer whose two matrices have this rank; an `InputError` if the settings say another."""
        told = int(_of_pattern(self.rank_pattern, layer, self.r))
        if told != rank:
            raise InputError(
                f"its settings say rank {told} for {layer!r}, whose matrices have {rank}; take a whole file"
            )
        alpha = _of_pattern(self.alpha_pattern, layer, self.lora_alpha)
        return alpha / (sqrt(rank) if self.use_rslora else rank)


def _of_pattern(patterns: Mapping[str, float] | None, layer: str, otherwise: float) -> float:
    """The value of the first name that is the layer's or its end, as peft takes it."""
    ends = (value for name, value in (patterns or {}).items() if f".{layer}".endswith(f".{name}"))
    return next(ends, otherwise)


@dataclass
class LoraLayer:
    """A layer of a file: the names of its tensors, by what they are (the keys of ``_ENDS``)."""

    name: str
    tensors: dict[str, str]


@dataclass
class LoraContent:
    """What is in a file.

    Attributes:
        layers: with two matrices each, or with differences alone; others: names of further tensors.
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

    `InputError`: it is no safetensors file, holds no LoRA, or settings that cannot be followed; the message is for use
    behind the file's name.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as tensors:
            names, metadata = list(tensors.keys()), tensors.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InputError(f"is not a safetensors file ({reason_of(error)}); save it as one") from None
    layers, others = _layers_of(names)
    if not any("down" in layer.tensors for layer in layers):
        some = ", ".join(names[:3]) or "nothing"
        raise InputError(f"holds no LoRA (it has {some}); give the adapter's file")
    return LoraContent(path, layers, others, _settings(path, metadata), metadata.get(COMPONENT))


def _layers_of(names: list[str]) -> tuple[list[LoraLayer], list[str]]:
    """Layers, and other tensors; refuses too many tensors, names that no layer has, and half of a layer."""
    if len(names) > MOST_TENSORS:
        raise InputError(f"has {len(names):,} tensors, and an adapter may have {MOST_TENSORS:,}; take another file")
    layers: dict[str, LoraLayer] = {}
    others = []
    for name in names:
        if len(name) > NAME_LENGTH or not _PLAIN.fullmatch(name):
            raise InputError(
                f"has a tensor {name[:80]!r}, which no layer is called (letters, digits, '.', '_', '-', '/', at most "
                f"{NAME_LENGTH}); take another file"
            )
        if _THIRD_MATRIX in name:
            # Its layer would be another one without it.
            raise InputError(f"holds a third matrix ({name}), which is not read; merge it into the model's weights")
        match, kind = next(((match, kind) for kind, end in _ENDS.items() if (match := end.search(name))), (None, ""))
        if match is None:
            others.append(name)
        else:
            layer = name[: match.start()]
            layers.setdefault(layer, LoraLayer(layer, {})).tensors[kind] = name
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
    """What settings of peft say of the strength, by component. Names of layers are compared, and no pattern is run."""
    beside, parts = settings_file(path), dict[str, dict[str, Any]]()
    if beside is None and METADATA not in metadata:
        return {}
    where = METADATA if beside is None else PEFT_SETTINGS
    try:
        text = metadata[METADATA].encode() if beside is None else beside.read_bytes()
        if len(text) > SETTINGS_BYTES:
            raise InputError(f"has more than {SETTINGS_BYTES >> 20} MiB of settings in {where}; take another file")
        for key, value in dict(json.loads(text)).items():
            component, _, name = key.rpartition(".") if beside is None else ("", "", key)
            parts.setdefault(component, {})[name] = value
        return {component: Strength.model_validate(about) for component, about in parts.items()}
    except InputError:
        raise
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = "".join(f"{part}: " for part in problem["loc"][:1])
        raise InputError(f"has settings in {where} that cannot be followed: {name}{problem_text(problem)}") from None
    except (ValueError, TypeError, RecursionError):
        raise InputError(f"has settings in {where} that are no JSON object; take another file") from None
    except OSError as error:
        raise InputError(f"cannot read {where} beside it ({reason_of(error)})") from None
