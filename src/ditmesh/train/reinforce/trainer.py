"""The loop of reinforcement learning: draw samples, reward them, follow the rewards.

A step of the run is a rollout with its updates of the weights. All of it follows from the weights, the seed and the
number of the step, so that a step that was killed in the middle is done again when the run is resumed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.digests import digest
from ...errors import ConfigError, InputError
from ..data.order import DrawnSample, MicroBatch, SampleOrder, shares
from ..data.samples import DataReport
from ..first_rank import on_first
from ..logs import TrainingLog, read_log
from ..observed.family import check_observable
from ..preflight import prompts_of
from ..trainer import Outcome, Trainer
from ..uneven import uneven_work
from .rewards import RewardError, Rewards
from .rollouts import Rollout, Rollouts, seed_of
from .steps import NormalStep, sampler_for

logger = logging.getLogger(__name__)

# The measures of an update: of the last one the maximum over all samples and trained steps, of the others the mean.
MEASURES = ("loss", "ratio", "clip_fraction", "kl", "log_probability_difference")
# Beside the deviation of a group's rewards, as in Flow-GRPO's program.
EPSILON = 1e-4


@dataclass(frozen=True)
class _Samples:
    """The samples of a step: groups and micro-batches, those of each data rank, trained steps, this rank's rollouts."""

    groups: Sequence[DrawnSample]
    micros: Sequence[MicroBatch]
    by_rank: Sequence[Sequence[int]]
    trained: Sequence[int]
    rollouts: Mapping[int, Rollout]


