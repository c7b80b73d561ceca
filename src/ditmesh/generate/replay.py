"""A picture generated again from its receipt, and what is different this time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import zoo
from ..config import ParallelConfig, setting
from ..errors import InputError
from ..quality import metrics
from .job import Job, job_for
from .model_info import ModelInfo, cached, find_model, is_hub_id
from .receipt import Receipt


@dataclass(frozen=True)
class Change:
    """Something that is not as it was when the picture was drawn.

    Attributes:
        what: name of it.
        was, now: in words.
        decides: whether it can change a reproducible picture; anything can change another one's last bits.
    """

    what: str
    was: str
    now: str
    decides: bool

    def describe(self) -> str:
        """Such as ``torch 2.13.0 -> 2.14.0``."""
        return f"{self.what} {self.was} -> {self.now}"


@dataclass(frozen=True)
class Replay:
    """A picture and the one drawn again.

    Attributes:
        promised: the same pixels were promised: both were drawn in reproducible mode and nothing that decides has
            changed.
        equal: the pixels are the same.
        largest: largest difference of any channel, of 255; None when the sizes differ.
        pixels: share of pixels that differ.
        psnr: in dB; None when equal or of another size.
        changes: what is different.
    """

    promised: bool
    equal: bool
    largest: int | None
    pixels: float
    psnr: float | None
    changes: tuple[Change, ...]


def model_of(receipt: Receipt, model: str | None = None) -> ModelInfo:
    """The model of a receipt, or another one in its place.

    A model embedded in ditmesh is found wherever ditmesh is installed. A picture is somebody else's: a hub model that
    it names is taken from the hub's cache, and never fetched because a picture says so.

    Raises:
        InputError: it is not there.
    """
    if model is not None:
        return find_model(model)
    named = Path(receipt.model)
    if receipt.model in zoo.EMBEDDED or (named.parent.name == "zoo" and named.name in zoo.EMBEDDED):
        return find_model(zoo.path(named.name))
    if is_hub_id(receipt.model):
        folder = cached(receipt.model)
        if folder is None:
            raise InputError(
                f"the receipt names the hub model {receipt.model!r}, which is not on this machine; to fetch it say "
                f"--model {receipt.model}, or give a folder"
            )
        return replace(find_model(folder), name=receipt.model)
    try:
        return find_model(receipt.model)
    except InputError as error:
        raise InputError(f"{error}; the receipt says so: say where it is now with --model") from None


def config_of(receipt: Receipt) -> ParallelConfig:
    """The configuration that a receipt names. What it does not say is as usual.

    Raises:
        ConfigError: it holds a setting that this version does not know.
    """
    return ParallelConfig.read(receipt.config)


def job_of(receipt: Receipt, model: ModelInfo, config: ParallelConfig, out: str | Path, timeout: float) -> Job:
    """What to draw so that picture ``receipt.place`` of it is the receipt's; picture 0 in reproducible mode.

    In fast mode the whole call is drawn again, because a batch of another size may be rounded otherwise.
    """
    parameters = _parameters(model)
    alone = config.reproducible
    return job_for(
        model,
        (receipt.prompt,),
        out,
        (receipt.label,) if receipt.label is not None else None,
        config=config,
        negative=receipt.negative_prompt,
        steps=receipt.steps,
        # A pipeline that takes none has got none: receipts name 0 then.
        guidance=receipt.guidance if parameters is None or "guidance_scale" in parameters else None,
        # A class-conditional pipeline draws one size.
        size=None if model.labels else (receipt.width, receipt.height),
        max_sequence_length=receipt.max_sequence_length,
        seed=receipt.seed if alone else receipt.seed - receipt.place,
        images=1 if alone else receipt.together,
        per_call=receipt.together,
        dtype=receipt.dtype,
        timeout=timeout,
    )


def place_of(receipt: Receipt, config: ParallelConfig) -> int:
    """Which of the pictures of `job_of` is the receipt's."""
    return 0 if config.reproducible else receipt.place


def compare(picture: Any, replayed: Any, was: Receipt, now: Receipt) -> Replay:
    """Two pictures (PIL images) and their receipts.

    Args:
        picture, was: the picture from before, and its receipt.
        replayed, now: the picture drawn again, and its receipt.
    """
    changes = tuple(changes_of(was, now))
    old, new = (np.asarray(image.convert("RGB")).astype(int) for image in (picture, replayed))
    promised = (
        config_of(was).reproducible
        and was.environment is not None
        and was.weights is not None
        and not any(change.decides for change in changes)
    )
    if old.shape != new.shape:
        return Replay(promised, False, None, 1.0, None, changes)
    apart = abs(old - new)
    equal = not apart.any()
    ratio = None if equal else metrics.psnr(new.astype(np.uint8), old.astype(np.uint8))
    return Replay(promised, equal, int(apart.max()), float((apart.max(axis=2) > 0).mean()), ratio, changes)


def changes_of(was: Receipt, now: Receipt) -> list[Change]:
    """Everything that two receipts of one picture do not share, what decides first."""
    found: list[Change] = []

    def look(what: str, old: Any, new: Any, decides: bool, say: Callable[[Any], str] = str) -> None:
        if old != new:
            found.append(Change(what, say(old), say(new), decides))

    def known(value: Any) -> str:
        return "unknown" if value is None else str(value)

    # Receipts of earlier versions say less; what they do not say may have changed.
    look("weights", was.weights, now.weights, True, known)
    before = was.environment if was.environment is not None else {**was.versions, "device": was.device}
    after = now.environment or {}
    for name in dict.fromkeys([*before, *after]):
        if was.environment is None and name not in before:
            continue
        look(name, before.get(name), after.get(name), True, known)
    if was.environment is None:
        found.append(Change("environment", "not in the receipt", "known", True))
    look("model", Path(was.model).name, Path(now.model).name, False)
    look("pipeline", was.pipeline, now.pipeline, True)
    look("dtype", was.dtype, now.dtype, True)
    for name in ("prompt", "negative_prompt", "label", "seed", "steps", "guidance", "max_sequence_length"):
        look(name.replace("_", " "), getattr(was, name), getattr(now, name), True, repr)
    look("size", (was.width, was.height), (now.width, now.height), True, lambda size: "x".join(map(str, size)))
    old, new = config_of(was), config_of(now)
    for name in ParallelConfig.model_fields:
        if setting(name).decides:
            look(name, getattr(old, name), getattr(new, name), True)
    look("patches", _patches(old), _patches(new), True)
    look("devices", was.devices, now.devices, False)
    look("configuration", old.describe(), new.describe(), False)
    look("restarts", len(was.restarts), len(now.restarts), False)
    look("pictures in one call", was.together, now.together, False)
    return sorted(found, key=lambda change: not change.decides)


def _patches(config: ParallelConfig) -> int:
    return (config.patches or config.pipe) if config.stages_or_patches else 1


def _parameters(model: ModelInfo) -> Any:
    """Parameters of the pipeline's call, when its class is diffusers' own."""
    import diffusers

    kind = getattr(diffusers, model.pipeline_class, None)
    return inspect.signature(kind.__call__).parameters if isinstance(kind, type) else None
