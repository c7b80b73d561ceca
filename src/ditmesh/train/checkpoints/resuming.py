"""The differences of a resumed run from its checkpoint's run, and which of them change its curve."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from .folder import AT_ONCE, NO_MATTER, OTHER_WEIGHTS


@dataclass(frozen=True)
class ResumeReport:
    """A report before the first step of a resumed run."""

    lines: tuple[str, ...]

    @staticmethod
    def of(checkpoint: str, step: int, steps: int, changed: Iterable[str]) -> ResumeReport:
        """The report of a run that goes on after ``step`` of ``steps``."""
        lines = [f"resuming from {checkpoint}: {step} of {steps} steps are done"]
        return ResumeReport((*lines, *(f"  changes the curve: {sentence}" for sentence in changed)))


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
                clause = (
                    "train_data_dir has other samples (names, sizes, captions or weights) than in the checkpoint's run"
                )
            setting = "global_batch_size" if name == "batch" else top
            back = "restore them" if name == "data" else f"set {setting} to {_short(old)}"
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
