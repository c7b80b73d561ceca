"""The loop of reinforcement learning: draw samples, reward them, follow the rewards."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError
from ..data.order import DrawnSample, MicroBatch
from ..first_rank import on_first
from ..logs import TrainingLog, read_log
from ..uneven import uneven_work
from .drawn import DrawnTrainer, RolloutSamples
from .rewards import RewardError, Rewards
from .rollouts import Rollout, seed_of
from .steps import NormalStep

logger = logging.getLogger(__name__)

# The measures of an update: of the last one the maximum over all samples and trained steps, of the others the mean.
MEASURES = ("loss", "ratio", "clip_fraction", "kl", "log_probability_difference")
# Beside the deviation of a group's rewards, as in Flow-GRPO's program.
EPSILON = 1e-4


class ReinforcementTrainer(DrawnTrainer):
    """Trains a pipeline's transformer towards rewards of what the pipeline draws; see `Trainer`."""

    measures = MEASURES

    def _observe(self) -> None:
        assert self.config.reinforce is not None
        super()._observe()
        self._settings, self.rewards = self.config.reinforce, Rewards(self.config.reinforce.rewards)
        self._unjudged: list[str] = []

    # --- a step ------------------------------------------------------------------------------------------

    def _take_step(self) -> tuple[float, float, int, dict[str, float]]:
        settings, moments = self._settings, [time.perf_counter()]
        groups, size = self._groups(), settings.group_size
        samples = [[DrawnSample(group.index, group.number * size + at) for at in range(size)] for group in groups]
        # A call of the pipeline has samples of one group.
        drawn = self._draw([micro for group in samples for micro in self._calls(group)], self._trained_steps())
        moments.append(time.perf_counter())
        scores, count = self._scores(groups, drawn), len(groups)
        moments.append(time.perf_counter())
        weights = np.zeros((2, count, size), np.float32)
        for number, score in scores.items():
            # A group that is left out counts nothing, and the others as much as if it were there.
            weights[:, number] = advantages(score["reward"]), np.full(size, count / len(scores))
        updates, norm = list[dict[str, float]](), 0.0
        for _ in range(settings.epochs if scores else 0):
            table = self._update(drawn, weights.reshape(2, -1))
            means = table.sum(1) / (count * size * len(drawn.trained))
            # Of the last one the maximum.
            updates.append(dict(zip(MEASURES, [*means[:-1].tolist(), float(table[-1].max())], strict=True)))
            norm = self.update.apply(self.parallel.sync, self.step + 1)
        moments.append(time.perf_counter())
        numbers = {name: float(np.mean([update[name] for update in updates] or math.nan)) for name in MEASURES}
        # Of the update before which the weights were those of the rollout.
        numbers[MEASURES[-1]] = updates[0][MEASURES[-1]] if updates else math.nan
        loss = numbers.pop("loss") if updates else 0.0
        if settings.kl_weight is None:
            numbers.pop("kl")
        numbers = _means_of(list(scores.values())) | numbers | {"skipped_groups": float(count - len(scores))}
        seconds = zip(("rollout_seconds", "reward_seconds", "update_seconds"), np.diff(moments).tolist(), strict=True)
        return loss, norm, count * size, numbers | dict(seconds)

    def _trained_steps(self) -> list[int]:
        settings, last = self._settings, self._settings.inference_steps - 1
        trained = settings.trained_steps
        if not isinstance(trained, tuple):
            order = np.random.default_rng(seed_of(self.config.seed, "steps", self.step)).permutation(last)
            trained = [int(number) for number in order[: trained or last]]
        return sorted({*trained})

    def _rollout(self, micro: MicroBatch, prompts: tuple[str, ...], trained: Sequence[int]) -> Rollout:
        rollout = self.rollouts.draw(micro, prompts, trained)
        if self._settings.kl_weight is not None:
            self.rollouts.keep_means(rollout, trained, self.model)
        return rollout

    # --- rewards -----------------------------------------------------------------------------------------

    def _scores(self, groups: Sequence[DrawnSample], samples: RolloutSamples) -> dict[int, dict[str, np.ndarray]]:
        """The rewards of every group, by its number in the step; without those that failed. Collective."""
        pictures: dict[int, np.ndarray] = {}
        for part in self.mesh.data.all_gather_object({n: rollout.images for n, rollout in samples.rollouts.items()}):
            pictures |= part
        calls, batches = len(samples.micros) // len(groups), list[tuple[np.ndarray, list[str]]]()
        for place, group in enumerate(groups):
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

    def _losses_of(self, step: NormalStep, rollout: Rollout, weight: Tensor) -> tuple[Tensor, Tensor]:
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
