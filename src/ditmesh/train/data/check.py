"""`ditmesh train --check RUN.yaml`: the samples of a run, and the skipped ones with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import InputError
from ...media.images import opened_image
from ..config import TrainConfig
from ..observed.family import ObservedFamily
from .samples import Sample
from .sources import all_samples
from .training_data import TrainingData

# Samples that are decoded.
MOST_DECODED = 1000


def checked_data(config: TrainConfig, pipe: Any) -> dict[str, Any]:
    """Read a run's data as a run would, and decode it.

    Returns:
        ``sets``, ``buckets``, ``captions``, ``skipped``, ``notes``, ``decoded`` (how many were), ``samples``, ``steps``
        and ``batch``.

    Raises:
        ConfigError, InputError: as the run would.
    """
    family = ObservedFamily(pipe, config)
    samples = all_samples(config.data, family.conditioned_by)
    data = TrainingData(pipe, family, config, samples, torch.device("cpu"))
    # All samples, or evenly chosen ones of many.
    chosen = samples.good[:: max(1, -(-len(samples.good) // MOST_DECODED))]
    broken, animated = _decoded(chosen, config.data.num_frames)
    buckets: dict[tuple[int, int], list[float]] = {}
    much_cut = []
    for sample, (high, wide) in zip(samples.good, data.sizes, strict=True):
        height, width = sample.size
        cut = 1 - high * wide / (height * width * max(high / height, wide / width) ** 2)
        buckets.setdefault((high, wide), []).append(cut)
        if cut > 0.5:
            much_cut.append(
                f"{sample.name} has {width} x {height} pixels, of which {cut:.0%} are cut away; add a bucket of its "
                "shape, or cut it yourself"
            )
    return {
        "sets": _sets(data, config),
        "buckets": [
            {"size": list(size), "samples": len(cuts), "cut_away": sum(cuts) / len(cuts)}
            for size, cuts in sorted(buckets.items())
        ],
        "captions": {
            "by": samples.by,
            "with": len(samples.good) - len(samples.without),
            "without": list(samples.without),
            "sources": dict(samples.sources),
            "cut": data.encoded.long_captions(),
        },
        "skipped": [*samples.corrupt, *broken],
        "notes": [*samples.notes, *animated, *much_cut],
        "decoded": len(chosen),
        "samples": len(samples.good),
        "steps": data.steps,
        "batch": config.batch,
    }


def _sets(data: TrainingData, config: TrainConfig) -> list[dict[str, Any]]:
    sets = []
    for number, (data_set, weight) in enumerate(zip(config.data.sets, config.data.weights, strict=True)):
        samples = [sample for sample in data.samples if sample.source == number]
        sets.append(
            {
                "dir": data_set.train_data_dir,
                "samples": len(samples),
                "weight": weight,
                "per_epoch": data.order.of_set(number),
                "masks": sum(sample.attached.mask is not None for sample in samples),
                "references": sum(sample.attached.reference is not None for sample in samples),
            }
        )
    return sets


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
            if sample.attached.reference is not None:
                sample.attached.reference.picture()
        except (OSError, InputError) as error:
            broken.append(str(error))
    return broken, animated
