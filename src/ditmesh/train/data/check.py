"""`ditmesh train --check RUN.yaml`: the samples of a run, and the skipped ones with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import InputError
from ...media.images import opened_image
from ..config import TrainConfig
from ..observed.family import family_of
from .encoded import EncodedSamples
from .order import SampleOrder
from .samples import Sample
from .sources import Sources, all_samples, sources_of
from .training_data import check_video_length

# Samples that are decoded.
MOST_DECODED = 1000


def checked_data(config: TrainConfig, pipe: Any) -> dict[str, Any]:
    """Read a run's data as a run would, and decode it.

    Args:
        pipe: its pipeline, for the lengths of captions and the sizes that it takes.

    Returns:
        ``sets``, ``buckets``, ``captions``, ``skipped``, ``notes``, ``decoded`` (how many were), ``samples``, ``steps``
        and ``batch``.

    Raises:
        ConfigError, InputError: as the run would.
    """
    family = family_of(pipe, config)
    check_video_length(pipe, family, config)
    samples = all_samples(config.data, family.conditioned_by)
    samples.check(config.data)
    sources = sources_of(config.data, samples)
    encoded = EncodedSamples(pipe, family, samples.good, sources.sizes, config, torch.device("cpu"))
    per_step = config.batch // config.optimizer.train_batch_size
    order = SampleOrder(
        sources.sizes, config.seed, config.optimizer.train_batch_size, per_step, sources.numbers, sources.weights
    )
    # All samples, or evenly chosen ones of many.
    chosen = samples.good[:: max(1, -(-len(samples.good) // MOST_DECODED))]
    broken, animated = _decoded(chosen, config.data.num_frames)
    buckets, much_cut = _buckets(sources)
    return {
        "sets": _sets(sources, order),
        "buckets": buckets,
        "captions": {
            "by": samples.by,
            "with": len(samples.good) - len(samples.without),
            "without": list(samples.without),
            "sources": dict(samples.sources),
            "cut": encoded.long_captions(),
        },
        "skipped": [*samples.corrupt, *broken],
        "notes": [*samples.notes, *animated, *much_cut],
        "decoded": len(chosen),
        "samples": len(samples.good),
        "steps": config.optimizer.max_train_steps or order.steps(config.optimizer.num_train_epochs),
        "batch": config.batch,
    }


def _sets(sources: Sources, order: SampleOrder) -> list[dict[str, Any]]:
    sets = []
    per_epoch = order.of_sets(len(sources.configs))
    for number, config in enumerate(sources.configs):
        samples = [sample for sample in sources.samples.good if sample.source == number]
        sets.append(
            {
                "dir": config.train_data_dir,
                "samples": len(samples),
                "weight": sources.weights[number],
                "per_epoch": per_epoch[number],
                "masks": sum(sample.attached.mask is not None for sample in samples),
                "references": sum(bool(sample.attached.references) for sample in samples),
            }
        )
    return sets


def _buckets(sources: Sources) -> tuple[list[dict[str, Any]], list[str]]:
    """Every bucket with its samples and the share of them that is cut away; and sentences about those cut by half."""
    shares: dict[tuple[int, int], list[float]] = {}
    sentences = []
    for sample, size in zip(sources.samples.good, sources.sizes, strict=True):
        height, width = sample.size
        factor = max(size[0] / height, size[1] / width)
        cut = 1 - size[0] * size[1] / (height * width * factor * factor)
        shares.setdefault(size, []).append(cut)
        if cut > 0.5:
            sentences.append(
                f"{sample.name} has {width} x {height} pixels, of which {cut:.0%} are cut away; add a bucket of its "
                "shape, or cut it yourself"
            )
    buckets = [
        {"size": list(size), "samples": len(cuts), "cut_away": sum(cuts) / len(cuts)}
        for size, cuts in sorted(shares.items())
    ]
    return buckets, sentences


def _decoded(samples: Sequence[Sample], frames: int | None) -> tuple[list[str], list[str]]:
    """Sentences about samples that cannot be decoded, and about those of which only one frame is trained."""
    broken, animated = [], []
    for sample in samples:
        try:
            if frames is None:
                sample.picture()
                with sample.part.open() as file, opened_image(file, sample.name) as image:
                    if getattr(image, "is_animated", False):
                        animated.append(f"{sample.name} is animated: its first frame is trained")
            else:
                sample.frames(frames)
            if sample.attached.mask is not None:
                sample.attached.mask.mask()
            for reference in sample.attached.references:
                reference.picture()
        except (OSError, InputError) as error:
            broken.append(str(error))
    return broken, animated
