"""A pipeline's scheduler: listeners are told of its steps, and another that solves the same equation replaces it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.patching import Patch
from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

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
        shift = config.get("flow_shift", config.get("shift", 1.0))
        more = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
        return kind.from_config(plain, **more)
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


@dataclass(frozen=True)
class SchedulerStep:
    """A step that a scheduler has taken: the number of its timestep (None: this scheduler does not count), what the
    model returned (guided), the arguments of the call, and what the scheduler returned.
    """

    scheduler: Any
    index: int | None
    prediction: Any
    timestep: Any
    sample: Any
    result: Any

    def latents(self) -> Tensor | None:
        """The latents after the step; None: there are none."""
        from torch import Tensor

        found = self.result[0] if isinstance(self.result, tuple) else self.result.prev_sample
        return found if isinstance(found, Tensor) else None


class StepEvents:
    """Tells a listener, ``seen``, of every step of a scheduler, until `undo`; its exceptions leave the call."""

    def __init__(self, scheduler: Any, seen: Callable[[SchedulerStep], None]) -> None:
        signature = inspect.signature(scheduler.step)

        def step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            index = getattr(scheduler, "step_index", None)
            result = patch.original(*args, **kwargs)
            if index is None and (after := getattr(scheduler, "step_index", None)) is not None:
                index = after - 1
            prediction, timestep, sample = map(given.get, ("model_output", "timestep", "sample"))
            seen(SchedulerStep(scheduler, index, prediction, timestep, sample, result))
            return result

        patch = self._patch = Patch(scheduler, "step", step)

    def undo(self) -> None:
        """Stop telling. Harmless twice."""
        self._patch.undo()


def loop_steps(scheduler: Any, planned: int) -> int:
    """Steps of a pipeline's denoising loop, once its timesteps are set; ``planned`` if the scheduler does not tell.

    Schedulers of second order (Heun) have nearly twice as many timesteps, and with an input image the loop begins
    later.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or not hasattr(scheduler, "begin_index"):
        return planned
    return max(1, len(timesteps) - (scheduler.begin_index or 0))
