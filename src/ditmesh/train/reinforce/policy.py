"""Advantages of samples over their groups, and the clipped loss of their probabilities."""

from __future__ import annotations

import numpy as np
from torch import Tensor

# Beside the deviation of a group's rewards, as in Flow-GRPO's program.
EPSILON = 1e-4


def advantages(rewards: np.ndarray) -> np.ndarray:
    """(G, n): how much better each of a group's n samples is than the group, in deviations of the group's rewards."""
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + EPSILON)


def ratios(now: Tensor, before: Tensor) -> Tensor:
    """(B,): how much more probable samples are now, by logarithms of probabilities."""
    return (now - before).exp()


def clipped_losses(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """(B,): the losses of proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347, equation 7)."""
    return -(ratio * advantage).minimum(ratio.clamp(1 - clip, 1 + clip) * advantage)
