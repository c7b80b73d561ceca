"""Conditions of several samples as one, and moments of latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Tensors with one row per sample.
Conditions = dict[str, Tensor]


def latent_moments(vae: Any, values: Tensor) -> Tensor:
    """(B, 2C, ...): mean and standard deviation of an autoencoder's latents."""
    encoded = vae.encode(values)
    distribution = getattr(encoded, "latent_dist", None)
    if distribution is None:
        # An autoencoder without a distribution.
        return torch.cat([encoded[0], torch.zeros_like(encoded[0])], dim=1).float()
    return torch.cat([distribution.mean, distribution.std], dim=1).float()


# Suffix of the name of a condition with rows filled up with zeros: under it stands the shape of each row.
_SHAPES = ".shape"


def stacked(rows: Sequence[Conditions]) -> Conditions:
    """Conditions of several samples, by those of each; rows of unlike lengths are filled up with zeros."""
    conditions: Conditions = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if any(value.shape != first.shape for value in values):
            conditions[name + _SHAPES] = torch.tensor([value.shape for value in values])
            most = [max(sides) for sides in zip(*(value.shape for value in values), strict=True)]
            filled = first.new_zeros(len(values), *most)
            for place, value in enumerate(values):
                filled[place][tuple(map(slice, value.shape))] = value
            conditions[name] = filled
        else:
            conditions[name] = torch.stack(values)
    return conditions


def sample_conditions(conditions: Conditions, count: int) -> list[Conditions]:
    """Conditions of every sample: what `stacked` was given."""
    names = [name for name in conditions if not name.endswith(_SHAPES)]
    rows = []
    for number in range(count):
        row = {}
        for name in names:
            value, shapes = conditions[name][number], conditions.get(name + _SHAPES)
            row[name] = value if shapes is None else value[tuple(map(slice, shapes[number].tolist()))]
        rows.append(row)
    return rows
