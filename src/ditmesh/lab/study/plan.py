"""Plans of studies: cells in plain data, and the checks before anything runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import isfinite
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, get_args

from ...config import Compression, ParallelConfig
from ...errors import ConfigError, InputError
from ...generate.model_info import ModelInfo
from ...staleness.policy import parse as parse_warmup
from .samplers import check_sampler

# The last ones compress messages, or predict.
DISPLACED = ("displaced", *(f"displaced-{name}" for name in get_args(Compression)))
STRATEGIES = (
    *("displaced", "pipefusion", "naive", *DISPLACED[1:]),
    *(f"{name}+linear" for name in (*DISPLACED, "pipefusion")),
)
SYNCHRONOUS = "synchronous"

# Maximum bytes of a weight file that is read for its digest.
READ_UP_TO = 2**27


@dataclass(frozen=True)
class Setup:
    """The common settings of all cells of a study.

    Attributes:
        model: folder of the pipeline.
        name: the model as the user named it.
        weights: digest of the names, sizes and times of the weight files: a model that is trained again is another one.
        steps: denoising steps; a second-order sampler evaluates the model more often.
        guidance: guidance scale; None: the pipeline's own.
        size: width and height in pixels; None: the pipeline's own.
        max_sequence_length: longest prompt in tokens; None: the pipeline's own.
        dtype, device: of the transformer.
        frames: of videos; None: the pipeline's own number, or images.
    """

    model: str
    name: str
    weights: str
    steps: int
    guidance: float | None = None
    size: tuple[int, int] | None = None
    max_sequence_length: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    frames: int | None = None


@dataclass(frozen=True)
class Cell:
    """One request of a study: images of one combination.

    Attributes:
        sampler: see `samplers`.
        prompts: one image each, generated in one call.
        seeds: one for each image.
        labels: the prompts' class numbers when the model is class-conditional, else empty.
        strategy: one of `STRATEGIES`, or `SYNCHRONOUS`.
        devices: N; for PipeFusion the number of patches.
        warmup: a policy.
        detail: measure attention errors, and prediction errors on the same latents.
        real: on as many ranks instead of a simulation of them.
    """

    sampler: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    labels: tuple[int, ...] = ()
    strategy: str = SYNCHRONOUS
    devices: int = 1
    warmup: str = ""
    detail: bool = False
    real: bool = False

    @property
    def reference(self) -> Cell:
        """The synchronous run to compare with."""
        return Cell(self.sampler, self.prompts, self.seeds, self.labels)

    def key(self, setup: Setup) -> str:
        """A digest of everything that affects the cell's figures."""
        # The folder's place says nothing about the model.
        known = {name: value for name, value in asdict(setup).items() if name not in ("model", "name")}
        settings = {"format": 2, "setup": known, "cell": asdict(self)}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]

    def describe(self) -> str:
        """For a progress bar."""
        if self.strategy == SYNCHRONOUS:
            return f"{self.sampler} {SYNCHRONOUS}"
        return f"{self.sampler} {self.strategy} {self.devices} {self.warmup}{' on ranks' if self.real else ''}"

    def config(self) -> ParallelConfig:
        """The configuration of the engine. Raises `ConfigError`: the engine does not know the setting."""
        if self.strategy == SYNCHRONOUS:
            return ParallelConfig()
        strategy, _, predict = self.strategy.partition("+")
        if strategy == "pipefusion":
            pipe = self.devices if self.real else 1
            return ParallelConfig(patches=self.devices, pipe=pipe, warmup=self.warmup, predict=predict or "none")
        exchange, _, compress = strategy.partition("-")
        settings: dict[str, Any] = {"exchange": exchange, "compress": compress or None}
        if exchange == "displaced":
            settings["predict"] = predict or "none"
        return ParallelConfig(ring=self.devices, warmup=self.warmup, **settings)


class Pair(NamedTuple):
    """A sampler and a strategy."""

    sampler: str
    strategy: str

    def __str__(self) -> str:
        return f"{self.strategy}, {self.sampler}"


@dataclass(frozen=True)
class StudyPlan:
    """A whole study.

    Attributes:
        cells: in the order they are run; synchronous ones come before what is compared with them.
        devices, warmups, samplers, strategies: as asked for, in order.
    """

    setup: Setup
    cells: tuple[Cell, ...]
    devices: tuple[int, ...]
    warmups: tuple[str, ...]
    samplers: tuple[str, ...]
    strategies: tuple[str, ...]

    @property
    def pairs(self) -> list[Pair]:
        """Everything combined with everything."""
        return [Pair(*pair) for pair in product(self.samplers, self.strategies)]


def split_list(text: str, option: str) -> list[str]:
    """Words between commas; commas inside parentheses separate nothing. Raises `InputError`: there is no word."""
    words = [word.strip() for word in re.split(r",(?![^(]*\))", text)]
    if not all(words):
        raise InputError(f"{option} {text!r} is not a list; write words with commas between them")
    return list(dict.fromkeys(words))


