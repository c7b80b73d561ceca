"""Factors on the classes of terms, from steps that were measured."""

from __future__ import annotations

from collections.abc import Sequence

from ..costs.hardware import Hardware
from ..costs.step import CLASSES, Term

# How firmly a factor stays at what the profile says, while few steps speak against it.
TRUST = 0.0005


def fitted(hardware: Hardware, measured: Sequence[tuple[Sequence[Term], float]]) -> Hardware:
    """The profile with the factors under which predictions are closest to measured steps, in relative terms.

    Args:
        hardware: the profile that the terms were predicted with.
        measured: terms of a step, and its seconds.
    """
    import numpy as np

    if not measured:
        return hardware
    rows, classes = [], list(CLASSES)
    for terms, seconds in measured:
        parts = dict.fromkeys(classes, 0.0)
        rest = 0.0
        for term in terms:
            if term.kind in parts:
                parts[term.kind] += term.seconds
            elif term.kind == "idle":
                rest += term.seconds
        rows.append([*(parts[name] / seconds for name in classes), rest / seconds])
    a = np.asarray(rows)
    target = 1 - a[:, -1]
    # Each factor is drawn to 1.
    a = np.vstack([a[:, :-1], np.sqrt(TRUST * len(rows)) * np.eye(len(classes))])
    target = np.concatenate([target, np.full(len(classes), np.sqrt(TRUST * len(rows)))])
    factors = _least_squares(a, target)
    scale = {
        name: round(float(hardware.scale.get(name, 1.0) * max(factor, 0.05)), 4)
        for name, factor in zip(classes, factors, strict=True)
    }
    return hardware.model_copy(update={"scale": scale})


def _least_squares(a: object, b: object) -> list[float]:
    """Least squares without negative factors: those that would be are left at zero."""
    import numpy as np

    a, b = np.asarray(a), np.asarray(b)
    free = list(range(a.shape[1]))
    found = np.zeros(a.shape[1])
    while free:
        solution = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
        negative = [at for at, value in zip(free, solution, strict=True) if value < 0]
        if not negative:
            found[free] = solution
            break
        free = [at for at in free if at not in negative]
    return found.tolist()
