"""The noise that a sampler leaves in the latents, step by step."""

from __future__ import annotations

from typing import Any


def noise_levels(scheduler: Any) -> tuple[float, ...] | None:
    """Share of noise σ at every evaluation that a diffusers scheduler has ahead, and 0 after the last.

    Latents are (1 - σ) · image + σ · noise, up to a factor: rectified flow (Liu et al. 2022, arXiv:2209.03003) as
    it stands; a · image + s · noise (DDPM) with σ = s / (a + s); image + s · noise (Karras et al. 2022,
    arXiv:2206.00364) with σ = s / (1 + s).

    Returns one more than there are evaluations; evenly spaced where the scheduler does not say how much noise there is;
    None for a scheduler that has no timesteps.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None:
        return None
    # Image-to-image begins later in the list.
    begin = getattr(scheduler, "begin_index", None) or 0
    count = len(timesteps) - begin
    if count < 1:
        return None
    settings = getattr(scheduler, "config", {})
    cumulative = getattr(scheduler, "alphas_cumprod", None)
    sigmas = getattr(scheduler, "sigmas", None)
    flow = settings.get("use_flow_sigmas") or "FlowMatch" in type(scheduler).__name__
    if sigmas is not None and len(sigmas) >= len(timesteps) and (flow or cumulative is None):
        values = [float(sigma) for sigma in sigmas[begin : len(timesteps)]]
        return (*(values if flow else [value / (1 + value) for value in values]), 0.0)
    if cumulative is not None:
        nearest = [min(max(round(float(t)), 0), len(cumulative) - 1) for t in timesteps[begin:]]
        pairs = [(float(cumulative[t]) ** 0.5, (1 - float(cumulative[t])) ** 0.5) for t in nearest]
        return (*(s / (a + s) for a, s in pairs), 0.0)
    return even_levels(count)


def even_levels(steps: int) -> tuple[float, ...]:
    """Levels of ``steps`` steps that all take away the same share of noise."""
    return tuple(1 - step / steps for step in range(steps + 1))
