"""The data sets of a run as one list of samples: those of `TrainConfig.train_data`, and class images last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.digests import digest
from ...errors import InputError
from ..settings import DataConfig
from .attached import SampleImages, renamed
from .captions import By
from .order import SampleSets, buckets_of
from .reading import read_samples
from .samples import Sample, Samples

# Settings of a data set that do not affect training, or are in the samples themselves.
_ELSEWHERE = {"train_data_dir", "train_data", "class_data_dir", "mask_dir", "conditioning_dir"}


@dataclass(frozen=True)
class Sources:
    """The data sets of a run.

    Attributes:
        samples: of all data sets in their order; each knows the number of its own.
        names: of the data sets, as they are called before the names of samples; one alone has none.
        configs: the settings of every data set.
        sizes: (height, width) of every sample's bucket.
        sets: the data sets, for the order of samples.
    """

    samples: Samples
    names: tuple[str, ...]
    configs: tuple[DataConfig, ...]
    sizes: tuple[tuple[int, int], ...]
    sets: SampleSets

    @property
    def digest(self) -> str:
        """Digest of names, sizes and captions, and of the settings for their frequency and wording."""
        good = self.samples.good
        plain = [(sample.name, sample.size, sample.words) for sample in good]
        beside = [
            (sample.attached.mask and sample.attached.mask.name, [one.name for one in sample.attached.references])
            for sample in good
        ]
        if len(self.configs) == 1 and not any(mask or references for mask, references in beside):
            return digest(plain)
        own = [
            {name: value for name, value in one.model_dump(mode="json").items() if name not in _ELSEWHERE}
            for one in self.configs
        ]
        first = own[0]
        changed = [{name: value for name, value in one.items() if value != first[name]} for one in own]
        return digest((plain, beside, [sample.source for sample in good], self.sets.weights, str(changed)))


def all_samples(config: DataConfig, by: By, advance: Callable[[int], None] | None = None) -> Samples:
    """The samples of all data sets of a run, in one list.

    Args:
        by: ``"text"`` or ``"label"``.
        advance: called with the number of samples that have been looked at so far.

    Raises:
        InputError: as `read_samples`; names the data set.
    """
    configs, names = config.sets, names_of(config)
    if len(configs) == 1:
        return read_samples(configs[0], by, advance)
    sets: list[Samples] = []
    before = 0
    for number, (own, name) in enumerate(zip(configs, names, strict=True)):
        advance_set = None if advance is None else lambda count, before=before: advance(before + count)
        samples = read_samples(own, by, advance_set)
        before += len(samples.good) + len(samples.corrupt)
        sets.append(_marked(samples, name, number))
    return Samples(
        good=tuple(sample for of_set in sets for sample in of_set.good),
        corrupt=tuple(sentence for of_set in sets for sentence in of_set.corrupt),
        notes=tuple(note for of_set in sets for note in of_set.notes),
        sources=tuple(pair for of_set in sets for pair in of_set.sources),
        columns=tuple(dict.fromkeys(column for of_set in sets for column in of_set.columns)),
        by=by,
    )


def sources_of(config: DataConfig, samples: Samples) -> Sources:
    """Samples with their buckets, and how often each is trained.

    Args:
        samples: as `all_samples` returns them.

    Raises:
        ConfigError: sizes of buckets are none.
        InputError: there are class images for some buckets only.
    """
    configs, numbers = config.sets, [sample.source for sample in samples.good]
    sizes: list[tuple[int, int]] = []
    for number, one in enumerate(configs):
        sizes += buckets_of([sample.size for sample in samples.good if sample.source == number], one)
    prior = None if config.class_data_dir is None else len(configs) - 1
    if prior is not None:
        wanted, there = (
            {size for size, source in zip(sizes, numbers, strict=True) if (source == prior) is of_class}
            for of_class in (False, True)
        )
        if lacking := sorted(wanted - there):
            height, width = lacking[0]
            raise InputError(
                f"class_data_dir={config.class_data_dir!r} has no image for the bucket of {height} x {width} pixels "
                "(height x width), in which there are samples; add one of that shape, or leave aspect_ratio_buckets out"
            )
    repeats = tuple(sample.repeats for sample in samples.good)
    sets = SampleSets(tuple(numbers), config.weights, prior, repeats if max(repeats, default=1) > 1 else ())
    return Sources(samples, names_of(config), configs, tuple(sizes), sets)


def names_of(config: DataConfig) -> tuple[str, ...]:
    """Short names of the data sets: the last part of the folder, with a number where two have the same."""
    names = [Path(own.train_data_dir).name or own.train_data_dir for own in config.sets]
    if len(names) == 1:
        return ("",)
    numbers = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return tuple(
        f"{name}-{number}" if names.count(name) > 1 else name for name, number in zip(names, numbers, strict=True)
    )


def _marked(samples: Samples, name: str, number: int) -> Samples:
    """The samples of one data set of several, with its name before theirs."""
    prefix = f"{name}/"
    return replace(
        samples,
        good=tuple(_with_prefix(sample, prefix, number) for sample in samples.good),
        corrupt=tuple(f"{prefix}{sentence}" for sentence in samples.corrupt),
        notes=tuple(f"{name}: {note}" for note in samples.notes),
        sources=tuple((f"{source} of {name}", count) for source, count in samples.sources),
    )


def _with_prefix(sample: Sample, prefix: str, number: int) -> Sample:
    mask, references = sample.attached.mask, sample.attached.references
    attached = SampleImages(mask and renamed(mask, prefix), tuple(renamed(image, prefix) for image in references))
    part = renamed(sample.part, prefix)
    return replace(sample, name=part.name, part=part, source=number, attached=attached)


def lines_of(sources: Sources, per_epoch: Sequence[int]) -> list[str]:
    """Lines of a report about several data sets: the share of each in an epoch.

    Args:
        per_epoch: samples of every data set that an epoch has.
    """
    if len(sources.names) == 1:
        return []
    total = sum(count for number, count in enumerate(per_epoch) if number != sources.sets.prior)
    lines = []
    for number, (name, count) in enumerate(zip(sources.names, per_epoch, strict=True)):
        there = sum(sample.source == number for sample in sources.samples.good)
        if number == sources.sets.prior:
            lines.append(f"  {name}: {there} class images, one beside every sample")
        else:
            share = f"{count} in an epoch, {count / max(total, 1):.0%}"
            lines.append(f"  {name}: {there} samples, weight {sources.sets.weights[number]:g} ({share})")
    return lines
