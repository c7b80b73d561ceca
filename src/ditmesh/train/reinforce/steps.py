"""Steps of samplers that are draws: each from a normal distribution around what the transformer predicts.

Of rectified flow it is the step of the stochastic equation with the same distributions as the flow (Liu et al. 2025,
Flow-GRPO, arXiv:2505.05470, equation 9; Xue et al. 2025, DanceGRPO, arXiv:2505.07818), of models that predict noise
DDIM's with noise (Song et al. 2020, arXiv:2010.02502, equation 12; Black et al. 2023, DDPO, arXiv:2305.13301). Levels
of noise are the scheduler's own. Logarithms of probabilities are means over the numbers of a sample, as in the
programs of these papers: their differences, and so the ratios, do not grow with the size of the image.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError, InputError
from ...generate.schedulers import scheduler_named
from ..observed.watch import stepped

# Of an objective its sampler, and its noise: the `a` of Flow-GRPO, and DDIM's eta, as in the papers.
_FLOW = "FlowMatchEulerDiscreteScheduler"
SAMPLERS = {"flow_grpo": _FLOW, "distillation": _FLOW, "ddpo": "DDIMScheduler"}
NOISE_LEVELS = {"flow_grpo": 0.7, "distillation": 0.0, "ddpo": 1.0}


@dataclass(frozen=True)
class NormalStep:
    """The distribution of the sample after step ``number``: of numbers with one deviation; 0: nothing is drawn.

    ``mean`` is (B, ...) float32, ``plain`` what the scheduler made of the step, ``before`` the sample before it.
    """

    number: int
    mean: Tensor
    deviation: float
    plain: Tensor
    before: Tensor

    def drawn(self, noise: Tensor) -> Tensor:
        """The sample after the step, by standard normal noise."""
        return (self.mean + self.deviation * noise).to(self.plain.dtype)

    def log_probability(self, after: Tensor) -> Tensor:
        """(B,) float64, which shows last bits: the logarithm of the density at a sample, a mean over its numbers."""
        error = (after.double() - self.mean.double()).square().flatten(1).mean(1)
        return -error / (2 * self.deviation**2) - math.log(self.deviation) - 0.5 * math.log(2 * math.pi)

    def divergence(self, mean: Tensor) -> Tensor:
        """(B,) float64: the Kullback-Leibler divergence from the step with another mean, a mean over numbers."""
        return (self.mean.double() - mean.double()).square().flatten(1).mean(1) / (2 * self.deviation**2)


def sampler_for(objective: str, scheduler: Any) -> Any:
    """A fresh sampler of an objective, with the settings of a pipeline's scheduler.

    Raises `ConfigError`: the scheduler is of the other objective, or the sampler cannot take its place.
    """
    config, name = scheduler.config, type(scheduler).__name__
    is_flow = "FlowMatch" in name or config.get("prediction_type") == "flow_prediction"
    models, fitting = ("rectified flow", "flow_grpo") if is_flow else ("models of noise", "ddpo")
    if is_flow != (SAMPLERS[objective] == _FLOW):
        way = "train a model of rectified flow" if objective == "distillation" else f"use objective: {fitting}"
        raise ConfigError(f"objective={objective!r}: {name} is for {models}; {way}")
    try:
        sampler = scheduler_named(SAMPLERS[objective], name, config)
    except InputError:
        sampler = None
    if sampler is None or config.get("invert_sigmas"):
        what = "other steps" if sampler is None else "its noise levels the other way round"
        raise ConfigError(
            f"objective={objective!r} steps as {SAMPLERS[objective]}, and {name} has {what}; use objective: denoising"
        )
    return sampler


@contextmanager
def stochastic_steps(
    pipe: Any, objective: str, level: float, images: int, follow: Callable[[NormalStep], Tensor], parts: int = 1
) -> Iterator[Any]:
    """Put a sampler in the place of a pipeline's scheduler, of which every step but the last is a draw; yields it.

    The pipeline's own scheduler is not touched, and comes back. ``level``: of the noise, Flow-GRPO's ``a`` or DDIM's
    eta. ``follow`` is called with every step and returns the sample after it, (images, ...). ``parts``: steps of
    rectified flow in the place of each one.
    """
    held, sampler = pipe.scheduler, sampler_for(objective, pipe.scheduler)
    plain, signature, numbers = sampler.step, inspect.signature(sampler.step), count()
    distribution = _of_noise if objective == "ddpo" else _of_flow

    @wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        number, given = next(numbers), dict(signature.bind(*args, **kwargs).arguments)
        is_last = number + 1 >= len(sampler.timesteps)
        mean, deviation, result = distribution(sampler, plain, given, 0.0 if is_last else level)
        plainly, sample = _sample_of(result), given["sample"]
        copies = len(sample) // images
        section = "distill" if objective == "distillation" else "reinforce"
        if len(sample) != copies * images or any(not torch.equal(sample[:images], c) for c in sample.split(images)):
            raise ConfigError(
                f"{type(pipe).__name__} has {len(sample)} samples in a step for {images} images, which objective: "
                f"{objective} cannot tell apart; use {section}.guidance: 1"
            )
        after = follow(NormalStep(number, mean[:images], deviation, plainly[:images], sample[:images]))
        return stepped(result, torch.cat([after] * copies))

    vars(sampler)["step"] = step
    if parts > 1:
        vars(sampler)["set_timesteps"] = _finer(sampler, parts)
    # Around the pipeline's own bookkeeping of its parts.
    vars(pipe)["scheduler"] = sampler
    try:
        yield sampler
    finally:
        vars(pipe)["scheduler"] = held


def _finer(sampler: Any, parts: int) -> Callable[..., None]:
    """The method of a sampler that sets its steps, with so many for each, evenly in the level of noise."""
    plain = sampler.set_timesteps

    @wraps(plain)
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        plain(*args, **kwargs)
        levels = sampler.sigmas
        shares = torch.arange(parts, device=levels.device) / parts
        between = levels[:-1, None] + levels.diff()[:, None] * shares
        sampler.sigmas = torch.cat([between.flatten(), levels[-1:]])
        sampler.timesteps = between.flatten().to(sampler.timesteps) * sampler.config.num_train_timesteps

    return set_timesteps


def _of_flow(sampler: Any, plain: Callable[..., Any], given: dict[str, Any], level: float) -> tuple[Tensor, float, Any]:
    """Mean and deviation of Flow-GRPO's step with these arguments, and the result of the scheduler's ``plain`` one."""
    if given.get("per_token_timesteps") is not None:
        raise ConfigError("objective: flow_grpo: tokens of a sample are at unlike times; use objective: denoising")
    result = plain(**given)
    place = sampler.step_index - 1
    now, later = float(sampler.sigmas[place]), float(sampler.sigmas[place + 1])
    # At pure noise the deviation of the equation has no bound: the next level's is taken, as the paper does.
    diffusion = level * math.sqrt(now / (1 - (now if now < 1 else float(sampler.sigmas[1]))))
    pull, change = diffusion**2 / (2 * now), later - now
    output, sample = given["model_output"].float(), given["sample"].float()
    mean = sample * (1 + pull * change) + output * ((1 + pull * (1 - now)) * change)
    return mean, diffusion * math.sqrt(-change), result


def _of_noise(
    sampler: Any, plain: Callable[..., Any], given: dict[str, Any], level: float
) -> tuple[Tensor, float, Any]:
    """Mean and deviation of DDIM's step, and its result without noise."""
    given.pop("generator", None)
    result = plain(**given | {"eta": level, "variance_noise": torch.zeros_like(given["model_output"])})
    now = int(given["timestep"])
    variance = sampler._get_variance(now, now - sampler.config.num_train_timesteps // sampler.num_inference_steps)
    return _sample_of(result).float(), level * math.sqrt(max(float(variance), 0.0)), result


def _sample_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result.prev_sample
