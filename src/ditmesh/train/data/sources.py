"""The data sets of a run as one list of samples: those of `TrainConfig.train_data`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.digests import digest
from ..settings import DataConfig
from .attached import SampleImages
from .captions import By
from .order import buckets_of
from .reading import read_samples
from .samples import Samples

# Settings of a data set that do not affect training, or are in the samples themselves.
_ELSEWHERE = {"train_data_dir", "train_data", "mask_dir", "conditioning_dir"}


@dataclass(frozen=True)
class Sources:
    """The data sets of a run.

    Attributes:
        samples: of all data sets in their order; each knows the number of its own.
        names: of the data sets, as they are called before the names of samples; one alone has none.
        configs, weights: the settings of every data set, and how often an epoch has each of its samples.
        sizes: (height, width) of every sample's bucket.
    """

    samples: Samples
    names: tuple[str, ...]
    configs: tuple[DataConfig, ...]
    weights: tuple[float, ...]
    sizes: tuple[tuple[int, int], ...]

    @property
    def numbers(self) -> list[int]:
        """The number of every sample's data set."""
        return [sample.source for sample in self.samples.good]

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
        return digest((plain, beside, self.numbers, self.weights, str(changed)))


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
    """
    configs = config.sets
    sizes: list[tuple[int, int]] = []
    for number, one in enumerate(configs):
        sizes += buckets_of([sample.size for sample in samples.good if sample.source == number], one)
    return Sources(samples, names_of(config), configs, config.weights, tuple(sizes))


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
        good=tuple(
            replace(
                sample,
                name=f"{prefix}{sample.name}",
                part=sample.part.renamed(prefix),
                source=number,
                attached=SampleImages(
                    sample.attached.mask and sample.attached.mask.renamed(prefix),
                    tuple(image.renamed(prefix) for image in sample.attached.references),
                ),
            )
            for sample in samples.good
        ),
        corrupt=tuple(f"{prefix}{sentence}" for sentence in samples.corrupt),
        notes=tuple(f"{name}: {note}" for note in samples.notes),
        sources=tuple((f"{source} of {name}", count) for source, count in samples.sources),
    )


def lines_of(sources: Sources, per_epoch: Sequence[int]) -> list[str]:
    """Lines of a report about several data sets: the share of each in an epoch.

    Args:
        per_epoch: samples of every data set that an epoch has.
    """
    if len(sources.names) == 1:
        return []
    lines = []
    for number, (name, count) in enumerate(zip(sources.names, per_epoch, strict=True)):
        share = f"{count} in an epoch, {count / max(sum(per_epoch), 1):.0%}"
        there = sources.numbers.count(number)
        lines.append(f"  {name}: {there} samples, weight {sources.weights[number]:g} ({share})")
    return lines
