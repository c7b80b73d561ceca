"""LoRA files of other trainers for the tiny models, and the weights that each should make, merged by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from support.exam import build, flow
from support.models import tiny

RANK, ALPHA = 4, 6.0
# A layer in the authors' code, and the layers of diffusers that are its rows; a tilde: with halves that are swapped.
Layer = tuple[str, tuple[str, ...]]


def _expanded(parts: list[str]) -> tuple[str, ...]:
    """Names of layers; "qkv of X" and "added of X" are three of them."""
    names: list[str] = []
    for part in parts:
        which, _, block = part.rpartition(" of ")
        form = {"qkv": "{}.to_{}", "added": "{}.add_{}_proj", "": "{}"}[which]
        names += [form.format(block, letter) for letter in ("qkv" if which else "q")]
    return tuple(names)


# Pipelines, and some layers of each: of both blocks, in fused and whole rows, and outside the blocks.
FAMILIES: dict[str, tuple[str, list[Layer]]] = {
    family: (row["pipeline"], [(name, _expanded(parts)) for name, parts in row["layers"].items()])
    for family, row in json.loads(Path(__file__).with_name("lora_layers.json").read_text("utf-8")).items()
}
# And those whose authors' names diffusers alone knows.
KINDS = {family: kind for family, (kind, _) in FAMILIES.items()} | {"Krea2": "Krea2Pipeline"}


def pipeline(family: str) -> Any:
    """A pipeline of a family's tiny transformer and nothing else that could take an adapter."""
    guard = {"safety_checker": nn.Module()} if family == "Cosmos" else {}
    return build(KINDS[family], transformer=copy.deepcopy(tiny(family)), scheduler=flow(), **guard)


@dataclass
class Written:
    """Tensors of a file, and what they add to the weights of a pipeline's transformer."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    added: dict[str, Tensor] = field(default_factory=dict)
    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    settings: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None

    def save(self, folder: Path) -> Path:
        """Write them as a file; those with settings as peft's folder."""
        file = folder / ("lora.safetensors" if self.settings is None else "adapter_model.safetensors")
        save_file(self.tensors, file, {"format": "pt", **(self.metadata or {})})
        if self.settings is not None:
            (folder / "adapter_config.json").write_text(json.dumps(self.settings))
            return folder
        return file

    def pair(
        self, model: nn.Module, name: str, parts: Iterable[str], scale: float, ends: tuple[str, str], rank: int = RANK
    ) -> None:
        """Add the two matrices of a layer."""
        own = [part.removeprefix("~") for part in parts]
        layers = [model.get_submodule(part) for part in own]
        rows = [layer.out_features for layer in layers]
        down = torch.randn(rank, layers[0].in_features) / layers[0].in_features ** 0.5
        up = 0.4 * torch.randn(sum(rows), rank)
        self.tensors |= {f"{name}{ends[0]}": down, f"{name}{ends[1]}": up}
        whole = scale * up.double() @ down.double()
        if next(iter(parts)).startswith("~"):
            whole = torch.cat([whole[rows[0] // 2 :], whole[: rows[0] // 2]])
        for part, piece in zip(own, whole.split(rows), strict=True):
            self.added[f"{part}.weight"] = self.added.get(f"{part}.weight", 0) + piece


PEFT, KOHYA = (".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight")
# Format: what layers' names begin with, whether they are the authors' names, with underscores, the ends, and alphas.
FORMATS: dict[str, tuple[str, bool, bool, tuple[str, str], bool]] = {
    "diffusers": ("transformer.", False, False, PEFT, False),
    "ai-toolkit": ("transformer.", False, False, PEFT, True),
    "own names": ("", False, False, PEFT, False),
    "old names": ("transformer.", False, False, (".lora.down.weight", ".lora.up.weight"), False),
    "named adapter": ("transformer.", False, False, (".lora_A.default.weight", ".lora_B.default.weight"), False),
    "ComfyUI": ("diffusion_model.", True, False, PEFT, False),
    "ComfyUI with alpha": ("diffusion_model.", True, False, KOHYA, True),
    "kohya": ("lora_unet_", True, True, KOHYA, True),
    "SimpleTuner": ("lycoris_", False, True, KOHYA, True),
}


def written(family: str, form: str, layers: list[Layer] | None = None) -> Written:
    """A file of a format for a family."""
    start, theirs, flat, ends, alpha = FORMATS[form]
    model, made = tiny(family), Written()
    torch.manual_seed(3)
    for name, parts in layers or FAMILIES[family][1]:
        for whole, own in (
            [(name, parts)] if theirs else [(part.removeprefix("~"), (part.removeprefix("~"),)) for part in parts]
        ):
            base = start + (whole.replace(".", "_") if flat else whole)
            made.pair(model, base, own, ALPHA / RANK if alpha else 1.0, ends)
            if alpha:
                made.tensors[f"{base}.alpha"] = torch.tensor(ALPHA)
    return made


def peft_folder(family: str, **settings: Any) -> Written:
    """A folder of peft; the strength is in its settings alone, and one layer has another rank and alpha."""
    model, made = tiny(family), Written()
    torch.manual_seed(4)
    paths = [part.removeprefix("~") for _, parts in FAMILIES[family][1] for part in parts]
    other = {"rank_pattern": {paths[0]: 2}, "alpha_pattern": {paths[0]: 3}}
    made.settings = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ".*", "bias": "none", **other, **settings,
    }  # fmt: skip
    for number, path in enumerate(paths):
        rank, alpha = (2, 3) if number == 0 else (RANK, 16)
        scale = alpha / (sqrt(rank) if settings.get("use_rslora") else rank)
        made.pair(model, f"base_model.model.{path}", [path], scale, PEFT, rank)
    return made


def merged_error(family: str, pipe: Any, made: Written) -> float:
    """The largest relative difference between weights with the adapter merged and those merged by hand."""
    return model_error(tiny(family), pipe.transformer, made)


def model_error(untouched: nn.Module, model: nn.Module, made: Written) -> float:
    """The same of any model with an adapter."""
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
    now = {key.replace(".base_layer.", "."): value for key, value in model.named_parameters() if ".lora_" not in key}
    errors = [0.0]
    for key, value in untouched.named_parameters():
        wanted = value.detach().double() + made.added.get(key, 0)
        if (magnitude := made.magnitudes.get(key)) is not None:
            wanted = magnitude.double()[:, None] * wanted / wanted.norm(dim=1, keepdim=True)
        errors.append(float((now[key].detach().double() - wanted).norm() / wanted.norm()))
    return max(errors)
