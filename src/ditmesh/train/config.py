"""The settings of a training run: validated data from one YAML file, with the names of diffusers' scripts."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from ..config import ParallelConfig
from ..errors import ConfigError, InputError, did_you_mean, problem_text, reason_of
from ..media.files import read_whole
from .settings import SECOND as SECOND
from .settings import (
    DataConfig,
    DataSetConfig,
    DistillConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    ReinforceConfig,
    RewardConfig,
    SettingsGroup,
)
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
# Objectives for which the run draws its samples: the section of their settings, and what stands there.
SECTIONS = {
    "flow_grpo": ("reinforce", "prompts and rewards"),
    "ddpo": ("reinforce", "prompts and rewards"),
    "distillation": ("distill", "prompts"),
}
# Settings of samples from a data set that say nothing of images which the run draws.
OF_SAMPLES = {
    "data": {*DataConfig.model_fields} - {"resolution", "aspect_ratio_buckets", "num_frames", "max_sequence_length"},
    "model": {"weighting_scheme", "logit_mean", "snr_gamma"},
    "optimizer": {"global_batch_size", "num_train_epochs"},
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
    objective: Literal["denoising", "flow_grpo", "ddpo", "distillation"] = Field(
        default="denoising",
        description="``denoising``: learn from samples; or from rewards of images that the run draws, by ``flow_grpo`` "
        "(rectified flow; Liu et al. 2025, arXiv:2505.05470) or ``ddpo`` (models of noise; Black et al. 2023, "
        "arXiv:2305.13301); ``distillation``: draw in few steps (rectified flow).",
    )
    reinforce: ReinforceConfig | None = Field(
        default=None, description="The settings of learning from rewards ([reinforcement](reinforcement.md))."
    )
    distill: DistillConfig | None = Field(
        default=None, description="The settings of distillation ([few steps](training.md#few-steps))."
    )
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
        for problem in _contradictions(self):
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
        if self.objective != "denoising":
            return math.prod(self.drawn_samples)
        return self.optimizer.global_batch_size or self.optimizer.train_batch_size * self.parallel.data

    @property
    def drawn_samples(self) -> tuple[int, int]:
        """Samples of a group, and groups of a step, of a run that draws them."""
        if self.reinforce is not None:
            return self.reinforce.group_size, self.reinforce.groups
        assert self.distill is not None
        return 1, self.distill.samples

    @property
    def guidance(self) -> float | None:
        """Guidance scale of what is trained to draw; None: the pipeline's."""
        return self.reinforce.guidance if self.reinforce is not None else self.distill and 1.0

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

        Raises `ConfigError`: the file cannot be read, or a setting is unknown or wrong; names it.
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
                raise ConfigError(_misplaced(name, name, TrainConfig))
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


def _misplaced(name: str, where: str, model: type[BaseModel]) -> str:
    """The sentence about a setting `where` that is not among those of `model`."""
    nested = {
        "reinforce": ReinforceConfig,
        "reinforce.rewards.N": RewardConfig,
        "distill": DistillConfig,
        "lora": LoraConfig,
    }
    near = did_you_mean(name, {*model.model_fields, *(TrainConfig.flat_names() if model is TrainConfig else ())})
    for place in [*_places(), *((group, inner) for group, kind in nested.items() for inner in kind.model_fields)]:
        if name == _flat_name(*place) or (name == place[1] and not near):
            return f"{where!r} stands in a group of settings: write {place[0]}: {{{place[1]}: ...}}"
    if name in GROUPS:
        return f"{name} is a group of settings: write {name}: {{NAME: VALUE}}"
    return f"{where!r} is no training setting{near or '; docs/training-settings.md has them all'}"


