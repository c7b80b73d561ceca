"""`ditmesh train --check RUN.yaml`: the samples of a run, and the skipped ones with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps

from ...comm.mesh import Mesh
from ...config import ParallelConfig
from ...core.digests import digest
from ...errors import InputError
from ...media.images import opened_image
from ..config import TrainConfig
from ..families import FAMILIES, family_of
from .agreement import sample_bytes
from .contact_sheet import SeenSample, write_sheet
from .encoded import EncodedSamples
from .held_out import with_held_out
from .order import DrawnSample, SampleOrder
from .references import reference_image
from .samples import Sample, Samples, crop_to_fill
from .sources import Sources, found_samples, sources_of
from .training_data import check_video_length

# Samples that are decoded.
MOST_DECODED = 1000


def checked_data(config: TrainConfig, pipe: Any, sheet: str | Path | None = None) -> dict[str, Any]:
    """Read a run's data as a run would, decode it, and look at the first step.

    Args:
        pipe: its pipeline, for the lengths of captions and the sizes that it takes.
        sheet: a PNG with the samples of the first step is written there.

    Returns:
        ``sets``, ``buckets``, ``captions``, ``skipped``, ``notes``, ``duplicates``, ``decoded`` (how many were),
        ``steps``, ``first_step`` (name, caption, size, mirrored, kind) and ``sheet`` (the file; None).

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
    first = [_seen(encoded, sources, *one) for one in drawn]
    if sheet is not None:
        write_sheet(first, sheet)
    return {
        "sets": _sets(sources, order),
        "buckets": _buckets(sources),
        "captions": _captions(found, encoded),
        "skipped": [*found.corrupt, *broken],
        "notes": [*found.notes, *odd, *_much_cut(sources)],
        "duplicates": _duplicates(found.good),
        "decoded": decoded,
        "samples": len(found.good),
        "steps": config.max_train_steps or order.steps(config.num_train_epochs),
        "batch": config.batch,
        "first_step": [
            {
                "name": one.name,
                "caption": one.caption,
                "size": list(one.size),
                "mirrored": one.mirrored,
                "kind": one.kind,
            }
            for one in first
        ],
        "sheet": None if sheet is None else str(sheet),
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
        "cut": encoded.cut_captions(),
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


def _duplicates(samples: Sequence[Sample]) -> list[list[str]]:
    """Names of samples with the same bytes in other files: of files that are as long as another one's."""
    by_length: dict[int, list[Sample]] = {}
    for sample in samples:
        by_length.setdefault(sample_bytes(sample), []).append(sample)
    found: dict[str, dict[str, None]] = {}
    for alike in by_length.values():
        # Lines of a listing are samples of one file, which is no duplicate.
        if len({sample.name for sample in alike}) < 2:
            continue
        for sample in alike:
            try:
                with sample.part.open() as file:
                    found.setdefault(digest(file.read().hex()), {})[sample.name] = None
            except (InputError, OSError):
                continue
    return [list(names) for names in found.values() if len(names) > 1]


def _seen(
    encoded: EncodedSamples, sources: Sources, drawn: DrawnSample, size: tuple[int, int], of_class: bool
) -> SeenSample:
    sample = sources.samples.good[drawn.index]
    config = sources.configs[sample.source]
    flip, said = encoded.drawn(drawn)
    about = {
        "name": sample.name,
        "caption": "" if said is None else str(said),
        "size": size,
        "file_size": sample.size,
        "mirrored": flip,
        "kind": "class image" if of_class else "sample",
    }
    try:
        whole = sample.picture() if config.num_frames is None else sample.frames(config.num_frames)[0]
        mask = None if sample.attached.mask is None else crop_to_fill(sample.attached.mask.mask(), size)
        picture = crop_to_fill(whole, size)
        if flip:
            picture, mask = ImageOps.mirror(picture), None if mask is None else ImageOps.mirror(mask)
        return SeenSample(**about, picture=picture, mask=mask, reference=reference_image(sample, size, flip))
    except OSError as error:
        return SeenSample(**about, problem=str(error))
