"""An image generated again from its receipt, and the differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import zoo
from ..config import ParallelConfig, setting
from ..errors import ConfigError, InputError
from ..quality import metrics
from ..request import PictureRequest
from .files import find_input_file
from .job import PictureJob, job_for
from .model_info import ModelInfo, cached, find_model, is_hub_id, parameters_of
from .receipt import Receipt
from .video import is_video, read_frames

# Settings that images hold under another name: receipts outlive names.
_RECORDED_AS = {"weights": "speeds"}


@dataclass(frozen=True)
class Change:
    """Something that is not as it was; ``decides``: it can change a reproducible image, not only another one's bits."""

    what: str
    was: str
    now: str
    decides: bool

    def describe(self) -> str:
        """Such as ``torch 2.13.0 -> 2.14.0``."""
        return f"{self.what} {self.was} -> {self.now}"


@dataclass(frozen=True)
class Replay:
    """An image and the one generated again.

    Attributes:
        promised: both are of reproducible mode, and nothing that decides has changed.
        largest_difference: of any channel, of 255; None when the sizes differ.
        differing_pixels: share of the pixels.
        psnr: in dB; None when equal or of another size.
    """

    promised: bool
    equal: bool
    largest_difference: int | None
    differing_pixels: float
    psnr: float | None
    changes: tuple[Change, ...]


def receipt_model(receipt: Receipt, model: str | None = None) -> ModelInfo:
    """The model of a receipt, or another one in its place.

    A model embedded in ditmesh is found wherever ditmesh is installed. An image may come from a stranger: a hub model
    that it names is taken from the hub's cache, and never fetched because an image says so.
    """
    if model is not None:
        return find_model(model)
    named = Path(receipt.model)
    if receipt.model in zoo.EMBEDDED or (named.parent.name in ("zoo", zoo.DATA) and named.name in zoo.EMBEDDED):
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
        raise InputError(f"{error}; the receipt names it: give its current place with --model") from None


def receipt_config(receipt: Receipt) -> ParallelConfig:
    """The configuration that a receipt names; missing settings have their defaults, unknown ones are refused."""
    settings = {_RECORDED_AS.get(name, name): value for name, value in receipt.config.items()}
    stale = settings.get("exchange") == "displaced" or settings.get("pipe", 1) > 1 or bool(settings.get("patches"))
    if settings.get("predict") is None and stale and not settings.get("reproducible"):
        # Of a version that did not move keys on by itself, and whose int4 was another code.
        compress = settings.get("compress")
        if compress == "int4":
            raise ConfigError(f'{compress=} of this receipt is a code that is gone; give another one, --config "..."')
        settings |= {"predict": "none", "compress": "int4" if compress == "residual4" else compress}
    return ParallelConfig.read(settings)


def job_of(
    receipt: Receipt,
    model: ModelInfo,
    config: ParallelConfig,
    out: str | Path,
    timeout: float,
    beside: str | Path = ".",
) -> PictureJob:
    """The job that generates the receipt's image: as its only one where it is `drawn_alone`, else at its old place.

    Else the whole call is generated again, because a batch of another size may be rounded otherwise. Input files that
    are not where they were are looked for in the folder ``beside``.
    """
    parameters = parameters_of(model.pipeline_class)
    unguided = bool(parameters) and "guidance_scale" not in parameters
    alone = drawn_alone(receipt, config)
    asked = {name: getattr(receipt, name) for name in PictureRequest.model_fields if name != "n"}
    asked |= {"n": 1 if alone else receipt.together, "seed": receipt.seed if alone else receipt.seed - receipt.place}
    if unguided:
        # A pipeline that takes none has got none: receipts name 0 then.
        asked["guidance"] = None
    if model.labels:
        # A class-conditional pipeline has one size.
        asked["width"] = asked["height"] = None
    labels: dict[str, Any] = {} if receipt.label is None else {"labels": (receipt.label,)}
    return job_for(
        model,
        PictureRequest.read(**asked),
        out,
        **labels,
        config=config,
        max_sequence_length=receipt.max_sequence_length,
        per_call=receipt.together,
        dtype=receipt.dtype,
        timeout=timeout,
        files=tuple(find_input_file(file, Path(beside)) for file in receipt.files),
        variant=receipt.variant,
        offload=receipt.offload if receipt.device != "cpu" else "none",
        scheduler=receipt.scheduler,
    )


