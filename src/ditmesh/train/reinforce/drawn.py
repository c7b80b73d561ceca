"""The loop of runs that learn from samples which the pipeline draws: by rewards, or from the model itself.

A step of the run is a rollout with its updates of the weights. All of it follows from the weights, the seed and the
number of the step, so that a step that was killed in the middle is done again when the run is resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...core.digests import digest
from ...errors import ConfigError
from ..data.order import DrawnSample, MicroBatch, SampleOrder, shares
from ..data.samples import DataReport
from ..first_rank import on_first
from ..observed.family import check_observable
from ..preflight import prompts_of
from ..trainer import Outcome, Trainer
from .rollouts import Rollout, Rollouts
from .steps import NormalStep, sampler_for


@dataclass(frozen=True)
class RolloutSamples:
    """The samples of a step: micro-batches, those of each data rank, trained steps, this rank's rollouts by number."""

    micros: Sequence[MicroBatch]
    by_rank: Sequence[Sequence[int]]
    trained: Sequence[int]
    rollouts: Mapping[int, Rollout]


class DrawnTrainer(Trainer):
    """Trains a pipeline's transformer on samples that the pipeline draws in each step; see `Trainer`.

    Attributes:
        measures: of a sample and trained step, as `_losses_of` returns them; the loss is the first.
    """

    measures: tuple[str, ...] = ("loss",)

    def _observe(self) -> None:
        check_observable(type(self.pipe))
        sampler_for(self.config.objective, self.pipe.scheduler)
        self.rollouts = Rollouts(self.pipe, self.config, self.device)

    def _prepare(self) -> None:
        super()._prepare()
        for module in self.trained.values():
            # As in validation: nothing is dropped.
            module.eval()

    def _prepare_data(self) -> None:
        self.steps, (size, groups) = self.config.optimizer.max_train_steps or 0, self.config.drawn_samples
        self.prompts = on_first(self.mesh.world, lambda: prompts_of(self.config))
        self.digest = digest(self.prompts)
        # Groups in an endless row of permutations of the prompts.
        self._order = SampleOrder([(1, 1)] * len(self.prompts), self.config.seed, 1, groups)
        words = f"{groups} groups of {size} samples" if size > 1 else f"{groups} samples"
        words += f" in a step, of {len(self.prompts)} prompts"
        self.report, self.draws_from_images = DataReport((words,), odd=False), False

    def _begin(self) -> None:
        pass

    def _end(self, outcome: Outcome) -> None:
        pass

    def _encoders(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _groups(self) -> list[DrawnSample]:
        """A sample of each group of the step, by which its prompt and noise are known."""
        return [micro.samples[0] for micro in self._order.step(self.step)]

    def _calls(self, samples: Sequence[DrawnSample]) -> list[MicroBatch]:
        """Samples in calls of the pipeline; in reproducible mode each by itself."""
        together = 1 if self.config.in_order else self.config.optimizer.train_batch_size
        return [MicroBatch(tuple(samples[at : at + together]), (1, 1)) for at in range(0, len(samples), together)]

    def _draw(self, micros: Sequence[MicroBatch], trained: Sequence[int]) -> RolloutSamples:
        """Draw this rank's share of a step's samples. Collective."""
        self.rollouts.prompts = {}
        by_rank = shares(micros, self.parallel.speeds.values, equal_counts=self.config.model.sharding == "fsdp")
        rollouts: dict[int, Rollout] = {}
        for number in by_rank[self.mesh.data.rank]:
            with self.parallel.speeds.measured(micros[number].cost):
                prompts = tuple(self.prompts[sample.index] for sample in micros[number].samples)
                rollouts[number] = self._rollout(micros[number], prompts, trained)
        self.parallel.speeds.agree()
        return RolloutSamples(micros, by_rank, trained, rollouts)

    def _rollout(self, micro: MicroBatch, prompts: tuple[str, ...], trained: Sequence[int]) -> Rollout:
        """Draw the samples of a micro-batch."""
        raise NotImplementedError

    def _losses_of(self, step: NormalStep, rollout: Rollout, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) losses of a step, and its `measures`: sums over the samples, or a maximum."""
        raise NotImplementedError

    def _update(self, samples: RolloutSamples, weights: np.ndarray) -> Tensor:
        """Leave the gradients of all samples and trained steps in the weights. Collective.

        Args:
            weights: (W, N) numbers of every sample, for `_losses_of`.

        Returns:
            `measures` of every micro-batch and trained step, on the CPU.
        """
        mine, steps = samples.by_rank[self.mesh.data.rank], range(len(samples.trained))
        parts = torch.as_tensor(weights).split([micro.count for micro in samples.micros], 1)
        shape = len(self.measures), len(samples.micros) * len(steps)
        table = torch.zeros(shape, dtype=torch.float64, device=self.device)
        addends = weights.shape[1] * len(steps)
        for number in mine:
            columns = table[:, number * len(steps) :][:, : len(steps)]

            def accumulating(place: int, number: int = number) -> AbstractContextManager[None]:
                is_last = (number, place) == (mine[-1], steps[-1])
                return self.parallel.sync.accumulating(number * len(steps) + place, table.shape[1], is_last)

            weight = parts[number].to(self.device)
            self._backward(samples.rollouts[number], samples.trained, weight, addends, columns, accumulating)
        numbers = [[number * len(steps) + place for number in share for place in steps] for share in samples.by_rank]
        self.parallel.sync.reduce(numbers)
        # Each column is one rank's; the zeros of the others change no bit of it.
        table = self.mesh.data.all_reduce(table).cpu()
        loss = float(table[0].sum() / addends)
        if not math.isfinite(loss):
            raise FloatingPointError(self.update.unchanged(f"the loss of step {self.step + 1} is {loss}"))
        return table

    def _backward(
        self,
        rollout: Rollout,
        trained: Sequence[int],
        weight: Tensor,
        addends: int,
        columns: Tensor,
        accumulating: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Add the gradients of a rollout's trained steps, of so many addends in all, and write down its measures."""
        sync, begun, open_step = self.parallel.sync, set[int](), ExitStack()

        def model(number: int) -> object:
            if number not in begun:
                begun.add(number)
                open_step.enter_context(accumulating(trained.index(number)))
            return sync.transformer

        def visit(step: NormalStep) -> None:
            losses, columns[:, trained.index(step.number)] = self._losses_of(step, rollout, weight)
            if not losses.requires_grad:
                way = "" if self.config.reinforce is None else "other reinforce.trained_steps, or "
                raise ConfigError(
                    f"{type(self.pipe).__name__} records no gradient in step {step.number} of its loop; use "
                    f"{way}objective: denoising"
                )
            (losses.sum() * (sync.share / addends)).backward()
            open_step.close()

        with open_step, torch.enable_grad():
            self.rollouts.repeat(rollout, trained, visit, model)
