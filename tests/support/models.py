"""Tiny components with random weights, and inputs of the transformers among them. All float32.

Their settings stand in parts.json, by name: the families of `MAKERS` (8 heads each), transformers without a reviewed
layout, autoencoders, text encoders. ``like`` is a component whose settings one has, but for those that it names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ditmesh.layout.conventions import CallVariant, Conventions, Size

# B=1 with lengths that divide by nothing, B=2 with ragged masks where the model takes masks.
ODD = Size(rows=7, cols=7, text=13, batch=1)
RAGGED = Size(rows=8, cols=8, text=32, batch=2)

SECTIONS: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("parts.json").read_text())
PARTS = {name: settings for section in SECTIONS.values() for name, settings in section.items()}


def settings_of(name: str) -> dict[str, Any]:
    """Settings of a component, and ``class``: its class in diffusers, or in transformers or here if that is named."""
    settings = dict(PARTS[name])
    like = settings.pop("like", None)
    return {"class": name.split()[0], **settings} if like is None else {**settings_of(like), **settings}


def class_of(name: str) -> Any:
    path, _, kind = name.rpartition(".")
    outside = path.startswith(("transformers", "support"))
    return getattr(import_module(path if outside else f"diffusers.{path}".rstrip(".")), kind)


def component(name: str, **changes: Any) -> Any:
    """A component as it is made, with some settings changed."""
    return assembled({**settings_of(name), **changes})


def assembled(settings: dict[str, Any]) -> Any:
    """A component of settings, which may hold others.

    Beside them: ``seed`` of its weights, ``cast`` to a dtype, ``registered`` entries of its configuration.
    """
    beside = {key: value for key, value in settings.items() if key in ("class", "seed", "cast", "registered")}
    given = {key: part(v) if isinstance(v, dict) else v for key, v in settings.items() if key not in beside}
    kind = class_of(beside["class"])
    torch.manual_seed(beside.get("seed", 0))
    encodes = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    model = kind(kind.config_class(**given)) if encodes else kind(**given)
    if kind.__name__ in ("LuminaNextDiT2DModel", "NucleusMoEImageTransformer2DModel"):
        for parameter_name, parameter in model.named_parameters():
            if "experts." in parameter_name or parameter_name == "pad_token":
                # Diffusers makes them without values.
                nn.init.normal_(parameter, std=0.1)
    if "registered" in beside:
        model.register_to_config(**beside["registered"])
    return model.to(getattr(torch, beside["cast"])) if "cast" in beside else model


def part(given: Any) -> Any:
    """A component of a table: by its name, or changed (``like``), or of a class; anything else as it is."""
    if isinstance(given, str) and given in PARTS:
        return fresh(given)
    if isinstance(given, dict) and "like" in given:
        return fresh(given["like"], **{key: value for key, value in given.items() if key != "like"})
    return made(partial(assembled, given)) if isinstance(given, dict) and "class" in given else given


def made(make: Callable[[], Any]) -> Any:
    """A component with the same weights in every process, zero gates stirred."""
    torch.manual_seed(0)
    model = make()
    return stirred(model.eval()) if isinstance(model, nn.Module) else model


MAKERS: dict[str, Callable[[], nn.Module]] = {name: partial(component, name) for name in SECTIONS["families"]}

# Of each kind one: for tests that are long with all of them. Joint and cross-attention, none and ragged text, frames,
# tables of positions and of angles, modules that mix tokens.
KINDS = ("DiT", "PixArt", "SD3", "Flux", "Wan", "LTX2", "Mochi", "Sana")

# How the pipelines call the model, where that is not with (B, C, H, W) latents and without `attention_mask`.
WAYS = {
    "PixArt": CallVariant("bchw", masked="image"),
    "Flux": CallVariant("bsc"),
    "Flux2": CallVariant("bsc"),
    "CogVideoX": CallVariant("bfchw"),
    "HunyuanVideo": CallVariant("bcfhw"),
    "HunyuanVideo I2V": CallVariant("bcfhw"),
    "HunyuanVideo15": CallVariant("bcfhw"),
    "Wan": CallVariant("bcfhw"),
    "Wan I2V": CallVariant("bcfhw"),
    "Wan TI2V": CallVariant("bcfhw"),
    "QwenImage": CallVariant("bsc"),
    "QwenImage edit": CallVariant("bsc"),
    "ZImage": CallVariant("list"),
    "LTX": CallVariant("bsc"),
    "LTX I2V": CallVariant("bsc"),
    "LTX2": CallVariant("bsc"),
    "LTX2 I2V": CallVariant("bsc"),
    "LTX2 STG": CallVariant("bsc"),
    "Mochi": CallVariant("bcfhw"),
    "CogView4": CallVariant("bchw", masked="text"),
    "Chroma": CallVariant("bsc", masked="joint"),
    "StableAudio": CallVariant("bcs"),
    "Krea2": CallVariant("bsc"),
    "Cosmos": CallVariant("bcfhw", masked="text"),
    "Cosmos V2W": CallVariant("bcfhw", masked="text"),
    "Latte": CallVariant("bcfhw"),
    "MiniMaxH3": CallVariant("bsc"),
}


@cache
def tiny(name: str) -> nn.Module:
    """The tiny model of a family, the same weights in every process."""
    return fresh(name)


@cache
def variant(name: str, **changes: Any) -> nn.Module:
    """The tiny model of a family with some settings of its configuration changed."""
    return fresh(name, **changes)


def fresh(name: str, **changes: Any) -> Any:
    """A component of its own, the same weights in every process."""
    return made(partial(component, name, **changes))


def stirred(model: nn.Module) -> nn.Module:
    """Fresh models hold zeros and ones in places (biases, scale tables); a mistake there would not show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


