"""The output folder of a run: the run that owns it, its lock, and what a resumed run may change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...core.files import lock_of
from ...errors import InputError
from ..config import TrainConfig

LOCK = "run.lock"
# Files of a run: a folder with one of these belongs to a run.
LEFT = ("checkpoint-*", "pipeline", "lora")

# Settings without effect on data and loss, or covered by another entry (the data's digest, the batch).
NO_MATTER = {
    # Their samples, weights and settings are in the data's digest.
    *("train_data", "mask_dir", "conditioning_dir"),
    *("output_dir", "train_data_dir", "cache_dir", "report_to", "from_scratch", "parallel", "data_speeds", "sharding"),
    *("checkpointing_steps", "checkpoints_total_limit", "gradient_checkpointing"),
    *("resume_from_checkpoint", "resume_allow_changed", "global_batch_size", "reinforce.on_reward_failure"),
    *("validation_prompts", "validation_steps", "validation_inference_steps", "reinforce.early_stopping_patience"),
}
# Settings with a new value from the first step on.
AT_ONCE = {
    *("learning_rate", "lr_scheduler", "lr_warmup_steps", "lr_decay_steps", "max_grad_norm", "ema_decay"),
    *("encoder_precision", "max_train_steps", "num_train_epochs", "mixed_precision"),
    *("lora.dropout", "optimizer_args"),
}
# Settings with which the checkpoint has states of other weights.
OTHER_WEIGHTS = {
    "train_modules",
    "lora",
    "lora.rank",
    "lora.target_modules",
    "lora.type",
}


def check_output(config: TrainConfig) -> None:
    """Reject a run into the output folder of another run, before any rank starts.

    Raises `InputError`: another run has left something there, or works there now.
    """
    folder = Path(config.output_dir)
    if not folder.is_dir():
        return
    _held(folder).close()
    _check_unoccupied(config, folder)


def _check_unoccupied(config: TrainConfig, folder: Path) -> None:
    wanted = config.output.resume_from_checkpoint
    remnant = next((path for pattern in LEFT for path in sorted(folder.glob(pattern))), None)
    if remnant is None or wanted == "latest":
        return
    checkpoint = Path(wanted or "") if wanted is None or Path(wanted).is_dir() else folder / wanted
    if wanted is None or checkpoint.parent.resolve() != folder.resolve():
        raise InputError(
            f"output_dir={config.output_dir!r} has {remnant.name} of an earlier run; resume that run with --resume, or "
            "give another output_dir"
        )
    numbers = [path.name.removeprefix("checkpoint-") for path in (Path(wanted), *folder.glob("checkpoint-*"))]
    first, *others = [int(number) for number in numbers if number.isdigit()] or [0]
    if later := [number for number in others if number > first]:
        # `latest` would be one of them, which the run does not come from.
        raise InputError(
            f"resume_from_checkpoint={wanted!r}: output_dir={config.output_dir!r} has checkpoint-{min(later)} of the "
            "run's former course; move later checkpoints elsewhere, or give another output_dir"
        )


def _held(folder: Path) -> IO[str]:
    try:
        held = lock_of(folder / LOCK)
    except OSError as error:
        raise InputError(f"output_dir={str(folder)!r} cannot be written to: {error}") from None
    if held is None:
        process = (folder / LOCK).read_text(encoding="utf-8").strip() or "unknown"
        raise InputError(
            f"output_dir={str(folder)!r} is used by another run (process {process}); wait for its end, or give another "
            "output_dir"
        )
    return held


def hold_output(config: TrainConfig) -> IO[str]:
    """Make a run's output folder, and lock it until the returned file is closed.

    Raises `InputError`: it is another run's, or cannot be made.
    """
    folder = Path(config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output_dir={config.output_dir!r} cannot be written to: {error}") from None
    held = _held(folder)
    try:
        _check_unoccupied(config, folder)
    except BaseException:
        held.close()
        raise
    return held


def run_settings(config: TrainConfig, data: str) -> dict[str, Any]:
    """A run's settings for its checkpoints, as JSON data.

    Args:
        data: a digest of the samples.
    """
    settings = config.flat()
    for reward in (settings["reinforce"] or {"rewards": ()})["rewards"]:
        # A reward that was late goes on with more time.
        del reward["timeout_seconds"]
    return {**settings, "batch": config.batch, "data": data}


@dataclass(frozen=True)
class ResumeReport:
    """A report before the first step of a resumed run."""

    lines: tuple[str, ...]


def run_differences(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Iterable[str]) -> list[str]:
    """A sentence for every difference of a resumed run from its checkpoint that changes its curve from this step on.

    Args:
        before, now: as `run_settings` returns them.
        allowed: settings that may differ although they change the training.

    Raises:
        InputError: settings differ that change the samples or the weights; names all of them, with the way out.
    """
    allowed = {*allowed}
    changed: list[str] = []
    refused: list[str] = []
    ask: list[str] = []
    for name, old, new in _differing(before, now):
        top = name.partition(".")[0]
        clause = f"{name} was {_short(old)} and is {_short(new)}"
        if name in NO_MATTER or top in NO_MATTER:
            continue
        if name in OTHER_WEIGHTS or (name == "ema_decay" and None in (old, new)):
            raise InputError(
                f"{clause}: the checkpoint has states of other weights; set {name} to {_short(old)}, or begin a run in "
                "another output_dir"
            )
        if name in AT_ONCE or top in AT_ONCE:
            changed.append(f"{clause} from this step on")
        elif {name, top, *({"global_batch_size"} if name == "batch" else ())} & allowed:
            changed.append(f"{clause} from this step on (allowed)")
        else:
            if name == "data":
                samples = "train_data_dir has other samples (names, sizes, captions or weights)"
                group = next((group for group in ("reinforce", "distill") if now.get(group)), None)
                samples = samples if group is None else f"{group}.prompts has other prompts"
                clause = f"{samples} than in the checkpoint's run"
            setting = "global_batch_size" if name == "batch" else top
            back = "restore them" if name == "data" else f"set {setting if name == 'batch' else name} to {_short(old)}"
            ask.append(setting)
            refused.append(f"{clause}, which changes what the run learns from; {back}")
    if refused:
        raise InputError(
            f"{'; '.join(refused)}, or allow {'it' if len(refused) == 1 else 'them'} with "
            f"resume_allow_changed: [{', '.join(ask)}]"
        )
    return changed


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    differences: list[tuple[str, Any, Any]] = []
    for name, new in now.items():
        # A setting that the other version did not have.
        if name not in before or before[name] == new:
            continue
        old = before[name]
        # Entries of arguments come and go.
        if isinstance(old, Mapping) and isinstance(new, Mapping) and name != "optimizer_args":
            differences += _differing(old, new, f"{prefix}{name}.")
        else:
            differences.append((f"{prefix}{name}", old, new))
    return differences


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