def drawn_alone(receipt: Receipt, config: ParallelConfig) -> bool:
    """True if the image comes out the same without the others of its call, and `job_of` is for it alone.

    Some pipelines encode a control image for all images of a call with one generator.
    """
    return config.reproducible and all(file.role != "control" for file in receipt.files)


def pixels_of(path: str | Path) -> np.ndarray:
    """The 8-bit RGB values of an image, (H, W, 3), or of a video's frames, one below the other."""
    from PIL import Image

    if is_video(path):
        frames = read_frames(path, str(path))
    else:
        with Image.open(path) as image:
            frames = [image.convert("RGB")]
    return np.concatenate([np.asarray(frame.convert("RGB")) for frame in frames])


def compare_replay(old: np.ndarray, new: np.ndarray, was: Receipt, now: Receipt) -> Replay:
    """The pixels of an image from before and of the one generated again (see `pixels_of`), and their receipts.

    Videos are equal when what was compressed is; how far others are apart is measured after compression.
    """
    changes = tuple(changes_of(was, now))
    promised = (
        receipt_config(was).reproducible
        and None not in (was.environment, was.weights_digest)
        and not any(change.decides for change in changes)
    )
    if old.shape != new.shape:
        return Replay(promised, False, None, 1.0, None, changes)
    apart = abs(old.astype(int) - new)
    equal = not apart.any() if was.frames is None else was.frames_digest == now.frames_digest
    ratio = metrics.psnr(new, old) if apart.any() else None
    return Replay(promised, equal, int(apart.max()), float((apart.max(axis=2) > 0).mean()), ratio, changes)


def changes_of(was: Receipt, now: Receipt) -> list[Change]:
    """Everything that two receipts of one image do not share, what decides first."""
    changes: list[Change] = []

    def compare(what: str, old: Any, new: Any, decides: bool = True, text: Callable[[Any], str] = str) -> None:
        if old != new:
            changes.append(Change(what, text(old), text(new), decides))

    def text_of(value: Any) -> str:
        return "unknown" if value is None else str(value)

    weights = was.weights_digest, now.weights_digest
    compare("weights", *weights, text=text_of)
    before, after = was.environment or {}, now.environment or {}
    for name in dict.fromkeys([*before, *after]):
        compare(name, before.get(name), after.get(name), text=text_of)
    compare("model", Path(was.model).name, Path(now.model).name, False)
    for name in ("pipeline", "dtype", "scheduler"):
        compare(name, getattr(was, name), getattr(now, name), text=text_of)
    texts = ("prompt", "negative_prompt", "label", "seed", "steps", "guidance", "strength", "max_sequence_length")
    for name in texts:
        compare(name.replace("_", " "), getattr(was, name), getattr(now, name), text=repr)
    # Their paths may be others.
    used, given = (
        ", ".join(f"{file.role} {file.digest[:16]} at {file.scale:.9g}" for file in receipt.files) or "none"
        for receipt in (was, now)
    )
    compare("input files", used, given)
    compare("size", f"{was.width}x{was.height}", f"{now.width}x{now.height}")
    compare("frames", was.frames, now.frames, text=text_of)
    compare("frames per second", was.fps, now.fps, text=text_of)
    old, new = receipt_config(was), receipt_config(now)
    for name in ParallelConfig.model_fields:
        if setting(name).decides:
            compare(name, getattr(old, name), getattr(new, name))
    patches = [(one.patches or one.pipe) if one.stages_or_patches else 1 for one in (old, new)]
    compare("patches", patches[0], patches[1])
    compare("devices", was.devices, now.devices, False)
    compare("configuration", old.describe(), new.describe(), False)
    compare("pictures in one call", was.together, now.together, False)
    return sorted(changes, key=lambda change: not change.decides)
