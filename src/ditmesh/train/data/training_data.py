"""The data of a run: its samples, encoded, in the order in which steps see them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...errors import ConfigError, InputError
from ..config import TrainConfig
from ..observed.family import ObservedFamily
from .encoded import Batch, EncodedSamples
from .order import MicroBatch, SampleOrder, buckets_of
from .samples import Samples
from .sources import digest_of, names_of


class TrainingData:
    """The data set of a run.

    Args:
        samples: the data set, the same on all ranks.

    Attributes:
        report: of used and skipped samples.
        samples, sizes: the readable samples, and (height, width) of their buckets.
        corrupt: a sentence for every other one.
        digest: of names, sizes and captions.
        encoded, order: the samples for the transformer, and the micro-batches of every step.
        steps: optimizer steps of the run.

    Raises:
        ConfigError, InputError: settings, data and model do not fit.
    """

    def __init__(
        self, pipe: Any, family: ObservedFamily, config: TrainConfig, samples: Samples, device: torch.device
    ) -> None:
        check_video_length(pipe, family, config)
        samples.check(config.data)
        self.samples, self.corrupt, self.digest = samples.good, list(samples.corrupt), digest_of(config.data, samples)
        data, steps, sources = config.data, config.optimizer, [sample.source for sample in samples.good]
        self.sizes = [buckets_of([sample.size], data.sets[sample.source])[0] for sample in samples.good]
        self.encoded = EncodedSamples(pipe, family, self.samples, self.sizes, config, device)
        per_step = config.batch // steps.train_batch_size
        self.order = SampleOrder(self.sizes, config.seed, steps.train_batch_size, per_step, sources, data.weights)
        self.steps = steps.max_train_steps or self.order.steps(steps.num_train_epochs)
        report, more = samples.report(), self.encoded.long_captions()
        lines = list(report.lines)
        for number, name in enumerate(names_of(data) if len(data.sets) > 1 else []):
            count, share = self.order.of_set(number), self.order.of_set(number) / self.order.samples
            words = f"weight {data.weights[number]:g} ({count} in an epoch, {share:.0%})"
            lines.append(f"  {name}: {sources.count(number)} samples, {words}")
        self.report = replace(report, lines=(*lines, *(f"  {one}" for one in more)), odd=report.odd or bool(more))

    def batch(self, micro: MicroBatch) -> Batch:
        """The samples of a micro-batch, encoded.

        Raises `InputError`: a sample's caption or label cannot be encoded; names it.
        """
        try:
            return self.encoded.batch(micro)
        except (TypeError, ValueError, LookupError) as error:
            if isinstance(error, InputError):
                raise
            cause = error
        for drawn in micro.samples:
            try:
                self.encoded.batch(MicroBatch((drawn,), micro.size))
            except (TypeError, ValueError, LookupError) as error:
                sample = self.samples[drawn.index]
                raise InputError(
                    f"sample {sample.name!r} cannot be encoded ({type(error).__name__}: {error}); its caption or "
                    f"label is {sample.words!r}"
                ) from error
        names = ", ".join(repr(self.samples[drawn.index].name) for drawn in micro.samples)
        raise InputError(f"samples {names} cannot be encoded together ({cause})") from cause


def check_video_length(pipe: Any, family: ObservedFamily, config: TrainConfig) -> None:
    """Reject a number of frames that the pipeline cannot have. Raises `ConfigError`: names the setting."""
    count, name = config.data.num_frames, type(pipe).__name__
    if family.videos and count is None:
        raise ConfigError(f"{name} makes videos; say of how many frames with num_frames")
    if count is None:
        return
    if not family.videos:
        raise ConfigError(f"num_frames={count}: {name} generates images; leave num_frames out")
    if config.output.validation_prompts:
        raise ConfigError(f"validation_prompts are drawn as images, and {name} makes videos; leave them out")
    step = pipe.vae.config.get("scale_factor_temporal") or 1
    if (count - 1) % step:
        less = count - (count - 1) % step
        raise ConfigError(f"num_frames={count}: {name} takes {step}k + 1 frames; use {less} or {less + step}")
