"""`ditmesh train --check RUN.yaml`: the samples of a run, and the skipped ones with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...comm.mesh import Mesh
from ...config import ParallelConfig
from ...errors import InputError
from ...media.images import opened_image
from ..config import TrainConfig
from ..families import FAMILIES, family_of
from .encoded import EncodedSamples
from .held_out import with_held_out
from .order import DrawnSample, SampleOrder
from .samples import Sample, Samples
from .sources import Sources, found_samples, sources_of
from .training_data import check_video_length

# Samples that are decoded.
MOST_DECODED = 1000


def checked_data(config: TrainConfig, pipe: Any) -> dict[str, Any]:
    """Read a run's data as a run would, decode it, and look at the first step.

    Args:
        pipe: its pipeline, for the lengths of captions and the sizes that it takes.

    Returns:
        ``sets``, ``buckets``, ``captions``, ``skipped``, ``notes``, ``decoded`` (how many were), ``steps`` and
        ``first_step`` (name, caption, size, mirrored, kind).

    Raises:
        ConfigError, InputError: as the run would.
    """
    family = family_of(pipe, config)
    check_video_length(pipe, family, config)
    found = found_samples(config, family.conditioned_by)
    found.check(config)
    mesh = Mesh(ParallelConfig())
    try:
        found, _ = with_held_out(found, family.conditioned_by, config, mesh, lambda what, ranks: None)
    finally:
        mesh.close()
    sources = sources_of(config, found)
    encoded = EncodedSamples(pipe, family, found.good, sources.sizes, config, torch.device("cpu"))
    per_step = config.batch // config.train_batch_size
    order = SampleOrder(sources.sizes, config.seed, config.train_batch_size, per_step, sources.sets)
    broken, odd, decoded = _decoded(found.good, config)
    drawn = [
        (one, micro.size, place >= micro.count) for micro in order.step(0) for place, one in enumerate(micro.samples)
    ]
    return {
        "sets": _sets(sources, order),
        "buckets": _buckets(sources),
        "captions": _captions(found, encoded),
        "skipped": [*found.corrupt, *broken],
        "notes": [*found.notes, *odd, *_much_cut(sources)],
        "decoded": decoded,
        "samples": len(found.good),
        "steps": config.max_train_steps or order.steps(config.num_train_epochs),
        "batch": config.batch,
        "first_step": [_drawn(encoded, found.good, *one) for one in drawn],
    }


def conditioned_by_label(pipe: Any) -> bool:
    """True if a pipeline is trained by labels, which only adapters can say."""
    family = FAMILIES.get(type(pipe.transformer).__name__) or FAMILIES.get(type(pipe.transformer))
    return family is not None and family.conditioned_by == "label"


def _sets(sources: Sources, order: SampleOrder) -> list[dict[str, Any]]:
    found = []
    per_epoch = order.of_sets(len(sources.configs))
    for number, config in enumerate(sources.configs):
        mine = [sample for sample in sources.samples.good if sample.source == number]
        prior = number == sources.sets.prior
        found.append(
            {
                "dir": config.train_data_dir,
                "samples": len(mine),
                "weight": None if prior else sources.sets.weights[number],
                "per_epoch": sum(per_epoch) if prior else per_epoch[number],
                "masks": sum(sample.attached.mask is not None for sample in mine),
                "references": sum(bool(sample.attached.references) for sample in mine),
                "class_images": prior,
            }
        )
    return found


def _buckets(sources: Sources) -> list[dict[str, Any]]:
    """For every bucket its samples, how many of them are enlarged, and how much of them is cut away."""
    found = []
    pairs = list(zip(sources.samples.good, sources.sizes, strict=True))
    for size in sorted(set(sources.sizes)):
        factors, cut = zip(*(_scaled(sample, size) for sample, own in pairs if own == size), strict=True)
        found.append(
            {
                "size": list(size),
                "samples": len(cut),
                "enlarged": sum(factor > 1 for factor in factors),
                "largest_factor": max(factors),
                "cut_away": sum(cut) / len(cut),
            }
        )
    return found


def _scaled(sample: Sample, size: tuple[int, int]) -> tuple[float, float]:
    """The factor by which a sample is enlarged for a bucket, and the share of it that is cut away."""
    factor = max(size[0] / sample.size[0], size[1] / sample.size[1])
    return factor, 1 - size[0] * size[1] / (sample.size[0] * sample.size[1] * factor * factor)


def _captions(found: Samples, encoded: EncodedSamples) -> dict[str, Any]:
    texts = [sample.said for sample in found.good]
    every = [one for said in texts for one in (said if isinstance(said, tuple) else (said,)) if isinstance(one, str)]
    words = sorted(len(one.split()) for one in every)
    return {
        "by": found.by,
        "with": len(found.good) - len(found.without),
        "without": list(found.without),
        "several": sum(isinstance(said, tuple) for said in texts),
        "sources": dict(found.sources),
        "words": [words[0], words[len(words) // 2], words[-1]] if words else None,
        "cut": encoded.long_captions(),
    }


def _much_cut(sources: Sources) -> list[str]:
    found = []
    for sample, size in zip(sources.samples.good, sources.sizes, strict=True):
        _, cut = _scaled(sample, size)
        if cut > 0.5:
            found.append(
                f"{sample.name} has {sample.size[1]} x {sample.size[0]} pixels, of which {cut:.0%} are cut away; add a "
                "bucket of its shape, or cut it yourself"
            )
    return found


def _decoded(samples: Sequence[Sample], config: TrainConfig) -> tuple[list[str], list[str], int]:
    """Decode all samples, or evenly chosen ones of many.

    Returns:
        Sentences about those that cannot be decoded, and about those of which only one frame is trained; and how many
        were decoded.
    """
    chosen = samples[:: max(1, -(-len(samples) // MOST_DECODED))]
    broken, odd = [], []
    for sample in chosen:
        try:
            if config.num_frames is None:
                sample.picture()
                with sample.part.open() as file, opened_image(file, sample.name) as image:
                    if getattr(image, "is_animated", False):
                        odd.append(f"{sample.name} is animated: its first frame is trained")
            else:
                sample.frames(config.num_frames)
            if sample.attached.mask is not None:
                sample.attached.mask.mask()
            for one in sample.attached.references:
                one.picture()
        except (OSError, InputError) as error:
            broken.append(str(error))
    return broken, odd, len(chosen)


def _drawn(
    encoded: EncodedSamples, samples: Sequence[Sample], drawn: DrawnSample, size: tuple[int, int], of_class: bool
) -> dict[str, Any]:
    """A sample of the first step, as the model gets it."""
    mirrored, caption = encoded.drawn(drawn)
    return {
        "name": samples[drawn.index].name,
        "caption": "" if caption is None else str(caption),
        "size": list(size),
        "mirrored": mirrored,
        "kind": "class image" if of_class else "sample",
    }
