"""Values of the command line that several commands parse in the same way."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..config import AXES, ParallelConfig, option_words
from ..errors import ConfigError, InputError, did_you_mean, reason_of
from ..launch import torchrun_rank

if TYPE_CHECKING:
    from ..generate.job import PictureJob
    from ..generate.model_info import ModelInfo
    from .options import RequestOptions


def read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    """Prompts of the command line, then of a file, one per line; `InputError`: it cannot be read, or there is none."""
    texts = list(prompts or [])
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = reason_of(error)
            raise InputError(f"cannot read the prompts {str(file)!r} ({reason}); give a text file in UTF-8") from None
        written = [line.strip() for line in lines if line.strip()]
        if not written:
            raise InputError(f"the prompts {str(file)!r} hold no prompt; write one a line")
        texts += written
    if not texts:
        raise InputError('there is no prompt; write one, such as "a red fox", or give a file with --prompts')
    return texts


def parallel_config(
    devices: int | None, file: Path | None, settings: Mapping[str, Any], heads: int | None
) -> tuple[int, ParallelConfig | None]:
    """The number of ranks and their configuration (None: the engine chooses), from the given options.

    ``devices``: None: the product of the degrees, or the ranks that torchrun has started.
    """
    degrees = any(name in AXES for name in settings)
    place = torchrun_rank()
    if devices is None and not degrees and isinstance(settings.get("speeds"), tuple) and place is None:
        devices = len(settings["speeds"])
    if place is not None:
        if devices not in (None, place.world_size):
            raise ConfigError(
                f"--devices {devices}, but torchrun has started {place.world_size} ranks; leave --devices out, or "
                f"start {devices} with torchrun --nproc-per-node {devices}"
            )
        devices = place.world_size
    if file is not None and settings:
        options = ", ".join(map(option_words, settings))
        raise ConfigError(f"--config {str(file)!r} and {options} both configure; write all of it into the file")
    if file is None and not degrees:
        devices = devices or 1
        if not settings:
            return devices, None
        # A model that does not declare its heads has at least one.
        stale = settings.get("exchange", "exact") != "exact"
        auto = ParallelConfig(ring=devices) if stale else ParallelConfig.auto(devices, heads or 1)
        return devices, ParallelConfig(**{**auto.model_dump(), **settings})
    config = ParallelConfig.read(file) if file is not None else ParallelConfig(**settings)
    devices = devices or config.world_size
    config.check_world_size(
        devices, f"and --devices is {devices}" if place is None else f"and torchrun has started {devices}"
    )
    return devices, config


def read_settings(words: Sequence[str], settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings with those of words such as ``"tiles=4"``, ``"warmup=fixed(2)"`` and ``"reproducible"``.

    `ConfigError`: a word is no setting with a value, or a setting is given twice.
    """
    changed = dict(settings or {})
    for word in words:
        name, equals, value = word.partition("=")
        field = ParallelConfig.model_fields.get(name)
        if not value and (equals or field is None or field.annotation is not bool):
            raise ConfigError(f"{word!r} is not a setting with a value; write words such as tiles=4")
        if name in changed:
            raise ConfigError(f"{word!r}: {name} is given twice; leave one out")
        changed[name] = _value(value) if equals else True
    if "tiles" in changed and "reproducible" not in changed:
        raise ConfigError(f"tiles={changed['tiles']} counts in reproducible mode only; add reproducible")
    return changed


def parse_config(text: str) -> ParallelConfig:
    """A configuration from words such as ``"ulysses=2 reproducible"``, or a YAML file; `ConfigError`: neither."""
    words = _words(text)
    if not words:
        raise ConfigError(f"the configuration {text!r} is empty; write words such as ulysses=2")
    if len(words) == 1 and "=" not in words[0] and (words[0].endswith((".yaml", ".yml")) or Path(words[0]).is_file()):
        return ParallelConfig.read(words[0])
    return ParallelConfig(**read_settings(words))


def parse_settings(text: str) -> dict[str, Any]:
    """Settings of a configuration by name, from a text such as ``"ulysses=2 reproducible"``; see `read_settings`."""
    return read_settings(_words(text))


def _words(text: str) -> list[str]:
    return re.findall(r"(?:[^\s(]|\([^)]*\))+", text)


