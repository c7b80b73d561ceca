"""The loop of reinforcement learning: draw samples, reward them, follow the rewards.

A step of the run is a rollout with its updates of the weights. All of it follows from the weights, the seed and the
number of the step, so that a step that was killed in the middle is done again when the run is resumed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import torch
from torch import Tensor

from ...core.digests import digest
from ...errors import ConfigError, InputError
from ..data.order import DrawnSample, MicroBatch, SampleOrder, shares
from ..data.samples import DataReport
from ..first_rank import on_first
from ..logs import TrainingLog
from ..observed.family import check_observable
from ..preflight import prompts_of
from ..trainer import Outcome, StepNumbers, Trainer, Validate
from ..uneven import uneven_work
from .policy import advantages, clipped_losses, ratios
from .rewards import RewardError, Rewards
from .rollouts import Rollout, Rollouts, seed_of, without_adapters
from .steps import NormalStep, sampler_for

logger = logging.getLogger(__name__)

# The measures of an update: of the last one the maximum over all samples and trained steps, of the others the mean.
MEASURES = ("loss", "ratio", "clip_fraction", "kl", "log_probability_difference")


class ReinforcementTrainer(Trainer):
    """Trains a pipeline's transformer towards rewards of what the pipeline draws; see `Trainer`."""

    def _observe(self) -> None:
        config, pipe = self.config, self.pipe
        assert config.reinforce is not None
        check_observable(type(pipe))
        sampler_for(config.objective, pipe.scheduler)
        self._settings, self.rewards = config.reinforce, Rewards(config.reinforce.rewards)
        self.rollouts = Rollouts(pipe, config, self.device)
        self._notes: list[str] = []
        self._unrated: list[str] = []

    def _prepare(self) -> None:
        super()._prepare()
        for module in self.trained.values():
            # As in the rollout: nothing is dropped.
            module.eval()

    def _prepare_data(self) -> None:
        settings, config = self._settings, self.config
        self.prompts: Sequence[str] = on_first(self.mesh.world, lambda: prompts_of(settings))
        # Groups in an endless row of permutations of the prompts.
        self._order = SampleOrder([(1, 1)] * len(self.prompts), config.seed, 1, settings.groups)
        self.steps, self.digest = config.optimizer.max_train_steps or 0, digest(tuple(self.prompts))
        words = f"{settings.groups} groups of {settings.group_size} samples in a step, of {len(self.prompts)} prompts"
        self.report = DataReport((words,), odd=False)

    @property
    def draws_from_images(self) -> bool:
        return False

    def _begin(self) -> None:
        pass

    def _end(self, outcome: Outcome) -> None:
        outcome.notes += self._notes

    def _encoders(self) -> AbstractContextManager[None]:
        return nullcontext()

    # --- a step ------------------------------------------------------------------------------------------

    def _take_step(self, outcome: Outcome) -> StepNumbers:
        seconds = {"rollout_seconds": -time.perf_counter()}
        self.rollouts.forget()
        groups = [micro.samples[0] for micro in self._order.step(self.step)]
        micros, trained = self._micro_batches(groups), self._trained_steps()
        by_rank = shares(micros, self.parallel.speeds.values, equal_counts=self.config.model.sharding == "fsdp")
        drawn: dict[int, Rollout] = {}
        for number in by_rank[self.mesh.data.rank]:
            with self.parallel.speeds.measured(micros[number].cost):
                drawn[number] = self._drawn(micros[number], trained)
        self.parallel.speeds.agree()
        seconds["rollout_seconds"] += (now := time.perf_counter())
        scores, rewards = self._scores(outcome, groups, micros, drawn)
        seconds["reward_seconds"] = (later := time.perf_counter()) - now
        kept = ~np.isnan(rewards).any(1)
        better = np.where(kept[:, None], advantages(np.where(kept[:, None], rewards, 0.0)), 0.0)
        # Of groups that are left out nothing counts, and of the others as much as if they were all.
        counted = np.broadcast_to(kept[:, None] / max(kept.mean(), 1e-9), rewards.shape)
        updates: list[dict[str, float]] = []
        norm = 0.0
        for _ in range(self._settings.epochs if kept.any() else 0):
            updates.append(self._update(micros, by_rank, drawn, trained, np.stack([better, counted])))
            norm = self.update.apply(self.parallel.sync, self.step + 1)
        seconds["update_seconds"] = time.perf_counter() - later
        means = {name: float(np.mean([update[name] for update in updates] or [math.nan])) for name in MEASURES}
        if updates:
            # Of the update before which the weights were those of the rollout.
            means[MEASURES[-1]] = updates[0][MEASURES[-1]]
        loss = means.pop("loss")
        if self._settings.kl_weight is None:
            means.pop("kl")
        numbers = _rewards_of(scores, rewards, kept) | means | {"skipped_groups": float((~kept).sum())} | seconds
        return StepNumbers(loss if updates else 0.0, norm, sum(micro.count for micro in micros), numbers)

    def _micro_batches(self, groups: Sequence[DrawnSample]) -> list[MicroBatch]:
        """The samples of a step, those of a call together; in reproducible mode each by itself."""
        size = self._settings.group_size
        together = 1 if self.config.in_order else self.config.optimizer.train_batch_size
        micros = []
        for group in groups:
            samples = tuple(DrawnSample(group.index, group.number * size + place) for place in range(size))
            micros += [MicroBatch(samples[at : at + together], (1, 1)) for at in range(0, size, together)]
        return micros

    def _trained_steps(self) -> list[int]:
        """The denoising steps that are trained in this step of the run, ascending."""
        wanted, last = self._settings.trained_steps, self._settings.inference_steps - 1
        if isinstance(wanted, tuple):
            return sorted({*wanted})
        order = np.random.default_rng(seed_of(self.config.seed, "steps", self.step)).permutation(last)
        return sorted(int(number) for number in order[: wanted or last])

    def _drawn(self, micro: MicroBatch, trained: Sequence[int]) -> Rollout:
        rollout = self.rollouts.draw(micro, self.prompts[micro.samples[0].index], trained)
        if self._settings.kl_weight is not None:

            def keep(step: NormalStep) -> None:
                rollout.means[step.number] = step.mean

            with torch.no_grad(), without_adapters(self.model):
                self.rollouts.repeat(rollout, trained, keep, lambda: self.model)
        return rollout

    # --- rewards -----------------------------------------------------------------------------------------

    def _scores(
        self,
        outcome: Outcome,
        groups: Sequence[DrawnSample],
        micros: Sequence[MicroBatch],
        drawn: Mapping[int, Rollout],
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """(G, n) of each reward, and of their sum; NaN in groups whose reward failed. Collective.

        Raises `InputError`: a reward failed, and the run is to stop then.
        """
        pictures: dict[int, np.ndarray] = {}
        for part in self.mesh.data.all_gather_object({number: rollout.images for number, rollout in drawn.items()}):
            pictures |= part
        per_group = len(micros) // len(groups)
        batches = []
        for place, group in enumerate(groups):
            images = [pictures[number] for number in range(place * per_group, (place + 1) * per_group)]
            batches.append((np.concatenate(images), [self.prompts[group.index]] * self._settings.group_size))
        scores, failures = self._rewarded(batches)
        for sentence in failures.values():
            self._fail(f"step {self.step + 1}: {sentence}", outcome)
        return scores

    def _rewarded(
        self, batches: Sequence[tuple[np.ndarray, list[str]]]
    ) -> tuple[tuple[dict[str, np.ndarray], np.ndarray], dict[int, str]]:
        """Rewards of batches, each computed by one of all ranks, and sentences of those that failed. Collective."""
        world = self.mesh.world
        scored: dict[int, tuple[dict[str, np.ndarray], np.ndarray]] = {}
        failures: dict[int, str] = {}
        with uneven_work(self.mesh, "rewarding samples") as advance:
            for number in range(world.rank, len(batches), world.size):
                advance(number, len(batches))
                try:
                    scores = self.rewards(*batches[number])
                    scored[number] = scores, self.rewards.total(scores)
                except RewardError as error:
                    failures[number] = str(error)
        for others, failed in world.all_gather_object((scored, failures)):
            scored, failures = scored | others, failures | failed
        names = list(next(iter(scored.values()))[0]) if scored else []
        blank = [np.full(len(prompts), math.nan) for _, prompts in batches]
        each = {
            name: np.stack([scored[n][0][name] if n in scored else b for n, b in enumerate(blank)]) for name in names
        }
        total = np.stack([scored[n][1] if n in scored else b for n, b in enumerate(blank)])
        return (each, total), dict(sorted(failures.items()))

    def _fail(self, sentence: str, outcome: Outcome) -> None:
        """Stop, or note that a group is left out, as configured. Collective."""
        if self._settings.on_reward_failure == "stop":
            if self.step:
                self._save(outcome)
            raise InputError(
                f"{sentence}; no weight was changed by this step: mend the reward and --resume, or use "
                "on_reward_failure: skip"
            )
        self._notes.append(f"{sentence}; its group was left out")
        if self.speaks:
            logger.warning("%s; its group is left out", sentence)

    def _validate(self, validate: Validate | None, log: TrainingLog | None) -> None:
        super()._validate(validate, log)
        for sentence in self._unrated:
            self._fail(f"validation after step {self.step}: {sentence}", Outcome())
        self._unrated = []

    def rated(self, prompts: Sequence[str], pictures: np.ndarray) -> dict[str, float]:
        """The mean rewards of validation images; NaN if they failed. Collective."""
        (scores, total), failures = self._rewarded([(pictures, [*prompts])])
        self._unrated = [*failures.values()]
        each = {f"reward_{name}": float(score.mean()) for name, score in scores.items()}
        return {f"validation_{name}": value for name, value in ({"reward": float(total.mean())} | each).items()}

    # --- the update --------------------------------------------------------------------------------------

    def _update(
        self,
        micros: Sequence[MicroBatch],
        by_rank: Sequence[Sequence[int]],
        drawn: Mapping[int, Rollout],
        trained: Sequence[int],
        weights: np.ndarray,
    ) -> dict[str, float]:
        """Leave the gradients of all samples and trained steps in the weights; returns `MEASURES`. Collective.

        ``weights``: (2, G, n), the advantage of every sample, and how much it counts.
        """
        sync, mine, count = self.parallel.sync, by_rank[self.mesh.data.rank], len(micros) * len(trained)
        counts = [micro.count for micro in micros]
        parts = torch.as_tensor(weights.reshape(2, -1), dtype=torch.float32).split(counts, 1)
        samples = sum(counts) * len(trained)
        table = torch.zeros(len(MEASURES), count, dtype=torch.float64, device=self.device)
        for number in mine:
            rollout, weight = drawn[number], parts[number].to(self.device)
            places = {step: number * len(trained) + place for place, step in enumerate(trained)}
            with ExitStack() as accumulating:

                def begin(step: int, places: dict[int, int] = places, stack: ExitStack = accumulating) -> None:
                    is_last = places[step] == mine[-1] * len(trained) + len(trained) - 1
                    stack.enter_context(sync.accumulating(places[step], count, is_last))

                def visit(
                    step: NormalStep,
                    places: dict[int, int] = places,
                    stack: ExitStack = accumulating,
                    rollout: Rollout = rollout,
                    weight: Tensor = weight,
                ) -> None:
                    losses, sums = self._losses_of(step, rollout, weight)
                    if not losses.requires_grad:
                        raise ConfigError(
                            f"{type(self.pipe).__name__} records no gradient in step {step.number} of its loop; use "
                            "other reinforce.trained_steps, or objective: denoising"
                        )
                    (losses.sum() * (sync.share / samples)).backward()
                    stack.close()
                    table[:, places[step.number]] = sums

                with torch.enable_grad():
                    self.rollouts.repeat(rollout, trained, visit, lambda: sync.transformer, begin)
        per = range(len(trained))
        sync.reduce([[number * len(trained) + place for number in numbers for place in per] for numbers in by_rank])
        # Each column is one rank's; the zeros of the others change no bit of it.
        table = self.mesh.data.all_reduce(table).cpu()
        means = (table.sum(1) / samples).tolist()
        measures = dict(zip(MEASURES, means, strict=True)) | {MEASURES[-1]: float(table[-1].max())}
        if not math.isfinite(measures["loss"]):
            raise FloatingPointError(self.update.unchanged(f"the loss of step {self.step + 1} is {measures['loss']}"))
        return measures

    def _losses_of(self, step: NormalStep, rollout: Rollout, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) losses of a step, and `MEASURES` of it: sums over the samples, and a maximum."""
        before = rollout.log_probabilities[step.number]
        now = step.log_probability(rollout.after[step.number])
        ratio, clip = ratios(now, before), self._settings.clip_range
        losses = clipped_losses(ratio, weight[0], clip)
        divergence = torch.zeros_like(losses)
        if self._settings.kl_weight is not None:
            divergence = step.divergence(rollout.means[step.number])
            losses = losses + self._settings.kl_weight * divergence
        losses, clipped = losses * weight[1], ((ratio - 1).abs() > clip).float()
        sums = [losses.detach().double().sum()]
        sums += [(values.detach() * weight[1]).double().sum() for values in (ratio, clipped, divergence)]
        return losses, torch.stack([*sums, (now - before).detach().abs().max().double()])


def _rewards_of(scores: Mapping[str, np.ndarray], rewards: np.ndarray, kept: np.ndarray) -> dict[str, float]:
    """Mean and deviation of the summed rewards (G, n) of groups that count, and the mean of each reward, by name."""
    values = {"reward": rewards, **{f"reward_{name}": score for name, score in scores.items()}}
    means = {name: float(value[kept].mean()) if kept.any() else math.nan for name, value in values.items()}
    return {"reward": means.pop("reward"), "reward_std": float(rewards[kept].std()) if kept.any() else math.nan} | means
