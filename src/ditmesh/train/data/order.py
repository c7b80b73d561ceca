"""The order of samples, independent of the ranks.

Epochs are permutations by the seed; a data set with a weight is in an epoch several times, or with a part of it that
moves on from epoch to epoch. Samples of one size make micro-batches; micro-batches of all sizes, shuffled,
make one endless row, of which every optimizer step takes the next few. Ranks share those of a step so that they end
together. So the number of ranks decides who computes a sample, never which samples a step has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from diffusers.training_utils import find_nearest_bucket

from ...core.partition import even_cut
from ...errors import ConfigError
from ..settings import SampleSettings


def buckets_of(sizes: Sequence[tuple[int, int]], config: SampleSettings) -> list[tuple[int, int]]:
    """The bucket of every sample, (height, width) in pixels: the one of the nearest shape.

    Raises `ConfigError`: ``aspect_ratio_buckets`` are no sizes.
    """
    buckets = bucket_sizes(config)
    if len(buckets) == 1:
        return buckets * len(sizes)
    return [buckets[cast(int, find_nearest_bucket(*size, buckets))] for size in sizes]


def bucket_sizes(config: SampleSettings) -> list[tuple[int, int]]:
    """(height, width) of every bucket of a run, in pixels.

    Raises `ConfigError`: ``aspect_ratio_buckets`` are no sizes.
    """
    text = config.aspect_ratio_buckets
    if text is None:
        return [(config.resolution, config.resolution)]
    pairs = [
        re.fullmatch(r"\s*([1-9]\d{0,4})\s*,\s*([1-9]\d{0,4})\s*", part) for part in text.split(";") if part.strip()
    ]
    buckets = [(int(pair[1]), int(pair[2])) for pair in pairs if pair is not None]
    if not buckets or len(buckets) < len(pairs):
        raise ConfigError(
            f"aspect_ratio_buckets={text!r} are no sizes in pixels; write them as 'height,width;height,width', such as "
            "'1024,1024;768,1344'"
        )
    return buckets


@dataclass(frozen=True)
class DrawnSample:
    """A sample in one step.

    ``number`` is how many were drawn before it; with the seed it decides noise, noise level, mirroring and whether the
    caption is left out.
    """

    index: int
    number: int


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward, fewer than usual at the end of an epoch, and their size: (height, width) in pixels."""

    samples: tuple[DrawnSample, ...]
    size: tuple[int, int]

    @property
    def count(self) -> int:
        """The number of samples, over which the loss is a mean."""
        return len(self.samples)

    @property
    def cost(self) -> float:
        """The relative cost of the micro-batch: its pixels."""
        return float(len(self.samples) * self.size[0] * self.size[1])


