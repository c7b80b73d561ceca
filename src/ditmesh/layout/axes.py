"""Find the arguments of a block with tokens along several dimensions, or with entries that are for several tokens."""

from __future__ import annotations

from itertools import islice
from math import prod

import torch
from torch import Tensor

from .check import checked_facts
from .record import RecordedBlock, changed_along, error_line, with_corrupted
from .streams import block_facts
from .types import Fold, Stream

# From so many dimensions on, tokens may stand along several: samples, two of tokens, channels.
_DIMENSIONS = 4


def folds_of(ran: RecordedBlock, streams: tuple[Stream, ...]) -> tuple[Fold, ...]:
    """The folds of a list's arguments, seen at its first block, given the streams of the block before it."""
    if any(isinstance(v, Tensor) and v.dim() >= _DIMENSIONS and _returned(ran, v) for v in ran.leaves.values()):
        try:
            found = block_facts(ran.fresh(), streams)
            plain = bool(found.streams) and bool(checked_facts(ran.fresh(), found))
        except Exception as error:
            error_line(error)
            plain = False
        main = None if plain else _along_several(ran)
        if main is not None:
            return (main, *_beside(ran, main))
    main = _along_one(ran, streams)
    entries = [] if main is None else list(_beside(ran, main))
    return (main, *entries) if main is not None and entries else ()


def _returned(ran: RecordedBlock, value: Tensor) -> list[int]:
    """Places of the results that may be this argument, changed."""
    results = [(place, result) for place, result in enumerate(ran.results) if isinstance(result, Tensor)]
    return [place for place, one in results if one.shape == value.shape and one.dtype == value.dtype]


def _along_several(ran: RecordedBlock) -> Fold | None:
    """The argument that comes back token by token along at least two dimensions."""
    for path, value in ran.leaves.items():
        if not isinstance(value, Tensor) or value.dim() < _DIMENSIONS or "." in path:
            continue
        for place in _returned(ran, value):
            dims = [d for d in range(value.dim() - 1) if value.shape[d] > 1 and _follows(ran, path, value, place, d)]
            if len(dims) < 2:
                continue
            first, last = dims[0], dims[-1]
            if all(d in dims or value.shape[d] == 1 for d in range(first, last + 1)):
                return Fold(path, first, last - first + 1, (place,))
    return None


def _follows(ran: RecordedBlock, path: str, value: Tensor, place: int, dim: int) -> bool:
    """True if entries along a dimension come back one by one, and are some rows of a sample's queries."""
    places = ran.half(value.shape[dim])
    touched = ran.tried({path: with_corrupted(value, dim, places)})
    return (
        touched is not None and touched.some_queries and torch.equal(changed_along(touched.results[place], dim), places)
    )


def _along_one(ran: RecordedBlock, streams: tuple[Stream, ...]) -> Fold | None:
    """The tokens of the main stream, which need not be folded."""
    try:
        streams = streams or block_facts(ran.fresh(), streams).streams
    except Exception as error:
        error_line(error)
        return None
    if not streams or not isinstance(ran.leaves.get(streams[0].arg), Tensor) or not streams[0].returned:
        return None
    return Fold(streams[0].arg, streams[0].dim, 1, (streams[0].out or 0,))


def _beside(ran: RecordedBlock, main: Fold) -> list[Fold]:
    """Other arguments that follow the tokens along several dimensions, or with an entry for several tokens."""
    tokens = ran.leaves[main.arg]
    shape = tuple(tokens.shape[main.dim : main.dim + main.axes])
    folds = []
    for path, value in ran.leaves.items():
        if path == main.arg or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if main.axes > 1 and value.dim() == tokens.dim():
            own = tuple(value.shape[main.dim : main.dim + main.axes])
            if prod(own) > 1 and all(mine in (1, whole) for mine, whole in zip(own, shape, strict=True)):
                folds.append(Fold(path, main.dim, main.axes))
                continue
        dims = (d for d, size in enumerate(value.shape) if _for_several(ran, main, path, value, d, size))
        folds += [Fold(path, dim, 1) for dim in islice(dims, 1)]
    return folds


def _for_several(ran: RecordedBlock, main: Fold, path: str, value: Tensor, dim: int, size: int) -> bool:
    """True if entries along a dimension are for as many successive tokens each, more than one."""
    last = main.dim + main.axes - 1
    length = prod(ran.leaves[main.arg].shape[main.dim : last + 1])
    if not 1 < size < length or length % size:
        return False

    half = ran.half(size)
    # Both halves: one alone may touch such tokens by chance.
    for places in (half, ~half):
        touched = ran.tried({path: with_corrupted(value, dim, places)})
        changed = None if touched is None else touched.results[main.results[0]]
        tokens = None if changed is None else changed_along(changed.flatten(main.dim, last), main.dim)
        if tokens is None or not torch.equal(tokens, places.repeat_interleave(length // size)):
            return False
    return True
