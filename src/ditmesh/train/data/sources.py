"""The data sets of a run as one list of samples: those of `TrainConfig.train_data`, and class images last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.digests import digest
from ...errors import InputError
from ..config import TrainConfig
from .attached import renamed
from .captions import By
from .order import SampleSets, buckets_of
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
    configs: tuple[TrainConfig, ...]
    sizes: tuple[tuple[int, int], ...]
    sets: SampleSets

    @property
    def digest(self) -> str:
        """Digest of names, sizes and captions, and of the settings for their frequency and wording."""
        good = self.samples.good
        plain = [(sample.name, sample.size, sample.said) for sample in good]
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


def found_samples(config: TrainConfig, by: By, advance: Callable[[int], None] | None = None) -> Samples:
    """The samples of all data sets of a run, in one list.

    Args:
        by: ``"text"`` or ``"label"``.
        advance: called with the number of samples that have been looked at so far.

    Raises:
        InputError: as `Samples.find`; names the data set.
    """
    configs, names = config.data_sets, names_of(config)
    if len(configs) == 1:
        return Samples.find(configs[0], by, advance)
    every: list[Samples] = []
    before = 0
    for number, (one, name) in enumerate(zip(configs, names, strict=True)):
        told = None if advance is None else lambda count, before=before: advance(before + count)
        found = Samples.find(one, by, told)
        before += len(found.good) + len(found.corrupt)
        every.append(_marked(found, name, number))
    return Samples(
        good=tuple(sample for found in every for sample in found.good),
        corrupt=tuple(one for found in every for one in found.corrupt),
        notes=tuple(one for found in every for one in found.notes),
        sources=tuple(pair for found in every for pair in found.sources),
        columns=tuple(dict.fromkeys(one for found in every for one in found.columns)),
        by=by,
    )


def sources_of(config: TrainConfig, samples: Samples) -> Sources:
    """Samples with their buckets, and how often each is trained.

    Args:
        samples: as `found_samples` returns them.

    Raises:
        ConfigError: sizes of buckets are none.
        InputError: there are class images for some buckets only.
    """
    configs, numbers = config.data_sets, [sample.source for sample in samples.good]
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


def names_of(config: TrainConfig) -> tuple[str, ...]:
    """Short names of the data sets: the last part of the folder, with a number where two have the same."""
    names = [Path(one.train_data_dir).name or one.train_data_dir for one in config.data_sets]
    if len(names) == 1:
        return ("",)
    count, seen = Counter(names), Counter[str]()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name}-{seen[name]}" if count[name] > 1 else name)
    return tuple(found)


def _marked(found: Samples, name: str, number: int) -> Samples:
    """The samples of one data set of several, with its name before theirs."""
    prefix = f"{name}/"
    return replace(
        found,
        good=tuple(_with(sample, prefix, number) for sample in found.good),
        corrupt=tuple(f"{prefix}{one}" for one in found.corrupt),
        notes=tuple(f"{name}: {one}" for one in found.notes),
        sources=tuple((f"{source} of {name}", count) for source, count in found.sources),
    )


def _with(sample: Sample, prefix: str, number: int) -> Sample:
    beside = sample.attached
    (mask,) = renamed([beside.mask], prefix) if beside.mask is not None else (None,)
    attached = replace(beside, mask=mask, references=renamed(beside.references, prefix))
    (part,) = renamed([sample.part], prefix)
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
