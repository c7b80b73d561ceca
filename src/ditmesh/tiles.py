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


def offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    """Start of every run.

    >>> offsets((4, 4, 3))
    (0, 4, 8)
    """
    return tuple(accumulate(lengths, initial=0))[:-1]
