"""A sample of parameters for the quick tests, of which every value is in it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def sampled(*axes: Iterable[Any], of: int) -> list[Any]:
    """The product of the axes as parameters, of which a few run always; the others are `matrix`.

    Those few are one in ``of``, on diagonals. Where that is more than the longest axis has values, they are one
    diagonal, with each value of that axis once and each of the others at least once.
    """
    values = [list(axis) for axis in axes]
    places = list(product(*(range(len(axis)) for axis in values)))
    quick = {place for place in places if sum(place) % of == 0}
    longest = max(len(axis) for axis in values)
    if len(axes) > 1 and len(quick) > longest:
        # A turn of a shorter axis begins one place later than the one before, so that its values meet others.
        quick = {tuple((step + step // len(axis)) % len(axis) for axis in values) for step in range(longest)}
    return [
        pytest.param(
            *(axis[number] for axis, number in zip(values, place, strict=True)),
            marks=() if place in quick else pytest.mark.matrix,
        )
        for place in places
    ]