# Image-to-video pipelines pass a timestep for every token, or for every frame.
TIMES: dict[str, Callable[[Size], dict[str, torch.Tensor]]] = {
    "Wan TI2V": lambda size: {"timestep": times(size.image)},
    "LTX I2V": lambda size: {"timestep": times(size.image)},
    "LTX2 I2V": lambda size: {"timestep": times(size.image), "audio_timestep": times(size.audio)},
    "Cosmos V2W": lambda size: {"timestep": torch.linspace(0.1, 0.9, size.frames)[None, :, None, None]},
}


def times(tokens: int) -> torch.Tensor:
    return torch.linspace(1, 900, tokens)


# Latte's own forward fails with a mask and more than one frame; its pipeline passes none.
MASKLESS = {"Latte"}


def sizes(name: str) -> dict[str, Size]:
    """The two sizes of the parity matrix for a model: `ODD` and `RAGGED`, two frames for videos."""
    found = {"B=1": ODD, "B=2 ragged": RAGGED}
    if WAYS.get(name, CallVariant("bchw")).form in ("bcfhw", "bfchw") or name.startswith("LTX"):
        found = {key: replace(size, frames=2, audio=size.rows + 4) for key, size in found.items()}
    if name == "Wan I2V":
        # The block takes the last 512 tokens for text, whatever comes.
        found = {key: replace(size, text=512) for key, size in found.items()}
    return found


def inputs(name: str, size: Size, masks: bool = True) -> dict[str, Any]:
    """Arguments of the model's forward; with B=2 every mask (or list of captions) is ragged."""
    way = replace(WAYS.get(name, CallVariant("bchw")), optional=masks and name not in MASKLESS)
    made = Conventions(tiny(name), way).inputs(size)
    for key, value in TIMES[name](size).items() if name in TIMES else ():
        made[key] = value.expand(size.batch, *value.shape)
    for key, value in [*made.items(), *made.get("joint_attention_kwargs", {}).items()]:
        if "mask" in key and isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            value.fill_(True)
            if size.batch > 1 and masks:
                value[0, ..., -5 if value.shape[-1] > 5 else -1 :] = False
    if size.batch > 1 and masks and "cap_feats" in made:
        made["cap_feats"][0] = torch.cat([made["cap_feats"][0]] * 2)
    if name == "QwenImage edit":
        # The picture and, in its last three rows, the picture it is to be made from.
        made["img_shapes"] = [[(1, size.rows - 3, size.cols), (1, 3, size.cols)]] * size.batch
    if name == "LTX2 STG":
        # Spatio-temporal guidance: the second block leaves its self-attention out; for one sample of two only,
        # it computes it and drops it.
        made["spatio_temporal_guidance_blocks"] = [1]
        made["perturbation_mask"] = torch.tensor([0.0, 1.0][: size.batch])
    return made


def run(model: nn.Module, arguments: dict[str, Any], recorded: bool = False) -> torch.Tensor:
    """One forward, without gradients or with; several outputs (a list of pictures, video and audio) as one vector."""
    with torch.set_grad_enabled(recorded):
        output = model(**arguments)
    outputs = [part for item in output for part in (item if isinstance(item, (list, tuple)) else [item])]
    return outputs[0] if len(outputs) == 1 else torch.cat([part.flatten() for part in outputs])


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of the truth."""
    return float((value - truth).abs().max() / truth.abs().max())
