"""Factors on the classes of terms, from steps that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..costs.hardware import Hardware
from ..costs.step import CLASSES, Term

# How firmly a factor stays at what the profile says, while few steps speak against it.
TRUST = 0.0005
# Turns of fitting the factors and how crowded a host is, each with the other as it was found.
ROUNDS = 20


def fitted(hardware: Hardware, measured: Sequence[tuple[Sequence[Term], int, float]]) -> Hardware:
    """The profile with the factors under which predictions are closest to measured steps, in relative terms.

    How much longer devices of a host take when several compute is fitted too: what a profile finds out about it with
    single operations is less than what a model's steps show, which want more of the memory.

    Args:
        hardware: the profile that the terms were predicted with.
        measured: terms of a step, how many ranks of a host run it, and its seconds.
    """
    import numpy as np

    if not measured:
        return hardware
    known, most = hardware.device.crowded, max(1, hardware.devices - 1)
    rows, rest, beside = [], [], []
    for terms, ranks, seconds in measured:
        parts = dict.fromkeys((*CLASSES, "idle"), 0.0)
        for term in terms:
            if term.kind in parts:
                parts[term.kind] += term.seconds / seconds
        among = min(1.0, (ranks - 1) / most)
        # Without the others beside them.
        alone = {name: 1.0 if name in ("transfer", "idle") else 1 + (known - 1) * among for name in parts}
        rows.append([parts[name] / alone[name] for name in CLASSES])
        rest.append(parts["idle"])
        beside.append([0.0 if name == "transfer" else among for name in CLASSES])
    base, shared, target = np.asarray(rows), np.asarray(beside), 1 - np.asarray(rest)
    # Each factor is drawn to 1.
    firm = np.sqrt(TRUST * len(rows))
    crowded, factors = known, np.ones(len(CLASSES))
    for _ in range(ROUNDS):
        crowd = base * (1 + (crowded - 1) * shared)
        factors = _least_squares(
            np.vstack([crowd, firm * np.eye(len(CLASSES))]), np.concatenate([target, np.full(len(CLASSES), firm)])
        )
        longer = (base * shared) @ factors
        if longer.any():
            crowded = float(np.clip(1 + longer @ (target - base @ factors) / (longer @ longer), 1.0, 8.0))
    scale = {
        name: round(float(hardware.scale.get(name, 1.0) * max(factor, 0.05)), 4)
        for name, factor in zip(CLASSES, factors, strict=True)
    }
    device = hardware.device.model_copy(update={"crowded": round(crowded, 4)})
    return hardware.model_copy(update={"scale": scale, "device": device})


def _least_squares(a: Any, b: Any) -> Any:
    """Least squares without negative factors: those that would be are left at zero."""
    import numpy as np

    free = list(range(a.shape[1]))
    found = np.zeros(a.shape[1])
    while free:
        solution = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
        negative = [at for at, value in zip(free, solution, strict=True) if value < 0]
        if not negative:
            found[free] = solution
            break
        free = [at for at in free if at not in negative]
    return found
