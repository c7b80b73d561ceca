"""The differences of a resumed run from its checkpoint's run, and what each of them means, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from .folder import AT_ONCE, NO_MATTER, OTHER_WEIGHTS

# The effect of a new value on the rest of the run, by setting.
EFFECTS: dict[str, str] = {
    **dict.fromkeys(("learning_rate", "scale_lr"), "weights move by the new rate"),
    **dict.fromkeys(
        ("lr_scheduler", "lr_warmup_steps", "lr_decay_steps", "lr_num_cycles", "lr_power"),
        "the learning rate follows the new schedule, at the place of this step",
    ),
    **dict.fromkeys(
        ("max_train_steps", "num_train_epochs"),
        "the run has another end, and schedules that fall towards it are stretched",
    ),
    "optimizer": "the optimizer is another one, and its state begins empty",
    **dict.fromkeys(
        ("optimizer_args", "adam_beta1", "adam_beta2", "adam_weight_decay", "adam_epsilon"),
        "the optimizer keeps its state and continues with the new value",
    ),
    "max_grad_norm": "gradients are clipped at the new norm",
    "ema_decay": "the moving average follows the weights at another pace",
    **dict.fromkeys(("mixed_precision", "compile", "encoder_precision"), "numbers are rounded otherwise"),
    "reproducible": "sums are rounded otherwise",
    "lora.dropout": "adapters drop another share of their inputs",
    "seed": "samples come in another order with other noise and noise levels",
    "batch": "a step has another number of samples",
    "train_batch_size": "sums are rounded otherwise, and shapes are grouped otherwise",
    "data": "the samples are others, and the order begins elsewhere",
    **dict.fromkeys(("resolution", "aspect_ratio_buckets", "num_frames"), "samples have other sizes"),
    **dict.fromkeys(
        ("objective", "weighting_scheme", "logit_mean", "logit_std", "mode_scale", "snr_gamma"),
        "losses before and after are not comparable",
    ),
}
# The same of settings that do not change the curve.
HARMLESS: dict[str, str] = {
    **dict.fromkeys(("parallel", "sharding", "data_speeds"), "the same curve but for rounding"),
    "gradient_checkpointing": "memory and time change, the curve does not",
}
# Mappings of which entries come and go.
OPEN_MAPPINGS = {"optimizer_args"}
# They control resuming, and do not affect training; accumulation follows from the batch.
UNSAID = {"resume_from_checkpoint", "resume_allow_changed", "gradient_accumulation_steps", "global_batch_size"}


@dataclass(frozen=True)
class Differences:
    """The differences from the checkpoint's run, a sentence each.

    Attributes:
        changed: what changes the curve from this step on.
        harmless: what does not.
    """

    changed: tuple[str, ...]
    harmless: tuple[str, ...]


@dataclass(frozen=True)
class ResumeReport:
    """A report before the first step of a resumed run."""

    lines: tuple[str, ...]

    @staticmethod
    def of(checkpoint: str, step: int, steps: int, found: Differences) -> ResumeReport:
        """The report of a run that goes on after ``step`` of ``steps``."""
        lines = [f"resuming from {checkpoint}: {step} of {steps} steps are done"]
        lines += [f"  changes the curve: {one}" for one in found.changed]
        lines += [f"  harmless: {one}" for one in found.harmless]
        if len(lines) == 1:
            lines.append("  all settings are those of the checkpoint")
        return ResumeReport(tuple(lines))


def run_differences(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Iterable[str]) -> Differences:
    """The differences of a resumed run from its checkpoint.

    Args:
        before, now: as `settings_of` returns them.
        allowed: settings that may differ although they change the training.

    Raises:
        InputError: settings differ that change which samples are learned from, or which weights there are; names all
            of them, with the way out.
    """
    allowed = {*allowed}
    changed: list[str] = []
    harmless: list[str] = []
    refused: list[str] = []
    ask: list[str] = []
    for name, old, new in _differing(before, now):
        top = name.partition(".")[0]
        said = f"{name} was {_short(old)} and is {_short(new)}"
        effect = EFFECTS.get(name, EFFECTS.get(top, ""))
        meaning = f": {effect}" if effect else ""
        if name in NO_MATTER or top in NO_MATTER:
            if top not in UNSAID:
                harmless.append(f"{said}: {HARMLESS.get(top, 'no effect on the curve')}")
        elif name in AT_ONCE or top in AT_ONCE:
            changed.append(f"{said} from this step on{meaning}")
        elif name in OTHER_WEIGHTS:
            raise InputError(
                f"{said}: the checkpoint has states of other weights; set {name} to {_short(old)}, or begin a run in "
                "another output_dir"
            )
        elif {name, top, *({"global_batch_size"} if name == "batch" else ())} & allowed:
            changed.append(f"{said} from this step on (allowed){meaning}")
        else:
            if name == "data":
                said = (
                    "train_data_dir has other samples (names, sizes, captions or weights) than in the checkpoint's run"
                )
            setting = "global_batch_size" if name == "batch" else top
            back = "restore them" if name == "data" else f"set {setting} to {_short(old)}"
            ask.append(setting)
            why = f" ({effect})" if effect else ""
            refused.append(f"{said}, which changes what the run learns from{why}; {back}")
    if refused:
        raise InputError(
            f"{'; '.join(refused)}, or allow {'it' if len(refused) == 1 else 'them'} with "
            f"resume_allow_changed: [{', '.join(ask)}]"
        )
    return Differences(tuple(changed), tuple(harmless))


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for name, new in now.items():
        # A setting that the other version did not have.
        if name not in before or before[name] == new:
            continue
        old = before[name]
        if isinstance(old, Mapping) and isinstance(new, Mapping) and f"{prefix}{name}" not in OPEN_MAPPINGS:
            found += _differing(old, new, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", old, new))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
