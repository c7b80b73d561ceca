"""Another scheduler in the place of a pipeline's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from ditmesh.errors import InputError
from ditmesh.generate.schedulers import NOISE, SCHEDULERS, scheduler_named

FLOW = FlowMatchEulerDiscreteScheduler(shift=3.0)
EPSILON = DDIMScheduler(beta_schedule="linear", prediction_type="epsilon")
# As Wan has it.
FLOW_UNIPC = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0)


def fits(name: str, own: Any) -> bool:
    try:
        scheduler_named(name, type(own).__name__, own.config)
    except InputError:
        return False
    return True


def end(scheduler: Any) -> torch.Tensor:
    """Where many steps lead from noise 2 if the picture is 0.5 everywhere, and the model knows that."""
    torch.manual_seed(0)
    scheduler.set_timesteps(50)
    flow = getattr(scheduler.config, "prediction_type", "flow_prediction") == "flow_prediction"
    noise = torch.full((1, 1, 4, 4), 2.0)
    sample, generator = noise * getattr(scheduler, "init_noise_sigma", 1.0), torch.Generator().manual_seed(0)
    for time in scheduler.timesteps:
        given = scheduler.scale_model_input(sample, time) if hasattr(scheduler, "scale_model_input") else sample
        if flow:
            sigma = float(time) / 1000
            output = (given - 0.5) / max(sigma, 1e-6)
        else:
            alpha = scheduler.alphas_cumprod[time.long()]
            output = (given - alpha**0.5 * 0.5) / (1 - alpha) ** 0.5
        more = {"generator": generator} if "Ancestral" in type(scheduler).__name__ else {}
        sample = scheduler.step(output, time, sample, **more).prev_sample
    return sample


@pytest.mark.parametrize("own", [FLOW, EPSILON, FLOW_UNIPC], ids=["flow", "noise", "flow by setting"])
def test_what_is_let_through_leads_to_the_picture(own: Any) -> None:
    through = [name for name in SCHEDULERS if fits(name, own)]
    assert len(through) >= 3
    for name in through:
        scheduler = scheduler_named(name, type(own).__name__, own.config)
        assert type(scheduler).__name__ == name
        assert abs(end(scheduler) - 0.5).max() < 0.02, name


def test_the_shift_of_a_flow_is_kept() -> None:
    ours = scheduler_named("UniPCMultistepScheduler", type(FLOW).__name__, FLOW.config)
    assert ours.config.flow_shift == 3.0
    # FLUX's pipeline passes a shift of its own, which FlowMatchEuler leaves alone; a copy steps for itself.
    dpm = scheduler_named("DPMSolverMultistepScheduler", type(FLOW).__name__, FLOW.config)
    first, other = copy.deepcopy(dpm), copy.deepcopy(dpm)
    first.set_timesteps(4, mu=1.15)
    other.set_timesteps(4)
    assert torch.equal(first.sigmas, other.sigmas)
    again = scheduler_named("FlowMatchEulerDiscreteScheduler", type(FLOW).__name__, FLOW.config)
    assert dict(again.config) == dict(FLOW.config)


def test_others_are_refused() -> None:
    for own in (FLOW, FLOW_UNIPC):
        for name in NOISE:
            with pytest.raises(InputError, match=f"{name} is not for a model that predicts a flow"):
                scheduler_named(name, type(own).__name__, own.config)
    with pytest.raises(InputError, match="FlowMatchHeunDiscreteScheduler is not for a model that predicts noise"):
        scheduler_named("FlowMatchHeunDiscreteScheduler", "DDIMScheduler", EPSILON.config)
    with pytest.raises(InputError, match="scheduler 'os' is none of FlowMatchEuler"):
        scheduler_named("os", "DDIMScheduler", EPSILON.config)
