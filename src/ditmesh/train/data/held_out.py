"""The loss on samples that are not trained on, at fixed noise levels and with fixed noise.

As Esser et al. 2024 (arXiv:2403.03206, section 5.1.2) do, the error is measured at equally spaced noise levels, so that
a curve falls smoothly while that of training jumps with the levels that were drawn. It is not weighted, and so it is
comparable between runs with other noise levels, weights, batches and seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...comm.mesh import Mesh
from ...core.digests import digest
from ...errors import ConfigError, InputError
from ..config import TrainConfig
from ..families import Conditions, Family
from ..objective import NoiseObjective, NoiseTables
from ..uneven import RankProgress
from .agreement import agreed_samples
from .captions import By
from .encoded import EncodedSamples
from .order import DrawnSample, MicroBatch, buckets_of
from .reading import read_samples
from .samples import Sample, Samples

NUM_LEVELS = 8
# Of which the noise levels and the target at any moment are known.
OBJECTIVE_KINDS = ("flow", "epsilon", "v_prediction")

Predict = Callable[[Tensor, Tensor, Conditions], Tensor]


def wants_held_out(config: TrainConfig) -> bool:
    """True if a run measures the loss on samples that it does not train on."""
    return config.validation_data_dir is not None or config.validation_split > 0


def with_held_out(
    found: Samples,
    by: By,
    config: TrainConfig,
    mesh: Mesh,
    show: Callable[[str, list[RankProgress]], None],
) -> tuple[Samples, tuple[Sample, ...]]:
    """The samples to train on, and those to measure the loss on. Collective.

    Args:
        found: the data set, the same on all ranks.
        by: ``"text"`` or ``"label"``.
        config: ``validation_data_dir`` or ``validation_split``.
        show: called with the action and each rank's progress.

    Raises:
        InputError: the folder has no samples, or the split leaves none to train on.
    """
    if config.validation_data_dir is not None:
        there = _measured(config)
        try:
            held = agreed_samples(
                mesh,
                lambda advance: read_samples(there, by, advance),
                lambda ranks: show("reading the held-out data set", ranks),
            )
            held.check(there)
        except InputError as error:
            raise InputError(f"validation_data_dir: {error}") from None
        return found, _first(held.good, config.validation_samples)
    if not config.validation_split:
        return found, ()
    # Class images are not learned.
    own = tuple(one for one in found.good if one.source < len(config.weights))
    count = max(1, round(config.validation_split * len(own)))
    held_out = _first(own, count)
    for number in range(len(config.weights)):
        if not any(one.source == number and one not in held_out for one in own):
            raise InputError(
                f"validation_split={config.validation_split:g} holds {count} of {len(own)} samples out, which leaves "
                "none of a data set to train on; use a smaller one, or validation_data_dir"
            )
    out = {id(one) for one in held_out}
    return replace(found, good=tuple(one for one in found.good if id(one) not in out)), _first(
        held_out, config.validation_samples
    )


def _measured(config: TrainConfig) -> TrainConfig:
    """The settings with which held-out samples are read."""
    if config.validation_data_dir is None:
        return config
    one = {"train_data_dir": config.validation_data_dir, "train_data": (), "class_data_dir": None, "mask_dir": None}
    return config.model_copy(update=one)


def _first(samples: tuple[Sample, ...], count: int) -> tuple[Sample, ...]:
    chosen = sorted(range(len(samples)), key=lambda number: digest(("held out", samples[number].name, number)))
    return tuple(samples[number] for number in sorted(chosen[:count]))


class HeldOutLoss:
    """The mean squared error on held-out samples at `NUM_LEVELS` noise levels, the same on any mesh.

    Args:
        samples: of all ranks alike.
        pipe: the pipeline with its autoencoder and text encoders.
        family: how it is called.

    Raises:
        ConfigError: the noise levels of the objective are not known.
    """

    def __init__(
        self,
        samples: tuple[Sample, ...],
        pipe: Any,
        family: Family,
        config: TrainConfig,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        scheduler = getattr(family, "scheduler", pipe.scheduler)
        objective = NoiseObjective(scheduler, config)
        if objective.kind not in OBJECTIVE_KINDS:
            raise ConfigError(
                f"objective={objective.kind!r} has noise levels that are not known, at which a held-out loss is "
                "measured; leave validation_data_dir and validation_split out"
            )
        self._mesh, self._device, self._count = mesh, device, len(samples)
        self._tables = NoiseTables(scheduler, config)
        bounds = getattr(family, "moments_of_training", None)
        if bounds is not None:
            objective.keep_between(*bounds)
        self._times = objective.scheduler.timesteps
        config = _measured(config)
        sizes = [buckets_of([sample.size], config.data_sets[sample.source])[0] for sample in samples]
        # Nothing random but the noise, which no setting changes.
        plain = {"seed": 0, "random_flip": False, "proportion_empty_prompts": 0.0, "cache_dir": None}
        self._encoded = EncodedSamples(pipe, family, samples, sizes, config.model_copy(update=plain), device)
        self._keeps = config.keeps_text
        self._kept: dict[int, tuple[Tensor, Conditions, Tensor | None]] = {}
        self._batches: list[MicroBatch] = []
        for size in sorted(set(sizes)):
            of_size = [DrawnSample(number, number) for number, its in enumerate(sizes) if its == size]
            for first in range(0, len(of_size), config.train_batch_size):
                self._batches.append(MicroBatch(tuple(of_size[first : first + config.train_batch_size]), size))

    def fill(self) -> None:
        """Encode what this rank measures on before it is measured, if conditions do not change in the run."""
        if self._keeps:
            data = self._mesh.data
            for turn in range(-(-len(self._batches) // data.size)):
                self._batch(min(turn * data.size + data.rank, len(self._batches) - 1))

    @torch.no_grad()
    def measure(self, predict: Predict) -> float:
        """The mean over samples, levels and latents. Collective.

        Args:
            predict: the transformer's prediction for noisy latents (B, C, ...), timesteps (B,) and conditions.
        """
        data = self._mesh.data
        sums = torch.zeros(len(self._batches), NUM_LEVELS, dtype=torch.float64, device=self._device)
        # As many on every rank: a forward of sharded weights is a collective of all of them.
        for turn in range(-(-len(self._batches) // data.size)):
            number = turn * data.size + data.rank
            micro = self._batches[min(number, len(self._batches) - 1)]
            latents, conditions, mask = self._batch(min(number, len(self._batches) - 1))
            for level in range(NUM_LEVELS):
                time = self._times[int((level + 0.5) / NUM_LEVELS * len(self._times))]
                noise = torch.stack([self._noise(drawn, level, latents.shape[1:]) for drawn in micro.samples])
                noise = noise.to(latents)
                noisy = self._tables.noisy_of(latents, noise, float(time))
                target = self._tables.target_of(latents, noise, float(time))
                prediction = predict(noisy, time.to(self._device).expand(len(latents)), conditions)
                errors = (prediction.float() - target.float()).square()
                errors = (errors if mask is None else errors * mask).flatten(1).mean(1)
                if number < len(self._batches):
                    sums[number, level] = errors.double().sum()
        # Each is one rank's; the zeros of the others change no bit of it.
        return sum(data.all_reduce(sums).flatten().tolist()) / (self._count * NUM_LEVELS)

    def _noise(self, drawn: DrawnSample, level: int, shape: torch.Size) -> Tensor:
        generator = torch.Generator().manual_seed(self._encoded.seed_of(drawn, "held out", str(level)))
        return torch.randn(shape, generator=generator)

    def _batch(self, number: int) -> tuple[Tensor, Conditions, Tensor | None]:
        """Latents, conditions and mask; kept on the CPU, but for conditions of text encoders that are trained."""
        if number not in self._kept:
            batch = self._encoded.batch(self._batches[number])
            if not self._keeps:
                return batch.latents, batch.conditions, batch.mask
            conditions = {name: value.cpu() for name, value in batch.conditions.items()}
            self._kept[number] = batch.latents.cpu(), conditions, None if batch.mask is None else batch.mask.cpu()
        latents, conditions, mask = self._kept[number]
        there = {name: value.to(self._device) for name, value in conditions.items()}
        return latents.to(self._device), there, None if mask is None else mask.to(self._device)
