"""Samplers by name, for models of either kind: flow matching, or DDPM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...generate.schedulers import scheduler_named

OWN = "own"

# diffusers' classes of samplers, of flow-matching models and of others.
FLOW_SAMPLERS = {
    "euler": "FlowMatchEulerDiscreteScheduler",
    "heun": "FlowMatchHeunDiscreteScheduler",
    "dpm": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
}
DDPM = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "dpm": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
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
    return own if name == OWN else _table(own)[name]


def set_sampler(pipe: Any, name: str, plain: Any) -> None:
    """Give the pipeline a sampler (see `check_sampler`) with the settings of ``plain``, the model's own scheduler."""
    own = type(plain).__name__
    pipe.scheduler = plain if name == OWN else scheduler_named(_table(own)[name], own, plain.config)


def _table(kind: str) -> dict[str, str]:
    return FLOW_SAMPLERS if "FlowMatch" in kind else DDPM
