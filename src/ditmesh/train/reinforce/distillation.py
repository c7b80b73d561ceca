"""Distillation: a LoRA with which the model takes in one step what it takes in several.

The teacher is the model without its LoRA. It draws samples of the prompts in the pipeline's own loop, in
`teacher_steps` steps for each of the student's and with guidance, and the student learns to arrive where the teacher
did: progressive distillation (Salimans and Ho 2022, arXiv:2202.00512) of guided samples (Meng et al. 2023,
arXiv:2210.03142), on the teacher's own path from noise, so that no images are needed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..data.order import MicroBatch
from .drawn import DrawnTrainer
from .rollouts import Rollout
from .steps import NormalStep


class DistillationTrainer(DrawnTrainer):
    """Trains a LoRA of a pipeline's transformer to draw in few steps, without guidance; see `Trainer`."""

    def _take_step(self) -> tuple[float, float, int, dict[str, float]]:
        assert self.config.distill is not None
        moments, (_, count) = [time.perf_counter()], self.config.drawn_samples
        samples = self._draw(self._calls(self._groups()), range(self.config.distill.inference_steps))
        moments.append(time.perf_counter())
        loss = float(self._update(samples, np.zeros((1, count))).sum()) / (count * len(samples.trained))
        norm = self.update.apply(self.parallel.sync, self.step + 1)
        moments.append(time.perf_counter())
        seconds = zip(("rollout_seconds", "update_seconds"), np.diff(moments).tolist(), strict=True)
        return loss, norm, count, dict(seconds)

    def _rollout(self, micro: MicroBatch, prompts: tuple[str, ...], trained: Sequence[int]) -> Rollout:
        assert self.config.distill is not None
        return self.rollouts.teach(micro, prompts, self.model, self.config.distill)

    def _losses_of(self, step: NormalStep, rollout: Rollout, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distances from where the teacher arrived, of the squared length of its way."""
        wanted = rollout.after[step.number].float()
        distance, way = ((wanted - start).square().flatten(1).mean(1) for start in (step.mean, step.before.float()))
        losses = distance / way
        return losses, losses.detach().double().sum()[None]
