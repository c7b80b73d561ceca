"""A sample of parameters for the quick tests, of which every value is in it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def sampled(*axes: Iterable[Any], of: int) -> list[Any]:
    """The product of the axes as parameters: one in ``of``, on diagonals, runs always, the others are `matrix`."""
    values = [list(axis) for axis in axes]
    places = product(*(range(len(axis)) for axis in values))
    return [
        pytest.param(
            *(axis[number] for axis, number in zip(values, place, strict=True)),
            marks=() if sum(place) % of == 0 else pytest.mark.matrix,
        )
        for place in places
    ]