def parsed_yaml(text: str) -> Any:
    """The value of YAML, without tags that make objects. Raises `ValueError`: it is no YAML."""
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _problem_of(error: ValidationError) -> str:
    top = error.errors()[0]["loc"][:2]
    problems = [problem for problem in error.errors() if problem["loc"][:2] == top]
    # Of a value of several possible types, the error for the nearest type.
    first = max(problems, key=lambda problem: (len(problem["loc"]), not problem["type"].endswith("_type")))
    # Names of types are part of the place as well.
    where = ".".join(str(part) for part in first["loc"] if str(part).isidentifier() or isinstance(part, int))
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        kinds = {"lora": LoraConfig, "reinforce": ReinforceConfig, "distill": DistillConfig, **GROUPS}
        if len(first["loc"]) > 2:
            kinds |= {"reinforce": RewardConfig, "data": DataSetConfig}
        return _misplaced(name, where, kinds[str(top[0])])
    if first["type"] == "missing":
        return f"{where} is missing"
    if where and isinstance(first["input"], (int, float, str)):
        where += f"={reprlib.repr(first['input'])}"
    sentence = problem_text(first)
    return f"{where}: {sentence}" if where else sentence


# --- settings that do not fit together ------------------------------------------------------------------------------


def _contradictions(config: TrainConfig) -> Iterator[str]:
    """A sentence for everything that does not fit. Raises `ConfigError`: degrees are none of reproducible mode."""
    needed, what = SECTIONS.get(config.objective, ("", ""))
    for section in ("reinforce", "distill"):
        if getattr(config, section) is None and section == needed:
            yield f"objective={config.objective!r} needs {what}; give them in the section {section}"
        elif getattr(config, section) is not None and section != needed:
            others = " or ".join(name for name, (own, _) in SECTIONS.items() if own == section)
            yield f"{section} is there, and objective is {config.objective}; use objective: {others}, or leave it out"
    yield from chain(
        _problems_of_data(config) if not needed else _problems_of_drawing(config),
        _problems_of_rewards(config),
        *(_problems_of_steps(config), _problems_of_ranks(config), _problems_of_weights(config)),
    )


def _problems_of_data(config: TrainConfig) -> Iterator[str]:
    data = config.data
    if bool(data.train_data_dir) == bool(data.train_data):
        which = "are both there; leave one out" if data.train_data else "is missing; give the folder of the samples"
        yield f"data.train_data_dir{' and data.train_data' * bool(data.train_data)} {which}"
    if isinstance(data.max_sequence_length, tuple) and data.cache_dir is not None and config.keeps_text:
        yield (
            f"max_sequence_length={list(data.max_sequence_length)}: text embeddings in cache_dir have one length; "
            "give one number, or leave cache_dir out"
        )