class SampleOrder:
    """The endless sequence of micro-batches, and its division into steps.

    With one data set of weight 1 an epoch has every sample once. Of a data set with a weight, each bucket of ``n``
    samples has the ``round(weight * n)`` next ones of an endless row in every epoch, at least one.

    Args:
        sizes: the bucket of every sample, (height, width).
        seed: of the permutations.
        micro: samples of a micro-batch.
        per_step: micro-batches of an optimizer step.
        sources: the number of every sample's data set; None: there is one.
        weights: how often an epoch has each sample of a data set.

    Attributes:
        per_epoch, samples: micro-batches and samples of an epoch.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        seed: int,
        micro: int,
        per_step: int,
        sources: Sequence[int] | None = None,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        sources = [0] * len(sizes) if sources is None else sources
        self._rows: dict[tuple[int, int], list[_Row]] = {}
        for size, source in sorted(set(zip(sizes, sources, strict=True))):
            places = [i for i, pair in enumerate(zip(sizes, sources, strict=True)) if pair == (size, source)]
            self._rows.setdefault(size, []).append(_Row(np.array(places), weights[source], seed, source))
        self._seed, self._micro, self.per_step = seed, micro, per_step
        lengths = [sum(row.count for row in rows) for rows in self._rows.values()]
        self.per_epoch = sum(-(-length // micro) for length in lengths)
        self.samples = sum(lengths)
        self._epoch = -1
        self._row: list[MicroBatch] = []

    def of_set(self, number: int) -> int:
        """The samples that an epoch has of a data set."""
        return sum(row.count for rows in self._rows.values() for row in rows if row.source == number)

    def step(self, number: int) -> list[MicroBatch]:
        """The micro-batches of one optimizer step."""
        first = number * self.per_step
        return [self._at(place) for place in range(first, first + self.per_step)]

    def steps(self, epochs: int) -> int:
        """The number of optimizer steps of ``epochs`` epochs; the last step may extend into the next epoch."""
        return -(-epochs * self.per_epoch // self.per_step)

    def _at(self, place: int) -> MicroBatch:
        epoch, within = divmod(place, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._row = epoch, list(self._micro_batches(epoch))
        return self._row[within]

    def _micro_batches(self, epoch: int) -> Iterator[MicroBatch]:
        random = np.random.default_rng((self._seed, epoch))
        groups: list[tuple[np.ndarray, tuple[int, int]]] = []
        for size, rows in self._rows.items():
            shuffled = random.permutation(np.concatenate([row.of_epoch(epoch) for row in rows]))
            groups += [(shuffled[i : i + self._micro], size) for i in range(0, len(shuffled), self._micro)]
        number = epoch * self.samples
        for place in random.permutation(len(groups)):
            indices, size = groups[place]
            yield MicroBatch(tuple(DrawnSample(int(i), number + n) for n, i in enumerate(indices)), size)
            number += len(indices)


class _Row:
    """The samples of one data set in one bucket, as often as its weight says: whole, and a part that moves on."""

    def __init__(self, places: np.ndarray, weight: float, seed: int, source: int) -> None:
        self._places, self._seed, self.source = places, seed, source
        self.count = max(1, round(weight * len(places)))

    def of_epoch(self, epoch: int) -> np.ndarray:
        """Numbers of the samples of an epoch."""
        whole, rest = divmod(self.count, len(self._places))
        return np.concatenate([np.tile(self._places, whole), np.array(self.at(epoch * rest, rest), dtype=int)])

    def at(self, first: int, count: int) -> list[int]:
        """Numbers of samples of an endless row of permutations, from place ``first`` on."""
        numbers: list[int] = []
        while len(numbers) < count:
            turn, within = divmod(first + len(numbers), len(self._places))
            # Two numbers are the seeds of epochs.
            order = np.random.default_rng((self._seed, self.source, int(self._places[0]), turn)).permutation(
                self._places
            )
            numbers += [int(one) for one in order[within : within + count - len(numbers)]]
        return numbers


def shares(batches: Sequence[MicroBatch], speeds: Sequence[float], equal_counts: bool) -> list[list[int]]:
    """The micro-batches of a step for each data rank, so that all finish at about the same time.

    The longest first, each to the rank that would end first with it (Graham 1969, "Bounds on multiprocessing timing
    anomalies"). Every rank gets one, where there are enough: a rank without one cannot be measured, nor take part in
    what data ranks exchange during a backward pass.

    Args:
        speeds: of the ranks, relative to one another.
        equal_counts: every rank gets as many: where each forward is a collective of all data ranks.

    Returns:
        Numbers of micro-batches by rank, in ascending order.
    """
    most = even_cut(len(batches), len(speeds)) if equal_counts else [len(batches)] * len(speeds)
    taken: list[list[int]] = [[] for _ in speeds]
    busy = [0.0] * len(speeds)
    for place, number in enumerate(sorted(range(len(batches)), key=lambda n: (-batches[n].cost, n))):
        open_ranks = [rank for rank in range(len(speeds)) if len(taken[rank]) < most[rank]]
        idle = [rank for rank in open_ranks if not taken[rank]]
        open_ranks = idle if len(batches) - place <= len(idle) else open_ranks
        rank = min(open_ranks, key=lambda r: (busy[r] + batches[number].cost / speeds[r], r))
        taken[rank].append(number)
        busy[rank] += batches[number].cost / speeds[rank]
    return [sorted(numbers) for numbers in taken]
