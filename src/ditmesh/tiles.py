"""Tokens to ranks: where a sequence is cut.

A cut is a tuple of lengths, one per sequence rank, in rank order; the lengths sum to the sequence. Every
strategy that shares tokens out uses these functions, so that a cut is decided in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .errors import ConfigError


def even_cut(length: int, parts: int) -> tuple[int, ...]:
    """Cut ``length`` tokens into ``parts`` runs whose lengths differ by at most one, longer runs first.

    >>> even_cut(11, 3)
    (4, 4, 3)
    """
    if parts < 1:
        raise ConfigError(f"cannot cut {length} tokens into {parts} parts; use at least 1")
    base, extra = divmod(length, parts)
    return tuple(base + (1 if part < extra else 0) for part in range(parts))


def weighted_cut(length: int, weights: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """Cut ``length`` into runs in proportion to ``weights``, each at least one unit, cut between units.

    What is left over after rounding down goes to the runs that lost most by it, the first of them on a tie.

    Args:
        length: what is cut.
        weights: one positive number for every run.
        unit: runs are multiples of it; the last run also takes what is no whole unit. Ignored when there are
            fewer units than runs.

    Raises:
        ConfigError: fewer than one for every run.

    >>> weighted_cut(8, (2, 1))
    (5, 3)
    >>> weighted_cut(100, (2, 1), unit=16)
    (64, 36)
    """
    parts = len(weights)
    if length < parts:
        raise ConfigError(f"{length} cannot be cut into {parts} runs of at least 1; use at most {length} ranks")
    if length < unit * parts:
        unit = 1
    units, rest = divmod(length, unit)
    if len(set(weights)) == 1:
        counts = list(even_cut(units, parts))
    else:
        # Every run has one unit for certain; the others are shared by weight.
        shares = [units * weight / sum(weights) for weight in weights]
        counts = [max(1, int(share)) for share in shares]
        while sum(counts) < units:
            counts[max(range(parts), key=lambda part: (shares[part] - counts[part], -part))] += 1
        while sum(counts) > units:
            richest = max((part for part in range(parts) if counts[part] > 1), key=lambda p: (counts[p] - shares[p], p))
            counts[richest] -= 1
    lengths = [count * unit for count in counts]
    lengths[-1] += rest
    return tuple(lengths)


def offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    """Start of every run.

    >>> offsets((4, 4, 3))
    (0, 4, 8)
    """
    return tuple(accumulate(lengths, initial=0))[:-1]