def _problems_of_drawing(config: TrainConfig) -> Iterator[str]:
    name, lora, data = f"objective={config.objective!r}", config.lora, config.data
    idle = [
        f"{group}.{setting}"
        for group, names in OF_SAMPLES.items()
        for setting in sorted(getattr(config, group).model_fields_set & names)
    ]
    if idle:
        yield f"{', '.join(idle)}: {name} draws its own samples; leave it out"
    if config.optimizer.max_train_steps is None:
        yield f"{name} needs a number of steps; give optimizer.max_train_steps"
    if config.model.train_modules not in (("transformer",), (SECOND,)):
        yield f"train_modules={list(config.model.train_modules)}: {name} trains the transformer alone; leave others out"
    if isinstance(data.max_sequence_length, tuple) or ";" in (data.aspect_ratio_buckets or ""):
        yield f"{name} draws one size with one length of prompts; give one max_sequence_length and one bucket"
    if lora is not None and lora.dropout:
        yield f"lora.dropout={lora.dropout:g}: an update would not be that of its rollout; leave it out"
    if lora is None and config.distill is not None:
        yield f"{name} learns from the model without its lora; add lora"
    size, groups = config.drawn_samples
    together = 1 if config.in_order else config.optimizer.train_batch_size
    calls = groups * -(-size // together) if config.distill is None else -(-groups // together)
    ranks = config.parallel.data
    if calls < ranks or (config.model.sharding == "fsdp" and calls % ranks):
        what, times = f"reinforce.groups={groups} of {size} samples", 1
        if config.distill is not None:
            what, times = f"distill.samples={groups}", together
        yield (
            f"{what} are {calls} calls, and each of data={ranks} ranks needs one, with sharding: fsdp as many; use a "
            f"multiple of {ranks * times}"
        )


def _problems_of_rewards(config: TrainConfig) -> Iterator[str]:
    if (reinforce := config.reinforce) is None:
        return
    if reinforce.early_stopping_patience and not config.output.validation_prompts:
        yield "reinforce.early_stopping_patience is about held-out prompts; give output.validation_prompts"
    if config.lora is None and reinforce.kl_weight is not None:
        yield f"reinforce.kl_weight={reinforce.kl_weight:g} compares with the model without its lora; add lora"
    steps, last = reinforce.trained_steps or (), reinforce.inference_steps - 1
    if not {*(range(steps) if isinstance(steps, int) else steps)} <= {*range(last)}:
        yield f"reinforce.trained_steps={steps}: of {last + 1} inference_steps 0 to {last - 1} draw noise; use these"


def _problems_of_steps(config: TrainConfig) -> Iterator[str]:
    steps = config.optimizer
    share = steps.train_batch_size * config.parallel.data
    if steps.global_batch_size is not None and steps.global_batch_size % share:
        yield (
            f"global_batch_size={steps.global_batch_size} is no multiple of train_batch_size={steps.train_batch_size} "
            f"times data={config.parallel.data}; use {share * max(1, steps.global_batch_size // share)}"
        )
    if steps.learning_rate > 1:
        yield (
            f"learning_rate={steps.learning_rate:g}: {steps.name} changes each weight by about that in a step; use at "
            "most 1 (1e-4 is usual)"
        )
    known = [*config.flat_names(), "data"]
    if unknown := [name for name in config.output.resume_allow_changed if name not in known]:
        yield f"resume_allow_changed: {unknown[0]!r} is no training setting{did_you_mean(unknown[0], known)}"
    if (steps.lr_decay_steps is not None) != (steps.lr_scheduler == "warmup_stable_decay"):
        yield (
            f"lr_scheduler={steps.lr_scheduler!r} with lr_decay_steps={steps.lr_decay_steps}: "
            "warmup_stable_decay needs lr_decay_steps, and no other has them"
        )


def _problems_of_ranks(config: TrainConfig) -> Iterator[str]:
    sharding, speeds = config.model.sharding, config.optimizer.data_speeds
    if config.in_order and sharding not in ("auto", "none"):
        yield f"sharding={sharding!r} adds gradients up as ranks have them; reproducible needs 'none'"
    if config.in_order:
        # Raises where the degrees are none of reproducible mode.
        _ = config.placement
    if speeds is not None and sharding == "fsdp":
        yield (
            "data_speeds: each forward of sharding: fsdp is a collective of all data ranks, which have as many; "
            "use sharding: ddp or none"
        )
    if isinstance(speeds, tuple) and len(speeds) != config.parallel.data:
        yield f"data_speeds has {len(speeds)} numbers for data={config.parallel.data}; give one for each"


def _problems_of_weights(config: TrainConfig) -> Iterator[str]:
    model = config.model
    if config.lora is not None and model.from_scratch:
        yield "lora adapts weights that are there, and from_scratch has none; leave one out"
    if model.base_precision and config.lora is None:
        yield (f"base_precision={model.base_precision!r}: whole weights are trained in float32 on the device; add lora")
    if {"transformer", SECOND} <= set(model.train_modules):
        yield (
            f"train_modules={list(model.train_modules)}: a run trains one of two transformers, each on noise levels "
            f"of its own; leave transformer or {SECOND} out, and train the other one in another run"
        )
    if config.lora is not None and config.denoiser not in model.train_modules:
        yield f"train_modules={list(model.train_modules)}: lora adapts the transformer as well; add it"
