"""What a transformer learns: noise is added to latents, and it predicts what leads back.

Rectified flow (Liu et al. 2022, arXiv:2209.03003; noise levels as in Esser et al. 2024, arXiv:2403.03206), the noise of
DDPM (Ho et al. 2020, arXiv:2006.11239), and the velocity (Salimans and Ho 2022, arXiv:2202.00512). The schedules and
weights are diffusers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)
from torch import Tensor

from ..core.library import library_class
from ..errors import ConfigError
from .config import TrainConfig


@dataclass(frozen=True)
class Noised:
    """A batch for the transformer.

    Attributes:
        latents: (B, C, ...) with noise.
        timesteps: (B,) as the transformer gets them.
        target: (B, C, ...) what it is to predict.
        weights: (B,) of the samples' losses.
    """

    latents: Tensor
    timesteps: Tensor
    target: Tensor
    weights: Tensor


class NoiseObjective:
    """Noise for latents and targets for predictions.

    Args:
        scheduler: the pipeline's; it is not changed, and only its settings count.
        config: objective, density of noise levels, weights.

    Attributes:
        kind: ``"flow"``, ``"epsilon"`` or ``"v_prediction"``.

    Raises:
        ConfigError: the scheduler is not for that objective.
    """

    def __init__(self, scheduler: Any, config: TrainConfig) -> None:
        self._config = config
        self._scheduler, is_flow = _tables(scheduler)
        own = "flow" if is_flow else scheduler.config.get("prediction_type", "epsilon")
        self.kind = own if config.objective == "auto" else config.objective
        if self.kind not in ("flow", "epsilon", "v_prediction"):
            raise ConfigError(f"{type(scheduler).__name__} predicts {self.kind!r}, which nothing here trains")
        if (self.kind == "flow") != is_flow:
            raise ConfigError(
                f"objective={self.kind!r} is not what {type(scheduler).__name__} samples with; use objective='auto'"
            )
        if config.snr_gamma is not None and self.kind == "flow":
            raise ConfigError("snr_gamma weighs epsilon- and v-prediction; leave it out for rectified flow")

    def __call__(self, latents: Tensor, generators: Sequence[torch.Generator]) -> Noised:
        """Add noise.

        Args:
            latents: (B, C, ...) clean, scaled.
            generators: one a sample, on the CPU, so that a sample's noise does not depend on its batch or device.
        """
        noise = torch.stack([torch.randn(latents.shape[1:], generator=one) for one in generators]).to(latents)
        if self.kind == "flow":
            return self._flow(latents, noise, generators)
        scheduler, steps = self._scheduler, self._scheduler.config["num_train_timesteps"]
        timesteps = torch.cat([torch.randint(steps, (1,), generator=one) for one in generators]).to(latents.device)
        mixed = scheduler.add_noise(latents, noise, timesteps)
        is_noise = self.kind == "epsilon"
        target = noise if is_noise else scheduler.get_velocity(latents, noise, timesteps)
        weights = torch.ones(len(latents), device=latents.device)
        if self._config.snr_gamma is not None:
            snr = compute_snr(scheduler, timesteps)
            weights = snr.clamp(max=self._config.snr_gamma) / (snr if is_noise else snr + 1)
        return Noised(mixed, timesteps, target, weights.float())

    def _flow(self, latents: Tensor, noise: Tensor, generators: Sequence[torch.Generator]) -> Noised:
        config, tables = self._config, self._scheduler
        density = [
            compute_density_for_timestep_sampling(
                config.weighting_scheme, 1, config.logit_mean, config.logit_std, config.mode_scale, generator=one
            )
            for one in generators
        ]
        places = (torch.cat(density) * len(tables.timesteps)).long().clamp(max=len(tables.timesteps) - 1)
        levels = tables.sigmas[places].to(latents)
        factor = levels.view(-1, *[1] * (latents.dim() - 1))
        return Noised(
            latents=latents + factor * (noise - latents),
            timesteps=tables.timesteps[places].to(latents.device),
            target=noise - latents,
            weights=compute_loss_weighting_for_sd3(config.weighting_scheme, levels).float(),
        )


def _tables(scheduler: Any) -> tuple[Any, bool]:
    """A fresh scheduler with the noise levels of training, and whether they are those of rectified flow.

    Sampling changes a scheduler's tables, and solvers have tables that are for nothing else: `add_noise` of a
    DPM-Solver that samples nothing yet takes its noise levels from the wrong end.
    """
    config = scheduler.config
    if "FlowMatch" in type(scheduler).__name__:
        # Its own tables, whosever class it is.
        return type(scheduler).from_config(config), True
    if library_class(type(scheduler)) is None:
        raise ConfigError(
            f"{type(scheduler).__module__}.{type(scheduler).__name__} is no scheduler of diffusers, so the noise "
            "levels of training are not known; give the pipeline diffusers' scheduler that it was made after"
        )
    if config.get("prediction_type") == "flow_prediction":
        steps, shift = config["num_train_timesteps"], config.get("flow_shift", 1.0)
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=steps, shift=shift), True
    if "beta_schedule" not in config:
        raise ConfigError(f"{type(scheduler).__name__} has no beta_schedule to train with")
    return DDPMScheduler.from_config(config), False


def sample_losses(prediction: Tensor, noised: Noised, seen: Tensor | None = None) -> Tensor:
    """(B,) weighted mean squared errors, in float32; over the latents that ``seen``, ones and zeros, says."""
    errors = (prediction.float() - noised.target.float()).square()
    if seen is not None:
        errors = errors * (seen / seen.mean())
    return errors.flatten(1).mean(1) * noised.weights
