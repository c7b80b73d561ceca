"""Training objectives: they add noise to latents and define the transformer's target.

Rectified flow (Liu et al. 2022, arXiv:2209.03003; noise levels as in Esser et al. 2024, arXiv:2403.03206), the noise of
DDPM (Ho et al. 2020, arXiv:2006.11239), the velocity (Salimans and Ho 2022, arXiv:2202.00512), and the clean sample,
for tokens as wide as the model (Li and He 2025, arXiv:2511.13720). The schedules and weights are diffusers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.library import library_class
from ..errors import ConfigError
from .config import TrainConfig
from .staging import onto

# Of the density ``logit_normal``, and of ``mode`` (Esser et al. 2024, section 3.1), as in diffusers' scripts.
LOGIT_STD, MODE_SCALE = 1.0, 1.29
OBJECTIVES = ("flow", "epsilon", "v_prediction", "sample")


@dataclass(frozen=True)
class NoisyBatch:
    """A batch for the transformer.

    Attributes:
        latents: (B, C, ...) with noise.
        timesteps: (B,) as the transformer gets them.
        target: (B, C, ...) for its prediction.
        weights: (B,) of the samples' losses.
    """

    latents: Tensor
    timesteps: Tensor
    target: Tensor
    weights: Tensor


class NoiseObjective:
    """The objective of a run, with the noise levels of its pipeline's scheduler.

    Args:
        scheduler: the pipeline's; it is not changed, and only its settings count.

    Attributes:
        kind: name of the objective.
        scheduler: a fresh one, with the tables of training.

    Raises:
        ConfigError: the scheduler is not for that objective.
    """

    def __init__(self, scheduler: Any, config: TrainConfig) -> None:
        self._config = config.model
        self.scheduler, self._is_flow = _tables(scheduler)
        self.kind = "flow" if self._is_flow else scheduler.config.get("prediction_type", "epsilon")
        if self.kind not in OBJECTIVES:
            raise ConfigError(f"{type(scheduler).__name__} predicts {self.kind!r}, which nothing here trains")
        if self._is_flow and config.model.snr_gamma is not None:
            raise ConfigError("snr_gamma is for models of DDPM; leave it out for rectified flow")

    def keep_between(self, lowest: float, highest: float) -> None:
        """Draw timesteps of rectified flow within bounds alone: those of one of several transformers.

        Raises `ConfigError`: the objective is another one, or there is no timestep between the bounds.
        """
        times = self.scheduler.timesteps
        # A bound may lie just below a timestep.
        mask = (times.double() >= lowest) & (times.double() <= highest)
        if not self._is_flow or not bool(mask.any()):
            raise ConfigError(
                f"objective {self.kind!r} has no timesteps from {lowest:g} to {highest:g} to be trained on"
            )
        self.scheduler.sigmas = self.scheduler.sigmas[: len(times)][mask]
        self.scheduler.timesteps = times[mask]

    def __call__(self, latents: Tensor, generators: Sequence[torch.Generator]) -> NoisyBatch:
        """Add noise.

        Args:
            latents: (B, C, ...) clean, scaled.
            generators: one a sample, on the CPU, so that a sample's noise does not depend on its batch or device.
        """
        noise = torch.stack([torch.randn(latents.shape[1:], generator=one) for one in generators])
        noise = onto(noise, latents.device, latents.dtype)
        return (self._flow if self._is_flow else self._ddpm)(latents, noise, generators)

    def _flow(self, latents: Tensor, noise: Tensor, generators: Sequence[torch.Generator]) -> NoisyBatch:
        """The straight path from latents to noise: the target is ``noise - latents``."""
        from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

        scheme, scheduler = self._config.weighting_scheme, self.scheduler
        density = [
            compute_density_for_timestep_sampling(
                scheme, 1, self._config.logit_mean, LOGIT_STD, MODE_SCALE, generator=generator
            )
            for generator in generators
        ]
        places = (torch.cat(density) * len(scheduler.timesteps)).long().clamp(max=len(scheduler.timesteps) - 1)
        # The scheduler's numbers end in noise, or, if they are inverted, in the latents.
        start, end = (noise, latents) if scheduler.config.get("invert_sigmas") else (latents, noise)
        levels = onto(scheduler.sigmas[places], latents.device, latents.dtype)
        factor = levels.view(-1, *[1] * (latents.dim() - 1))
        return NoisyBatch(
            latents=start + factor * (end - start),
            timesteps=onto(scheduler.timesteps[places], latents.device),
            target=end - start,
            weights=compute_loss_weighting_for_sd3(scheme, levels).float(),
        )

    def _ddpm(self, latents: Tensor, noise: Tensor, generators: Sequence[torch.Generator]) -> NoisyBatch:
        """Uniform timesteps of DDPM: the target is the noise, the latents, or the velocity between them."""
        from diffusers.training_utils import compute_snr

        scheduler, gamma = self.scheduler, self._config.snr_gamma
        steps = scheduler.config["num_train_timesteps"]
        timesteps = torch.cat([torch.randint(steps, (1,), generator=one) for one in generators])
        timesteps = onto(timesteps, latents.device)
        weights = torch.ones(len(latents), device=latents.device)
        if gamma is not None:
            snr = compute_snr(scheduler, timesteps)
            # min(snr, gamma) / snr, also for a schedule that ends in pure noise, where snr is 0.
            others = snr.clamp(max=gamma) / (snr + 1 if self.kind == "v_prediction" else 1)
            weights = (gamma / snr).clamp(max=1) if self.kind == "epsilon" else others
        target = {"epsilon": noise, "sample": latents}.get(self.kind)
        target = scheduler.get_velocity(latents, noise, timesteps) if target is None else target
        return NoisyBatch(scheduler.add_noise(latents, noise, timesteps), timesteps, target, weights.float())


def _tables(scheduler: Any) -> tuple[Any, bool]:
    """A new scheduler with the noise levels of training, and whether they are those of rectified flow.

    Sampling changes a scheduler's tables, and solvers have tables that are for nothing else: `add_noise` of a
    DPM-Solver that samples nothing yet takes its noise levels from the wrong end.
    """
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    config = scheduler.config
    if "FlowMatch" in type(scheduler).__name__:
        # Its own tables, also of a class outside diffusers.
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
    tables: Any = DDPMScheduler.from_config(config)
    own = getattr(type(scheduler).from_config(config), "alphas_cumprod", None)
    if isinstance(own, Tensor) and own.shape == tables.alphas_cumprod.shape:
        # CogVideoX shifts its levels of noise, by settings that DDPM does not have.
        tables.alphas_cumprod = own
    return tables, False


class NoiseTables:
    """The noise levels and the target of training at single moments, as the objective has them."""

    def __init__(self, scheduler: Any, config: TrainConfig) -> None:
        objective = NoiseObjective(scheduler, config)
        self._kind, self._scheduler = objective.kind, objective.scheduler
        self._inverted = bool(self._scheduler.config.get("invert_sigmas"))

    def noise_of(self, noisy: Tensor, clean: Tensor, timestep: float) -> Tensor:
        """The noise that has made ``clean`` latents noisy, at the scheduler's timestep."""
        clean_share, noise_share = self._shares(timestep)
        return (noisy - clean_share * clean) / max(noise_share, 1e-6)

    def noisy_of(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
        """Noisy latents at the scheduler's timestep."""
        clean_share, noise_share = self._shares(timestep)
        return clean_share * clean + noise_share * noise

    def target_of(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
        """The target of the transformer's prediction."""
        if self._kind == "flow":
            return clean - noise if self._inverted else noise - clean
        clean_share, noise_share = self._shares(timestep)
        velocity = clean_share * noise - noise_share * clean
        return {"epsilon": noise, "sample": clean}.get(self._kind, velocity)

    def _shares(self, timestep: float) -> tuple[float, float]:
        if self._kind == "flow":
            times, levels = self._scheduler.timesteps.double(), self._scheduler.sigmas.double()
            order = times.argsort()
            level = float(np.interp(timestep, times[order].cpu().numpy(), levels[order].cpu().numpy()))
            return (level, 1 - level) if self._inverted else (1 - level, level)
        alphas = self._scheduler.alphas_cumprod.double().cpu().numpy()
        alpha = float(np.interp(timestep, np.arange(len(alphas)), alphas))
        return alpha**0.5, (1 - alpha) ** 0.5


def sample_losses(prediction: Tensor, noised: NoisyBatch, mask: Tensor | None = None) -> Tensor:
    """(B,) weighted mean squared errors, in float32.

    Args:
        prediction: (B, C, ...) of the transformer.
        noised: with the target.
        mask: how much each latent counts, (B, 1, ...), with a mean of one over a sample.
    """
    errors = (prediction.float() - noised.target.float()).square()
    if mask is not None:
        errors = errors * mask
    return errors.flatten(1).mean(1) * noised.weights
