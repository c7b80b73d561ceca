"""The settings of a training run: validated data from one YAML file, with the names of diffusers' scripts."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from ..config import ParallelConfig
from ..errors import ConfigError, InputError, did_you_mean, nearest_problem, problem_text, reason_of
from ..media.files import read_whole
from .contradictions import contradictions
from .settings import SECOND as SECOND
from .settings import DataConfig, DataSetConfig, ModelConfig, OptimizerConfig, OutputConfig, SettingsGroup
from .settings import LoraConfig as LoraConfig
from .settings import Sharding as Sharding

# Of a file of settings.
MAX_FILE_BYTES = 2**24

GROUPS: dict[str, type[SettingsGroup]] = {
    "data": DataConfig,
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "output": OutputConfig,
}
# Names that settings have outside of their groups, in checkpoints.
FLAT_NAMES = {("optimizer", "name"): "optimizer", ("optimizer", "args"): "optimizer_args"}


class TrainConfig(SettingsGroup):
    """A training run."""

    pretrained_model_name_or_path: str = Field(description="The folder or hub id of a pipeline, or an embedded model.")
    output_dir: str = Field(description="The folder of checkpoints, logs and the trained pipeline.")
    data: DataConfig = Field(default=DataConfig(), description="The samples, and how they are encoded.")
    model: ModelConfig = Field(
        default=ModelConfig(), description="What is trained, towards what, and how it is computed."
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(), description="The steps of the run, and how they change the weights."
    )
    output: OutputConfig = Field(default=OutputConfig(), description="Checkpoints, validation and logs.")
    lora: LoraConfig | None = Field(
        default=None, description="Train adapters on ``train_modules`` instead of their weights."
    )
    parallel: ParallelConfig = Field(
        default=ParallelConfig(),
        description="The axes of `ParallelConfig`; ``data`` ranks train on different samples. With ``reproducible: "
        "true`` and a ``global_batch_size`` weights are the same to the bit on any number of ranks.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**62)] = Field(
        default=0, description="Seed of the samples' order, noise, noise levels, random weights and adapters."
    )

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        for problem in contradictions(self):
            raise ValueError(problem)
        return self

    @property
    def denoiser(self) -> str:
        """The component that is the transformer of this run: of two (Wan 2.2) the one that is trained."""
        return SECOND if SECOND in self.model.train_modules else "transformer"

    @property
    def keeps_text(self) -> bool:
        """True if text embeddings are constant during the run."""
        return all(name == self.denoiser for name in self.model.train_modules)

    @property
    def in_order(self) -> bool:
        """True if gradients are summed in an order that does not depend on the ranks."""
        return self.parallel.reproducible

    @property
    def placement(self) -> ParallelConfig:
        """The mesh configuration: data ranks train on different samples."""
        return ParallelConfig.read({**self.parallel.model_dump(exclude_unset=True), "inputs": "per-data-rank"})

    @property
    def quantises_slices(self) -> bool:
        """True if the frozen base is put into fewer bits after tensor ranks have cut it."""
        return self.model.base_precision is not None and self.parallel.tensor > 1

    @property
    def batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.optimizer.global_batch_size or self.optimizer.train_batch_size * self.parallel.data

    def flat(self) -> dict[str, Any]:
        """All settings as JSON data, without groups, as checkpoints have them."""
        settings: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json").items():
            if name in GROUPS:
                settings |= {_flat_name(name, inner): one for inner, one in value.items()}
            else:
                settings[name] = value
        return settings

    @staticmethod
    def flat_names() -> list[str]:
        """The names of all settings, as `flat` has them."""
        grouped = [_flat_name(*place) for place in _places()]
        return [*(name for name in TrainConfig.model_fields if name not in GROUPS), *grouped]

    @staticmethod
    def read(source: TrainConfig | Mapping[str, Any] | str | Path) -> TrainConfig:
        """A run from a mapping or a YAML file.

        Raises:
            ConfigError: the file cannot be read, or a setting is unknown or wrong; names it.
        """
        if isinstance(source, TrainConfig):
            return source
        if isinstance(source, (str, Path)):
            try:
                text = read_whole(source, f"the training configuration {str(source)!r}", MAX_FILE_BYTES)
            except InputError as error:
                raise ConfigError(f"{error}; give a YAML file") from None
            try:
                source = parsed_yaml(text.decode("utf-8"))
            except ValueError as error:
                raise ConfigError(
                    f"cannot read the training configuration {str(source)!r} ({reason_of(error)}); give a YAML file"
                ) from None
            if not isinstance(source, Mapping):
                raise ConfigError("a training configuration is a mapping of settings; write lines such as 'seed: 0'")
        given = {str(key): value for key, value in source.items()}
        for name, value in given.items():
            if name not in TrainConfig.model_fields or (name in GROUPS and not isinstance(value, (Mapping, BaseModel))):
                raise ConfigError(_misplaced(name, None))
        if "parallel" in given:
            given["parallel"] = ParallelConfig.read(given["parallel"])
        try:
            return TrainConfig(**given)
        except ValidationError as error:
            raise ConfigError(_problem_of(error)) from None


def _flat_name(group: str, name: str) -> str:
    return FLAT_NAMES.get((group, name), name)


def grouped(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by the names that checkpoints have for them, in the groups of a run file."""
    places = {_flat_name(*place): place for place in _places()}
    run: dict[str, Any] = {}
    for name, value in settings.items():
        group, inner = places.get(name, ("", name))
        (run.setdefault(group, {}) if group else run)[inner] = value
    return run


def _places() -> Iterator[tuple[str, str]]:
    return ((group, name) for group, kind in GROUPS.items() for name in kind.model_fields)


def _misplaced(name: str, group: str | None) -> str:
    """The sentence about a setting that is not in the group in which it stands; None: in no group."""
    where = name if group is None else f"{group}.{name}"
    for place in _places():
        if _flat_name(*place) == name:
            return f"{where!r} stands in a group of settings: write {place[0]}: {{{place[1]}: ...}}"
    if name in GROUPS:
        return f"{name} is a group of settings: write {name}: {{NAME: VALUE}}"
    names = [".".join(place) for place in _places()]
    if group is not None:
        near = did_you_mean(name, GROUPS[group].model_fields)
    else:
        near = did_you_mean(name, [*TrainConfig.model_fields, *TrainConfig.flat_names(), *names])
    return f"{where!r} is no training setting{near or '; docs/training-settings.md has them all'}"


def parsed_yaml(text: str) -> Any:
    """The value of YAML, without tags that make objects.

    Raises:
        ValueError: it is no YAML.
    """
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _problem_of(error: ValidationError) -> str:
    top = error.errors()[0]["loc"][:2]
    first = nearest_problem([one for one in error.errors() if one["loc"][:2] == top])
    # Names of types are part of the place as well.
    where = ".".join(str(part) for part in first["loc"] if str(part).isidentifier() or isinstance(part, int))
    if first["type"] == "extra_forbidden":
        if top[0] in GROUPS and len(first["loc"]) == 2:
            return _misplaced(str(top[1]), str(top[0]))
        known = LoraConfig if top[0] == "lora" else DataSetConfig
        name = str(first["loc"][-1])
        return f"{where!r} is no training setting{did_you_mean(name, known.model_fields)}"
    if first["type"] == "missing":
        return f"{where} is missing"
    if where and isinstance(first["input"], (int, float, str)):
        where += f"={reprlib.repr(first['input'])}"
    sentence = problem_text(first)
    return f"{where}: {sentence}" if where else sentence
