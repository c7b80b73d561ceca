"""`ditmesh train RUN.yaml --from FILE`: the settings of another trainer's run as ours, and those without a counterpart.

Read are command lines of diffusers' scripts, ai-toolkit's YAML, SimpleTuner's JSON with its data backends, and the TOML
of kohya's sd-scripts and musubi-tuner. Names are those of the tools' public documentation.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib
import yaml

from ..errors import ConfigError, InputError, reason_of
from .config import TrainConfig
from .data.settings import DataSetConfig

# Names of a run by those of another tool; a dot leads into ``lora``.
DIFFUSERS = {
    "instance_data_dir": "train_data_dir",
    "rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_layers": "lora.target_modules",
    "validation_prompt": "validation_prompts",
    "cond_image_column": "conditioning_image_column",
    "checkpointing_steps": "checkpointing_steps",
}
KOHYA = {
    "train_data_dir": "train_data_dir",
    "reg_data_dir": "class_data_dir",
    "network_dim": "lora.rank",
    "network_alpha": "lora.alpha",
    "network_dropout": "lora.dropout",
    "unet_lr": "learning_rate",
    "max_train_epochs": "num_train_epochs",
    "save_every_n_steps": "checkpointing_steps",
    "optimizer_type": "optimizer",
    "min_snr_gamma": "snr_gamma",
}
KOHYA_SETS = {
    "image_dir": "dir",
    "image_directory": "dir",
    "video_directory": "dir",
    "num_repeats": "weight",
    "class_tokens": "instance_prompt",
    "shuffle_caption": "shuffle_tags",
    "keep_tokens": "keep_tokens",
    "caption_separator": "tag_separator",
    "caption_tag_dropout_rate": "tag_dropout",
    "caption_prefix": "caption_prefix",
    "caption_suffix": "caption_suffix",
    "enable_wildcard": "multiline_captions",
    "flip_aug": "random_flip",
    "conditioning_data_dir": "conditioning_dir",
    "control_directory": "conditioning_dir",
    "resolution": "resolution",
}
KOHYA_RUN = {
    "batch_size": "train_batch_size",
    "caption_dropout_rate": "proportion_empty_prompts",
    "cache_directory": "cache_dir",
}
AI_TOOLKIT = {
    "trigger_word": "trigger_word",
    "model.name_or_path": "pretrained_model_name_or_path",
    "network.linear": "lora.rank",
    "network.linear_alpha": "lora.alpha",
    "save.save_every": "checkpointing_steps",
    "save.max_step_saves_to_keep": "checkpoints_total_limit",
    "train.batch_size": "train_batch_size",
    "train.steps": "max_train_steps",
    "train.gradient_accumulation_steps": "gradient_accumulation_steps",
    "train.gradient_accumulation": "gradient_accumulation_steps",
    "train.gradient_checkpointing": "gradient_checkpointing",
    "train.lr": "learning_rate",
    "train.lr_scheduler": "lr_scheduler",
    "train.optimizer": "optimizer",
    "train.max_grad_norm": "max_grad_norm",
    "train.dtype": "mixed_precision",
    "train.min_snr_gamma": "snr_gamma",
    "train.ema_config.use_ema": "use_ema",
    "train.ema_config.ema_decay": "ema_decay",
    "sample.sample_every": "validation_steps",
    "sample.sample_steps": "validation_inference_steps",
    "sample.guidance_scale": "guidance_scale",
    "sample.prompts": "validation_prompts",
    "sample.seed": "seed",
}
AI_TOOLKIT_SETS = {
    "folder_path": "dir",
    "num_repeats": "weight",
    "mask_path": "mask_dir",
    "control_path": "conditioning_dir",
    "default_caption": "instance_prompt",
    "shuffle_tokens": "shuffle_tags",
    "flip_x": "random_flip",
    "resolution": "resolution",
}
AI_TOOLKIT_RUN = {"caption_dropout_rate": "proportion_empty_prompts", "num_frames": "num_frames"}
SIMPLE_TUNER = {
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "caption_dropout_probability": "proportion_empty_prompts",
    "validation_prompt": "validation_prompts",
    "validation_step_interval": "validation_steps",
    "validation_num_inference_steps": "validation_inference_steps",
    "validation_guidance": "guidance_scale",
    "checkpoint_step_interval": "checkpointing_steps",
}
SIMPLE_TUNER_SETS = {
    "instance_data_dir": "dir",
    "repeats": "weight",
    "instance_prompt": "instance_prompt",
    "resolution": "resolution",
}
# Settings that are the default here already, or name files of the other tool.
_SILENT = {
    *("id", "type", "dataset_type", "conditioning_data", "conditioning_type", "data_backend_config", "model_type"),
    *("with_prior_preservation", "is_reg", "caption_extension", "caption_ext", "caption_strategy", "dataset_config"),
    *("network_module", "cache_latents_to_disk", "cache_latents"),
}
_PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "fp32": "no", "float32": "no", "float": "no"}


@dataclass
class ImportedRun:
    """A run of another trainer.

    Attributes:
        tool: the trainer that reads the file.
        without: a sentence for every setting that has no counterpart, or a value that ours does not take.
        missing: names of settings that have to be given.
    """

    tool: str
    settings: dict[str, Any] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def take(self, name: str, value: Any, names: Mapping[str, str], target: dict[str, Any] | None = None) -> None:
        """A setting of the other tool: into the run, or into a data set."""
        own = TrainConfig.model_fields if target is None else DataSetConfig.model_fields
        ours = names.get(name) or (name if target is None and name in own else None)
        if value is None or name in _SILENT:
            return
        if ours is None:
            self.without.append(f"{name}: {json.dumps(value, default=str)[:80]}")
            return
        value = _value(ours, value)
        if ours.startswith("lora."):
            self.settings.setdefault("lora", {})[ours.removeprefix("lora.")] = value
        else:
            (self.settings if target is None else target)[ours] = value

    def finish(self) -> None:
        """Leave out values that ours does not take, and name missing settings."""
        base = {"pretrained_model_name_or_path": "model", "output_dir": "out", "train_data_dir": "data"}
        sets = self.settings.get("train_data")
        if sets is not None and len(sets) == 1 and sets[0].get("weight", 1) == 1:
            (only,) = self.settings.pop("train_data")
            only = {**only}
            only.pop("weight", None)
            self.settings = {"train_data_dir": only.pop("dir"), **only, **self.settings}
        if not self.settings.get("shuffle_tags") and "keep_tokens" in self.settings:
            del self.settings["keep_tokens"]
        for name, value in list(self.settings.items()):
            alone = {**base, name: value}
            if name == "train_data":
                del alone["train_data_dir"]
            if name in ("prior_loss_weight", "class_prompt"):
                alone["class_data_dir"] = "class"
            if name == "keep_tokens":
                alone["shuffle_tags"] = True
            try:
                TrainConfig.read(alone)
            except ConfigError as error:
                del self.settings[name]
                self.without.append(f"{name}: {json.dumps(value, default=str)[:80]} ({error})")
        wanted = ["pretrained_model_name_or_path", "output_dir"]
        wanted += [] if "train_data" in self.settings else ["train_data_dir"]
        self.missing = [name for name in wanted if not self.settings.get(name)]

    def as_yaml(self) -> str:
        """The file of the run; missing settings and those without a counterpart are comments."""
        lines = [f"# From a run of {self.tool}, by ditmesh train --from."]
        lines += [f"{name}:  # give it" for name in self.missing]
        text = yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True, default_flow_style=None)
        lines += [text.rstrip()]
        lines += ["# Without a counterpart:"] if self.without else []
        lines += [f"#   {' '.join(one.split())}" for one in self.without]
        return "\n".join(lines) + "\n"


def imported(path: str | Path) -> ImportedRun:
    """Read the settings of another trainer's run.

    Args:
        path: ``.yaml`` of ai-toolkit, ``.json`` of SimpleTuner, ``.toml`` of sd-scripts or musubi-tuner, or a file with
            a command line of one of diffusers' scripts.

    Raises:
        InputError: it cannot be read, or is none of them.
    """
    place = Path(path)
    try:
        text = place.read_text(encoding="utf-8")
        kind = place.suffix.lower()
        if kind == ".toml":
            found = _kohya(tomllib.loads(text))
        elif kind == ".json":
            found = _simple_tuner(json.loads(text), place.parent)
        elif kind in (".yaml", ".yml"):
            found = _ai_toolkit(yaml.safe_load(text))
        else:
            found = _diffusers(text)
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else repr(error)
        raise InputError(
            f"--from {str(path)!r} cannot be read ({reason}); give a YAML file of ai-toolkit, "
            "a JSON file of SimpleTuner, a TOML file of sd-scripts or musubi-tuner, or a "
            "file with a command line of a script of diffusers"
        ) from None
    found.finish()
    return found


def _value(ours: str, value: Any) -> Any:
    """A value in the form that ours has."""
    if ours == "validation_prompts":
        return [value] if isinstance(value, str) else list(value)
    if ours == "lora.target_modules":
        return [one.strip() for one in value.split(",")] if isinstance(value, str) else value
    if ours == "mixed_precision":
        return _PRECISIONS.get(str(value), value)
    if ours == "resolution" and isinstance(value, list):
        # One resolution: the largest, or of sides the square of as many pixels.
        return max(value) if len(value) != 2 or value[0] == value[1] else round((value[0] * value[1]) ** 0.5)
    if ours == "num_frames" and isinstance(value, list):
        return max(value)
    return value


# --- diffusers --------------------------------------------------------------------------------------------------


def _diffusers(text: str) -> ImportedRun:
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    scripts = [word for word in words if word.endswith(".py")]
    if not scripts:
        raise ValueError("there is no script in it")
    found, given = ImportedRun("diffusers"), dict[str, Any]()
    rest = words[words.index(scripts[0]) + 1 :]
    place = 0
    while place < len(rest):
        name, equals, value = rest[place].removeprefix("--").partition("=")
        if not rest[place].startswith("--"):
            place += 1
            continue
        if not equals:
            bare = place + 1 >= len(rest) or rest[place + 1].startswith("--")
            value = True if bare else rest[place + 1]
            place += not bare
        given[name] = yaml.safe_load(value) if isinstance(value, str) else value
        place += 1
    if "lora" in Path(scripts[0]).name:
        found.settings["lora"] = {}
    keeps_class = given.get("with_prior_preservation")
    for name, value in given.items():
        if name in ("class_data_dir", "class_prompt", "prior_loss_weight") and not keeps_class:
            continue
        if name == "use_8bit_adam":
            found.take("optimizer", "AdamW8bit", {})
        elif name == "guidance_scale":
            # Of training: the embedding of distilled guidance, which is 1 here.
            found.without.append(f"guidance_scale: {value}")
        elif name == "learning_rate":
            found.take(name, float(value), DIFFUSERS)
        else:
            found.take(name, _number(value), DIFFUSERS)
    return found


def _number(value: Any) -> Any:
    # YAML reads 1e-5 as text.
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# --- kohya ------------------------------------------------------------------------------------------------------


def _kohya(given: Mapping[str, Any]) -> ImportedRun:
    found = ImportedRun("sd-scripts or musubi-tuner")
    for name, value in given.items():
        if name not in ("general", "datasets"):
            for one, inner in value.items() if isinstance(value, Mapping) else [(name, value)]:
                found.take(one, _number(inner), KOHYA)
    for datasets in given.get("datasets", []):
        subsets = datasets.get("subsets") or [{}]
        for subset in subsets:
            own = {**given.get("general", {}), **{k: v for k, v in datasets.items() if k != "subsets"}, **subset}
            _kohya_set(found, own)
    return found


def _kohya_set(found: ImportedRun, own: Mapping[str, Any]) -> None:
    target: dict[str, Any] = {}
    for name, value in own.items():
        if name in KOHYA_RUN:
            found.take(name, value, KOHYA_RUN)
        elif f"{name}: {json.dumps(value, default=str)[:80]}" not in found.without:
            found.take(name, value, KOHYA_SETS, target)
    # These tools put a space between them and the caption.
    if target.get("caption_prefix"):
        target["caption_prefix"] += " "
    if target.get("caption_suffix"):
        target["caption_suffix"] = f" {target['caption_suffix']}"
    if not target.get("shuffle_tags"):
        target.pop("keep_tokens", None)
    if own.get("is_reg"):
        found.settings["class_data_dir"] = target["dir"]
        if target.get("instance_prompt"):
            found.settings["class_prompt"] = target["instance_prompt"]
        return
    found.settings.setdefault("train_data", []).append(target)


# --- ai-toolkit -------------------------------------------------------------------------------------------------


def _ai_toolkit(given: Any) -> ImportedRun:
    found = ImportedRun("ai-toolkit")
    config = given["config"]
    process = config["process"][0]
    if process.get("training_folder"):
        found.settings["output_dir"] = str(Path(process["training_folder"]) / config.get("name", ""))
    for name, value in _flat({k: v for k, v in process.items() if k not in ("datasets", "training_folder", "type")}):
        if name == "network.type" and value == "lora":
            continue
        found.take(name, _number(value) if name == "train.lr" else value, AI_TOOLKIT)
    for one in process.get("datasets", []):
        target: dict[str, Any] = {}
        for name, value in one.items():
            found.take(
                name,
                value,
                AI_TOOLKIT_RUN if name in AI_TOOLKIT_RUN else AI_TOOLKIT_SETS,
                *(() if name in AI_TOOLKIT_RUN else (target,)),
            )
        if one.get("cache_latents_to_disk"):
            found.settings["cache_dir"] = str(Path(found.settings.get("output_dir", "out")) / "cache")
        found.settings.setdefault("train_data", []).append(target)
    return found


def _flat(given: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in given.items():
        found += _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else [(f"{before}{name}", value)]
    return found


# --- SimpleTuner ------------------------------------------------------------------------------------------------


def _simple_tuner(given: Any, folder: Path) -> ImportedRun:
    found = ImportedRun("SimpleTuner")
    if isinstance(given, list):
        backends: Sequence[Mapping[str, Any]] = given
    else:
        run = {name.removeprefix("--"): value for name, value in given.items()}
        if run.get("model_type") == "lora":
            found.settings["lora"] = {}
        for name, value in run.items():
            found.take(name, _number(value) if name == "learning_rate" else value, SIMPLE_TUNER)
        backends = _backends(found, run.get("data_backend_config"), folder)
    beside = {one["id"]: one for one in backends if one.get("dataset_type") == "conditioning"}
    for one in backends:
        if one.get("dataset_type", "image") in ("image", "video") and not (one.get("disabled") or one.get("disable")):
            names = one.get("conditioning_data") or []
            others = [beside[name] for name in ([names] if isinstance(names, str) else names) if name in beside]
            found.settings.setdefault("train_data", []).append(_backend(found, one, others))
    return found


def _backends(found: ImportedRun, name: str | None, folder: Path) -> Sequence[Mapping[str, Any]]:
    if not name:
        return []
    tries = [one / name for one in (folder, *folder.resolve().parents[:2])]
    place = next((one for one in (*tries, folder / Path(name).name) if one.is_file()), None)
    if place is None:
        found.without.append(f"data_backend_config: {name} is not there")
        return []
    return json.loads(place.read_text(encoding="utf-8"))


def _backend(found: ImportedRun, one: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One data set, and those of masks and references that belong to it."""
    target: dict[str, Any] = {}
    for name, value in one.items():
        found.take(name, value, SIMPLE_TUNER_SETS, target)
    # Its repeats come after the first time.
    target["weight"] = 1 + int(target.get("weight", 0))
    for other in others:
        ours = "mask_dir" if other.get("conditioning_type") == "mask" else "conditioning_dir"
        if ours in target:
            found.without.append(f"conditioning_data: {other['id']} (one of each kind is trained)")
        target.setdefault(ours, other["instance_data_dir"])
    strategy = one.get("caption_strategy", "filename")
    if strategy == "textfile":
        # Each line of such a file is a caption.
        target["multiline_captions"] = True
    elif strategy == "instanceprompt":
        found.without.append(
            "caption_strategy: instanceprompt (caption files count before instance_prompt; remove them)"
        )
    else:
        found.without.append(f"caption_strategy: {strategy} (write captions to files or a listing)")
    if one.get("resolution_type") == "area":
        # In megapixels.
        target["resolution"] = round((float(target.get("resolution", 1)) * 1e6) ** 0.5 / 64) * 64
    return target
