"""Samplers by name, for models of either kind: flow matching, or DDPM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import InputError

OWN = "own"

# What flow-matching models and the others can be sampled with: diffusers' class, and settings of its own.
FLOW: dict[str, tuple[str, dict[str, Any]]] = {
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
    """Refuse a sampler that the model, a pipeline's folder, cannot be drawn with.

    Raises:
        InputError: naming those it can.
    """
    kind = _class_of(model)
    known = _table(kind)
    if name != OWN and name not in known:
        what = "a flow-matching model" if known is FLOW else "a DDPM model"
        raise InputError(
            f"--sampler {name!r} does not draw with {what} ({kind or 'unknown scheduler'}); use {', '.join(known)}, or "
            f"{OWN!r} for the pipeline's own"
        )


def set_sampler(pipe: Any, name: str, plain: Any) -> None:
    """Give the pipeline a sampler.

    Args:
        pipe: the pipeline.
        name: as `check_sampler` knows it.
        plain: the scheduler that the model came with; settings are taken from it, as a sampler's own may lack some.
    """
    import diffusers

    if name == OWN:
        pipe.scheduler = plain
        return
    kind, settings = _table(type(plain).__name__)[name]
    own = dict(plain.config)
    if settings.get("use_flow_sigmas"):
        # A flow's schedule has a shift and no betas.
        pipe.scheduler = getattr(diffusers, kind)(flow_shift=own.get("shift", 1.0), **settings)
    else:
        pipe.scheduler = getattr(diffusers, kind).from_config(own, **settings)


def _table(kind: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return FLOW if "FlowMatch" in kind else DDPM


def _class_of(model: Path) -> str:
    try:
        text = (model / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8")
        return str(json.loads(text).get("_class_name", ""))
    except (OSError, ValueError):
        return ""
