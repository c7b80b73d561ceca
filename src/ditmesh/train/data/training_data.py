"""The data of a run: its samples, encoded, in the order in which steps see them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...comm.mesh import Mesh
from ...errors import ConfigError, InputError
from ..config import TrainConfig
from ..families import Family
from ..uneven import Show
from .agreement import agreed_samples
from .encoded import Batch, EncodedSamples
from .order import MicroBatch, SampleOrder
from .sources import all_samples, lines_of, sources_of


class TrainingData:
    """The data set of a run, the same on all ranks. Collective.

    Args:
        pipe: encodes samples.
        family: how the pipeline is called in training.
        show: as for `uneven_work`.

    Attributes:
        report: of used and skipped samples.
        samples, corrupt: the readable samples, and a sentence for every other one.
        digest: of names, sizes and captions.
        encoded: the samples for the transformer.
        order: the micro-batches of every step.
        steps: optimizer steps of the run.

    Raises:
        ConfigError, InputError: settings, data and model do not fit.
    """

    def __init__(
        self,
        pipe: Any,
        family: Family,
        config: TrainConfig,
        mesh: Mesh,
        device: torch.device,
        show: Show,
    ) -> None:
        check_video_length(pipe, family, config)
        found = agreed_samples(mesh, lambda advance: all_samples(config.data, family.conditioned_by, advance), show)
        found.check(config.data)
        sources = sources_of(config.data, found)
        self.samples, self.corrupt = found.good, list(found.corrupt)
        self.digest = sources.digest
        self.encoded = EncodedSamples(pipe, family, self.samples, sources.sizes, config, device)
        steps = config.optimizer
        per_step = config.batch // steps.train_batch_size
        self.order = SampleOrder(
            sources.sizes, config.seed, steps.train_batch_size, per_step, sources.numbers, sources.weights
        )
        report, more = found.report(), lines_of(sources, self.order.of_sets(len(sources.configs)))
        cut = self.encoded.long_captions()
        lines = (*report.lines, *more, *(f"  {one}" for one in cut))
        self.report = replace(report, lines=lines, odd=report.odd or bool(cut))
        self.steps = steps.max_train_steps or self.order.steps(steps.num_train_epochs)

    def batch(self, micro: MicroBatch) -> Batch:
        """The samples of a micro-batch, encoded.

        Raises:
            InputError: a sample's caption or label cannot be encoded; names it.
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


def check_video_length(pipe: Any, family: Family, config: TrainConfig) -> None:
    """Reject a number of frames that the pipeline cannot have.

    Raises:
        ConfigError: names the setting.
    """
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