def read_devices(text: str) -> tuple[int, ...]:
    """``"2,4,8"`` to numbers.

    Raises:
        InputError: one is not a number of devices.
    """
    words = split_list(text, "--devices")
    for word in words:
        if not word.isdecimal() or int(word) < 2:
            raise InputError(f"--devices {text!r}: {word!r} is not a number of devices from 2 up; write 2,4,8")
    return tuple(map(int, words))


def read_warmups(text: str, steps: int) -> tuple[str, ...]:
    """``"0,4,sqrt(2)"`` to policies; a number of warm-up steps above ``steps`` is ``steps``.

    Raises:
        ConfigError: one is not a policy.
    """
    words = split_list(text, "--warmup")
    policies = [f"fixed({min(int(word), steps)})" if word.isdecimal() else word for word in words]
    for policy in policies:
        parse_warmup(policy)
    return tuple(dict.fromkeys(policies))


def read_strategies(text: str) -> tuple[str, ...]:
    """``"displaced,naive"`` to names.

    Raises:
        InputError: one is not a strategy.
    """
    words = split_list(text, "--strategy")
    for word in words:
        if word not in STRATEGIES:
            raise InputError(f"--strategy {text!r}: {word!r} is not a stale strategy; use {', '.join(STRATEGIES)}")
    return tuple(words)


def make_plan(
    setup: Setup,
    model: ModelInfo,
    *,
    devices: Sequence[int],
    warmups: Sequence[str],
    samplers: Sequence[str],
    strategies: Sequence[str],
    prompts: Sequence[str],
    labels: Sequence[int] = (),
    images: int = 1,
    seed: int = 0,
    batch: int = 8,
    detail: bool = True,
    real: bool = False,
) -> StudyPlan:
    """All cells, checked.

    Args:
        setup, model: the settings of all cells, and the model's files.
        devices, warmups, samplers, strategies: everything is combined with everything.
        prompts, labels: images; labels of a class-conditional model.
        images: images of every prompt, 1 or more; image ``i`` of prompt ``p`` has seed
            ``seed + i · len(prompts) + p``.
        seed: of the first image, from 0 up.
        batch: images of one request at most, 1 or more.
        detail: measure details in the first request of every combination.
        real: also run the first request of every combination on real ranks.

    Raises:
        InputError, ConfigError: what cannot be, in one sentence.
    """
    if seed + images * len(prompts) > 2**63:
        raise InputError(f"--seed {seed} is out of range; use one from 0 to 2^63 - {images * len(prompts)}")
    _check_setup(setup, model, samplers, max(devices))
    cells: list[Cell] = []
    starts = range(0, len(prompts), batch)
    for sampler, image, start in product(samplers, range(images), starts):
        part = slice(start, start + batch)
        seeds = range(seed + image * len(prompts), seed + (image + 1) * len(prompts))[part]
        base = Cell(sampler, tuple(prompts[part]), tuple(seeds), tuple(labels[part]))
        first = image == start == 0
        cells.append(base)
        for strategy, count, warmup in product(strategies, devices, warmups):
            cell = replace(base, strategy=strategy, devices=count, warmup=warmup)
            cells.append(replace(cell, detail=detail and first))
            if real and first:
                cells.append(replace(cell, real=True))
    for cell in cells:
        # Errors of the engine are raised here, before anything runs.
        cell.config()
    asked: Any = map(tuple, (devices, warmups, samplers, strategies))
    return StudyPlan(setup, tuple(dict.fromkeys(cells)), *asked)


def _check_setup(setup: Setup, model: ModelInfo, samplers: Sequence[str], devices: int) -> None:
    """Reject settings that no cell can have on so many devices; raises as `make_plan`."""
    if setup.guidance is not None and not isfinite(setup.guidance):
        raise InputError(f"--guidance {setup.guidance} is not a number; use one such as 3.5")
    for sampler in samplers:
        check_sampler(sampler, Path(setup.model))
    size = setup.size or model.default_size
    if setup.frames is not None:
        model.check_frames(setup.frames)
    tokens = model.image_tokens(*size, setup.frames or 1) if size is not None else None
    if tokens is not None and devices > tokens:
        raise ConfigError(f"{devices} devices cannot share the {tokens} image tokens of an image; use at most {tokens}")


def weights_digest(folder: Path) -> str:
    """Digest of a pipeline's weight files: of their content, or of name, size and time of one above `READ_UP_TO`."""
    state = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.suffix in {".safetensors", ".bin", ".pt"}):
        facts = file.stat()
        state.update(f"{file.relative_to(folder)} {facts.st_size}".encode())
        state.update(file.read_bytes() if facts.st_size <= READ_UP_TO else str(facts.st_mtime_ns).encode())
    return state.hexdigest()[:16]


def without_folder(argument: str) -> str:
    """A word of a command line to show around: of an absolute path, also behind ``--option=``, the last name only."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path: PurePath = PureWindowsPath(value) if "\\" in value else PurePosixPath(value)
    # The first part is the root, or the home folder.
    away = len(path.parts) > 2 and (path.is_absolute() or value.startswith("~"))
    return f"{option}{equals}{path.name}" if away else argument