class ReinforcementTrainer(Trainer):
    """Trains a pipeline's transformer towards rewards of what the pipeline draws; see `Trainer`."""

    def _observe(self) -> None:
        assert self.config.reinforce is not None
        check_observable(type(self.pipe))
        sampler_for(self.config.objective, self.pipe.scheduler)
        self._settings, self.rewards = self.config.reinforce, Rewards(self.config.reinforce.rewards)
        self.rollouts = Rollouts(self.pipe, self.config, self.device)
        self._unjudged: list[str] = []

    def _prepare(self) -> None:
        super()._prepare()
        for module in self.trained.values():
            # As in validation: nothing is dropped.
            module.eval()

    def _prepare_data(self) -> None:
        settings, self.steps = self._settings, self.config.optimizer.max_train_steps or 0
        self.prompts = on_first(self.mesh.world, lambda: prompts_of(settings))
        self.digest = digest(self.prompts)
        # Groups in an endless row of permutations of the prompts.
        self._order = SampleOrder([(1, 1)] * len(self.prompts), self.config.seed, 1, settings.groups)
        words = f"{settings.groups} groups of {settings.group_size} samples in a step, of {len(self.prompts)} prompts"
        self.report, self.draws_from_images = DataReport((words,), odd=False), False

    def _begin(self) -> None:
        pass

    def _end(self, outcome: Outcome) -> None:
        pass

    def _encoders(self) -> AbstractContextManager[None]:
        return nullcontext()

    # --- a step ------------------------------------------------------------------------------------------

    def _take_step(self) -> tuple[float, float, int, dict[str, float]]:
        moments = [time.perf_counter()]
        samples = self._draw()
        moments.append(time.perf_counter())
        scores, size, count = self._scores(samples), self._settings.group_size, len(samples.groups)
        moments.append(time.perf_counter())
        weights = np.zeros((2, count, size), np.float32)
        for number, score in scores.items():
            # A group that is left out counts nothing, and the others as much as if it were there.
            weights[:, number] = advantages(score["reward"]), np.full(size, count / len(scores))
        updates, norm = list[dict[str, float]](), 0.0
        for _ in range(self._settings.epochs if scores else 0):
            updates.append(self._update(samples, weights))
            norm = self.update.apply(self.parallel.sync, self.step + 1)
        moments.append(time.perf_counter())
        numbers = {name: float(np.mean([update[name] for update in updates] or math.nan)) for name in MEASURES}
        # Of the update before which the weights were those of the rollout.
        numbers[MEASURES[-1]] = updates[0][MEASURES[-1]] if updates else math.nan
        loss = numbers.pop("loss") if updates else 0.0
        if self._settings.kl_weight is None:
            numbers.pop("kl")
        numbers = _means_of(list(scores.values())) | numbers | {"skipped_groups": float(count - len(scores))}
        seconds = zip(("rollout_seconds", "reward_seconds", "update_seconds"), np.diff(moments).tolist(), strict=True)
        return loss, norm, count * size, numbers | dict(seconds)

    def _draw(self) -> _Samples:
        """Draw the samples of a step, those of a call together; in reproducible mode each by itself."""
        settings, self.rollouts.prompts = self._settings, {}
        groups = [micro.samples[0] for micro in self._order.step(self.step)]
        size, together = settings.group_size, 1 if self.config.in_order else self.config.optimizer.train_batch_size
        micros: list[MicroBatch] = []
        for group in groups:
            members = tuple(DrawnSample(group.index, group.number * size + place) for place in range(size))
            micros += [MicroBatch(members[at : at + together], (1, 1)) for at in range(0, size, together)]
        trained, last = settings.trained_steps, settings.inference_steps - 1
        if not isinstance(trained, tuple):
            order = np.random.default_rng(seed_of(self.config.seed, "steps", self.step)).permutation(last)
            trained = [int(number) for number in order[: trained or last]]
        trained = sorted({*trained})
        by_rank = shares(micros, self.parallel.speeds.values, equal_counts=self.config.model.sharding == "fsdp")
        rollouts: dict[int, Rollout] = {}
        for number in by_rank[self.mesh.data.rank]:
            with self.parallel.speeds.measured(micros[number].cost):
                prompt = self.prompts[micros[number].samples[0].index]
                rollouts[number] = rollout = self.rollouts.draw(micros[number], prompt, trained)
                if settings.kl_weight is not None:
                    self.rollouts.keep_means(rollout, trained, self.model)
        self.parallel.speeds.agree()
        return _Samples(groups, micros, by_rank, trained, rollouts)

    # --- rewards -----------------------------------------------------------------------------------------

    def _scores(self, samples: _Samples) -> dict[int, dict[str, np.ndarray]]:
        """The rewards of every group, by its number in the step; without those that failed. Collective."""
        pictures: dict[int, np.ndarray] = {}
        for part in self.mesh.data.all_gather_object({n: rollout.images for n, rollout in samples.rollouts.items()}):
            pictures |= part
        calls, batches = len(samples.micros) // len(samples.groups), list[tuple[np.ndarray, list[str]]]()
        for place, group in enumerate(samples.groups):
            images = np.concatenate([pictures[number] for number in range(place * calls, (place + 1) * calls)])
            batches.append((images, [self.prompts[group.index]] * len(images)))
        scores, failures = self._rewarded(batches)
        self._fail(failures, f"step {self.step + 1}")
        return scores

    def _rewarded(
        self, batches: Sequence[tuple[np.ndarray, list[str]]]
    ) -> tuple[dict[int, dict[str, np.ndarray]], list[str]]:
        """Rewards of batches, each computed by one of all ranks, and sentences about those that failed. Collective."""
        world, scores, failures = self.mesh.world, dict[int, dict[str, np.ndarray]](), dict[int, str]()
        with uneven_work(self.mesh, "rewarding samples") as advance:
            for number in range(world.rank, len(batches), world.size):
                advance(number, len(batches))
                try:
                    each = self.rewards(*batches[number])
                    total = {"reward": self.rewards.total(each)}
                    scores[number] = total | {f"reward_{name}": score for name, score in each.items()}
                except RewardError as error:
                    failures[number] = str(error)
        for others, failed in world.all_gather_object((scores, failures)):
            scores, failures = scores | others, failures | failed
        return dict(sorted(scores.items())), [sentence for _, sentence in sorted(failures.items())]

    def _fail(self, failures: Sequence[str], where: str) -> None:
        """Stop at a reward that failed, or note that its samples are left out, as configured. Collective."""
        for sentence in failures:
            if self._settings.on_reward_failure == "stop":
                problem = self._save() if self.step else None
                saved = f"step {self.step}" if problem is None else f"the newest checkpoint, as {problem}"
                again = f"--resume from {saved}" if self.step else "run again"
                raise InputError(f"{where}: {sentence}; then {again}, or use on_reward_failure: skip")
            self.outcome.notes.append(f"{where}: {sentence}; its samples were left out")
            if self.speaks:
                logger.warning(self.outcome.notes[-1])

    def _validate(self, validate: Callable[[int], Mapping[str, Path] | None] | None, log: TrainingLog | None) -> None:
        super()._validate(validate, log)
        # With the weights that are trained, not with their average.
        failures, self._unjudged = self._unjudged, []
        self._fail(failures, f"validation after step {self.step}")
        patience, file = self._settings.early_stopping_patience, Path(self.config.output_dir) / "validation.csv"
        if patience and self.step < self.end and on_first(self.mesh.world, lambda: has_settled(file, patience)):
            self.end = self.step
            self.outcome.notes.append(f"step {self.step}: early stop, as validation_reward does not rise")
            self._save()

    def judge(self, pictures: np.ndarray) -> None:
        scores, self._unjudged = self._rewarded([(pictures, [*self.config.output.validation_prompts])])
        if self.log is not None and scores:
            means = {f"validation_{name}": float(score.mean()) for name, score in scores[0].items()}
            self.log.add({"step": self.step, **means}, "validation.csv")

    # --- the update --------------------------------------------------------------------------------------

    def _update(self, samples: _Samples, weights: np.ndarray) -> dict[str, float]:
        """Leave the gradients of all samples and trained steps in the weights; returns `MEASURES`. Collective.

        ``weights``: (2, G, n), the advantage of every sample, and how much it counts.
        """
        mine, steps = samples.by_rank[self.mesh.data.rank], range(len(samples.trained))
        parts = torch.as_tensor(weights.reshape(2, -1)).split([micro.count for micro in samples.micros], 1)
        table = torch.zeros(len(MEASURES), len(samples.micros) * len(steps), dtype=torch.float64, device=self.device)
        addends = weights[0].size * len(steps)
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
        measures = dict(zip(MEASURES, (table.sum(1) / addends).tolist(), strict=True))
        if not math.isfinite(measures["loss"]):
            raise FloatingPointError(self.update.unchanged(f"the loss of step {self.step + 1} is {measures['loss']}"))
        return measures | {MEASURES[-1]: float(table[-1].max())}

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

        def model(number: int) -> Any:
            if number not in begun:
                begun.add(number)
                open_step.enter_context(accumulating(trained.index(number)))
            return sync.transformer

        def visit(step: NormalStep) -> None:
            losses, columns[:, trained.index(step.number)] = self._losses_of(step, rollout, weight)
            if not losses.requires_grad:
                raise ConfigError(
                    f"{type(self.pipe).__name__} records no gradient in step {step.number} of its loop; use "
                    "other reinforce.trained_steps, or objective: denoising"
                )
            (losses.sum() * (sync.share / addends)).backward()
            open_step.close()

        with open_step, torch.enable_grad():
            self.rollouts.repeat(rollout, trained, visit, model)

    def _losses_of(self, step: NormalStep, rollout: Rollout, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) losses of a step, and `MEASURES` of it: sums over the samples, and a maximum."""
        before, clip = rollout.log_probabilities[step.number], self._settings.clip_range
        now = step.log_probability(rollout.after[step.number])
        ratio = (now - before).exp()
        losses, divergence = clipped_losses(ratio, weight[0], clip), torch.zeros_like(ratio)
        if self._settings.kl_weight is not None:
            divergence = step.divergence(rollout.means[step.number])
            losses = losses + self._settings.kl_weight * divergence
        values = torch.stack([losses, ratio, ((ratio - 1).abs() > clip).double(), divergence]) * weight[1]
        return values[0], torch.cat([values.detach().sum(1), (now - before).detach().abs().max()[None]])


def advantages(rewards: np.ndarray) -> np.ndarray:
    """(n,): how much better each sample is than its group, in deviations of the group's rewards."""
    return (rewards - rewards.mean()) / (rewards.std() + EPSILON)


def clipped_losses(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """(B,): the losses of proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347, equation 7)."""
    return -(ratio * advantage).minimum(ratio.clamp(1 - clip, 1 + clip) * advantage)


def has_settled(file: Path, patience: int) -> bool:
    """True if the last so many validations of a log have no higher reward than one before them."""
    rewards = [row["validation_reward"] for row in read_log(file)]
    return len(rewards) > patience and max(rewards[-patience:]) <= max(rewards[:-patience])


def _means_of(scores: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Mean and deviation of the rewards of all samples, and the mean of each reward, by name."""
    values = {name: np.stack([score[name] for score in scores]) for name in (scores[0] if scores else ())}
    means = {name: float(value.mean()) for name, value in values.items()}
    deviation = float(values["reward"].std()) if scores else math.nan
    return {"reward": means.pop("reward", math.nan), "reward_std": deviation, **means}
