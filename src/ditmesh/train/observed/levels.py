"""Noise levels of pipelines that scale the sampler's sample before the transformer sees it.

Some samplers add noise without making the latents less: their sample is ``latents + sigma * noise``, of which the
transformer is given a multiple. With ``1 / (1 + sigma)`` its input is that of rectified flow at the level
``sigma / (1 + sigma)``, with ``1 / sqrt(1 + sigma ** 2)`` that of DDPM, from where the networks of Karras et al. (2022,
arXiv:2206.00364, section 5) predict the velocity of Salimans and Ho (2022, arXiv:2202.00512). Neither is believed: the
round trip (see `recipe`) tries both in the pipeline's own loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Levels of the table that training draws from. Their logarithms, relative to the latents' deviation, are distributed
# normally, as are those of rectified flow's logit-normal levels (Esser et al. 2024, arXiv:2403.03206).
TABLE_LEVELS = 1000
# Tables with fewer levels are not those of training.
MIN_LEVELS = 100
# The share of levels that are distributed evenly, so that all of the sampler's are among them.
EVEN = 0.1


@dataclass(frozen=True)
class Levels:
    """The rules by which the sampler's sample becomes the transformer's input in training.

    Attributes:
        kind: ``"flow"``, ``"velocity"``, ``"scaled"``, which has the scheduler's own timesteps, or ``"counted"``, of
            which samples are as in training and timesteps are multiples.
        data: the latents' deviation for the sampler; of ``"counted"``, timesteps of training in one of the sampler.
        sign: of the transformer's result, as training has it.
        scheduler: of training.
        log_sigmas: of ``"velocity"``: logarithms of the levels of training by timestep, ascending.
    """

    kind: str
    data: float
    sign: float
    scheduler: Any
    log_sigmas: Any = None

    def factor(self, sigma: float) -> float:
        """The factor for a sample at a level."""
        if self.kind == "counted":
            return 1.0
        return 1 / (1 + sigma) if self.kind == "flow" else 1 / float(np.hypot(self.data, sigma))

    def timestep(self, own: float, sigma: float) -> float:
        """The timestep of training, by the sampler's own and its level."""
        if self.kind == "scaled":
            return own
        if self.kind == "counted":
            return own * self.data
        if self.kind == "flow":
            return float(self.scheduler.config.num_train_timesteps) * sigma / (1 + sigma)
        return float(np.interp(np.log(max(sigma, 1e-9)), self.log_sigmas, np.arange(TABLE_LEVELS)))


def levels_of(scheduler: Any) -> Levels | None:
    """The levels of a pipeline's scheduler; None: its samples are as training has them."""
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    config = scheduler.config
    if "sigma_data" in config and hasattr(scheduler, "precondition_outputs"):
        return _velocity(scheduler)
    is_unbounded = bool(config.get("use_karras_sigmas")) and (config.get("sigma_max") or 0.0) > 1
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) and is_unbounded:
        flow = FlowMatchEulerDiscreteScheduler(num_train_timesteps=config["num_train_timesteps"])
        return Levels("flow", 1.0, 1.0, flow)
    if type(scheduler).__name__ == "FlowMapEulerDiscreteScheduler":
        # A map from any time to any other: from a time to itself it is the flow.
        flow = FlowMatchEulerDiscreteScheduler(config["num_train_timesteps"], shift=config["shift"])
        return Levels("counted", 1.0, 1.0, flow)
    if "FlowMatch" in type(scheduler).__name__ and config["num_train_timesteps"] < MIN_LEVELS:
        # A scheduler that counts time from 0 to 1 has a table of one level.
        finer = type(scheduler).from_config(config, num_train_timesteps=TABLE_LEVELS)
        return Levels("counted", TABLE_LEVELS / config["num_train_timesteps"], 1.0, finer)
    if "beta_schedule" in config and not config.get("use_flow_sigmas") and hasattr(scheduler, "sigmas"):
        fresh: Any = type(scheduler).from_config(config)
        fresh.set_timesteps(4)
        if float(fresh.init_noise_sigma) > 1.01:
            return Levels("scaled", 1.0, 1.0, scheduler)
    return None


def _velocity(scheduler: Any) -> Levels:
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

    config = scheduler.config
    data = float(config["sigma_data"])
    lowest, highest = np.log(config["sigma_min"]), np.log(config["sigma_max"])
    grid = np.linspace(lowest, highest, 100 * TABLE_LEVELS)
    density = (1 - EVEN) * np.exp(-0.5 * (grid - np.log(data)) ** 2) / np.sqrt(2 * np.pi) + EVEN / (highest - lowest)
    share = np.cumsum(density)
    log_sigmas = np.interp(np.linspace(0, 1, TABLE_LEVELS), (share - share[0]) / (share[-1] - share[0]), grid)
    alphas = data**2 / (data**2 + np.exp(2 * log_sigmas))
    betas = 1 - alphas / np.concatenate([[1.0], alphas[:-1]])
    tables = DDPMScheduler(
        num_train_timesteps=TABLE_LEVELS, trained_betas=betas.astype(np.float64), prediction_type="v_prediction"
    )
    sign = -1.0 if config.get("prediction_type", "epsilon") == "epsilon" else 1.0
    return Levels("velocity", data, sign, tables, log_sigmas)
