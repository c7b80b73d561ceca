"""Samplers by name, for models of either kind: flow matching, or DDPM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import InputError

OWN = "own"

# Samplers of flow-matching and other models: diffusers' class, and its settings.
FLOW_SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "dpm": ("DPMSolverMultistepScheduler", {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}),
    "unipc": ("UniPCMultistepScheduler", {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}),
}
DDPM: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "dpm": ("DPMSolverMultistepScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
}


def check_sampler(name: str, model: Path) -> None:
    """Reject a sampler that does not fit the model (a pipeline's folder). Raises `InputError`: naming those it can."""
    kind = scheduler_class(OWN, model)
    table = _table(kind)
    if name != OWN and name not in table:
        what = "a flow-matching model" if table is FLOW_SAMPLERS else "a DDPM model"
        raise InputError(
            f"--sampler {name!r} does not go with {what} ({kind or 'unknown scheduler'}); use {', '.join(table)}, or "
            f"{OWN!r} for the pipeline's own"
        )


def scheduler_class(name: str, model: Path) -> str:
    """diffusers' class behind a sampler's name, for a pipeline's folder; empty if the folder does not say."""
    try:
        text = (model / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8")
        own = str(json.loads(text).get("_class_name", ""))
    except (OSError, ValueError):
        own = ""
    return own if name == OWN else _table(own)[name][0]


def set_sampler(pipe: Any, name: str, plain: Any) -> None:
    """Give the pipeline a sampler (see `check_sampler`) with the settings of ``plain``, the model's own scheduler."""
    import diffusers

    if name == OWN:
        pipe.scheduler = plain
        return
    kind, settings = _table(type(plain).__name__)[name]
    if settings.get("use_flow_sigmas"):
        # A flow's schedule has a shift and no betas.
        pipe.scheduler = getattr(diffusers, kind)(flow_shift=plain.config.get("shift", 1.0), **settings)
    else:
        pipe.scheduler = getattr(diffusers, kind).from_config(dict(plain.config), **settings)


def _table(kind: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return FLOW_SAMPLERS if "FlowMatch" in kind else DDPM
