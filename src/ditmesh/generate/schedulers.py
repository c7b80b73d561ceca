"""Replacement of a pipeline's scheduler by another that solves the same equation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import wraps
from types import MethodType
from typing import Any

from ..errors import InputError

# Schedulers of diffusers that can take the place of a flow-matching one as they are.
FLOW_SCHEDULERS = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
# Those that can when they are told that the model predicts a flow. Not DEIS and SA: diffusers' end before all noise is
# gone.
FLOW_BY_SETTING = ("DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "UniPCMultistepScheduler")
# Those of models that predict noise, or v.
NOISE = (
    *("DDIMScheduler", "DDPMScheduler", "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler"),
    *("HeunDiscreteScheduler", "KDPM2DiscreteScheduler", "PNDMScheduler"),
)
SCHEDULERS = (*FLOW_SCHEDULERS, *FLOW_BY_SETTING, *NOISE)


def scheduler_named(name: str, own: str, config: Mapping[str, Any]) -> Any:
    """The scheduler class ``name`` of diffusers, with the settings of the pipeline's scheduler of class ``own``.

    An `InputError`: it is none of `SCHEDULERS`, or solves another equation than the model was trained for.
    """
    import diffusers

    kind: Any = getattr(diffusers, name, None) if name in (*SCHEDULERS, own) else None
    if not isinstance(kind, type):
        raise InputError(f"scheduler {name!r} is none of {', '.join(SCHEDULERS)}")
    if name == own:
        return kind.from_config(config)
    known = inspect.signature(kind.__init__).parameters
    plain = {key: value for key, value in config.items() if key in known}
    flows = own in FLOW_SCHEDULERS or config.get("prediction_type") == "flow_prediction"
    if flows and name in FLOW_BY_SETTING:
        more = {"prediction_type": "flow_prediction", "flow_shift": config.get("flow_shift", config.get("shift", 1.0))}
        sampler: Any = kind.from_config(plain, use_flow_sigmas=True, **more)

        @wraps(kind.set_timesteps)
        def unshifted(self: Any, *args: Any, mu: float | None = None, **kwargs: Any) -> None:
            kind.set_timesteps(self, *args, **kwargs)

        if not config.get("use_dynamic_shifting"):
            # FLUX's pipeline passes a shift to every sampler: FlowMatchEuler leaves it alone, DPM-Solver refuses it.
            sampler.set_timesteps = MethodType(unshifted, sampler)
        return sampler
    fitting = FLOW_SCHEDULERS + FLOW_BY_SETTING if flows else NOISE + FLOW_BY_SETTING
    declared = getattr(getattr(diffusers, own, None), "_get_compatibles", list)()
    related = name in (FLOW_SCHEDULERS if own in FLOW_SCHEDULERS else [other.__name__ for other in declared])
    if name not in fitting or not related:
        others = [other for other in fitting if other != own]
        what = "a flow" if flows else "noise"
        raise InputError(
            f"scheduler {name} is not for a model that predicts {what}, as {own} is; use {', '.join(others)}"
        )
    return kind.from_config(plain)