def configs_of(texts: Sequence[str]) -> list[ParallelConfig]:
    """The configurations of several texts (see `parse_config`), without duplicates."""
    return list(dict.fromkeys(parse_config(text) for text in texts))


def _value(text: str) -> Any:
    """``2``, ``true``, ``fixed(4)``, ``2,1``."""
    if re.fullmatch(r"[\d.]+(,[\d.]+)+", text):
        return tuple(float(part) for part in text.split(","))
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def embedded_or(
    model: str | None, steps: int | None, guidance: float | None
) -> tuple[ModelInfo, int | None, float | None, int | None]:
    """The model (``emoji-sd3`` if None), steps, guidance and prompt length; embedded models have their own defaults."""
    from .. import zoo
    from ..generate.model_info import find_model

    info = find_model(zoo.path() if model is None else model)
    defaults = zoo.embedded(info.files)
    if defaults is None:
        return info, steps, guidance, None
    # The pipeline's defaults are meant for a model a thousand times larger.
    steps, guidance = steps or defaults.steps, defaults.guidance_scale if guidance is None else guidance
    return info, steps, guidance, defaults.max_sequence_length


def check_planned(model: str) -> None:
    """Reject, without torch, a name that is no model, folder or hub id: `InputError` names those that ship."""
    from .. import zoo
    from ..generate.model_info import is_hub_id
    from ..memory.catalogue import shapes

    names = [*shapes(), *zoo.EMBEDDED]
    if not model:
        raise InputError(f"say which model: {', '.join(shapes())}, or the folder of a pipeline")
    if model.lower() not in names and not Path(model).exists() and not is_hub_id(model):
        near = did_you_mean(model.lower(), names)
        raise InputError(
            f"model {model!r} is no folder and none of {', '.join(names)}{near or '; give one of these, or a folder'}"
        )


def picture_job(
    model: str | None, prompts: Sequence[str], pictures: RequestOptions, timeout: float, out: str, **more: Any
) -> tuple[PictureJob, ModelInfo]:
    """A job without configuration and dtype, from options and ``more`` fields; and the facts in the model's files."""
    from ..generate.files import input_size
    from ..generate.job import PER_CALL, job_for
    from ..generate.receipt import MOST_PIXELS
    from ..generate.runner import quieten
    from ..request import PictureRequest, size_of

    asked = {"steps": None, "guidance": None, "strength": more.pop("strength", None), **pictures.fields()}
    info, asked["steps"], asked["guidance"], text_tokens = embedded_or(model, asked["steps"], asked["guidance"])
    if more.get("files"):
        # The class of pipeline is looked at.
        quieten()
    # Also with a size: a mask must have the shape of its image.
    like = input_size(info, more.get("files", ()), asked["strength"])
    if like is not None and asked["width"] is None:
        asked["width"], asked["height"] = like
    request = PictureRequest.read(**asked)
    width, height = size_of(request) or info.default_size or (1, 1)
    # One video per call: each is as large as many images.
    together = 1 if videos_of(info) else max(1, min(PER_CALL, MOST_PIXELS // (width * height)))
    more = {"per_call": together, "max_sequence_length": text_tokens, "timeout": timeout, **more}
    return job_for(info, request, out, prompts, **more), info


def videos_of(info: ModelInfo) -> bool:
    """True if a model generates videos, as far as its files tell."""
    from ..generate.job import makes_videos
    from ..generate.runner import quieten

    if info.frame_counts is None:
        # Most models generate images, and importing diffusers takes seconds.
        return False
    quieten()
    return bool(makes_videos(info.pipeline_class))


def any_seed(seed: int) -> int:
    """The seed; a random one for -1."""
    if seed != -1:
        return seed
    if torchrun_rank() is not None:
        raise InputError("--seed -1: every rank of torchrun would choose a seed of its own; give one, such as --seed 0")
    return secrets.randbelow(2**32)


def fetched(job: PictureJob, info: ModelInfo) -> PictureJob:
    """The job with the local folder of a hub model, which is downloaded if needed."""
    return job if info.local else job.changed(model=download(info.name, job.variant))


def download(name: str, variant: str | None = None) -> str:
    """Download a hub model once, before N ranks load it; returns its folder."""
    from ..generate import modular
    from ..generate.model_info import find_model

    try:
        return str(modular.download(find_model(name), variant))
    except OSError as error:
        raise InputError(f"model {name!r} cannot be fetched from the hub: {error}") from None
