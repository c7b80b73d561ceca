"""Factors on the classes of terms, from steps that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .costs.hardware import Hardware
from .costs.step import CLASSES, Term

# The strength with which a factor stays at the profile's value, while few steps speak against it.
TRUST = 0.0005
# Seconds that the wait for the last rank is counted in, so that it is drawn to none as factors are to 1.
MOMENT = 1e-2
# Turns of fitting the factors and the contention, each with the other as it was found.
ROUNDS = 20


def fit_profile(hardware: Hardware, measured: Sequence[tuple[Sequence[Term], int, float]]) -> Hardware:
    """The profile with the factors under which predictions are closest to measured steps, in relative terms.

    Two figures of the profile are fitted too, as single operations say less about them than a model's steps: how much
    longer devices of a host take when several compute, as steps want more of the memory; and how long ranks wait for
    the last of them wherever they meet, as operations and moments differ.

    Args:
        hardware: the profile that the terms were predicted with.
        measured: terms of a step, how many ranks of a host run it, and its seconds.
    """
    import numpy as np

    if not measured:
        return hardware
    known, most = hardware.device.contention_factor, max(1, hardware.devices - 1)
    rows, rest, beside, meetings = [], [], [], []
    for terms, ranks, seconds in measured:
        parts = dict.fromkeys((*CLASSES, "idle"), 0.0)
        met = 0.0
        for term in terms:
            if term.kind in parts:
                parts[term.kind] += (
                    term.seconds - term.meetings * hardware.named(term.through).sync_wait_seconds
                ) / seconds
            met += term.meetings * MOMENT / seconds
        among = min(1.0, (ranks - 1) / most)
        # The time of the same work with only one rank running.
        alone = {name: 1.0 if name in ("transfer", "idle") else 1 + (known - 1) * among for name in parts}
        rows.append([parts[name] / alone[name] for name in CLASSES])
        rest.append(parts["idle"])
        meetings.append(met)
        beside.append([0.0 if name == "transfer" else among for name in CLASSES])
    base, shared, target = np.asarray(rows), np.asarray(beside), 1 - np.asarray(rest)
    waits = np.asarray(meetings)
    # Each factor is drawn to 1, and the wait to none.
    firm, several = np.sqrt(TRUST * len(rows)), len(CLASSES)
    drawn = np.append(np.full(several, firm), 0.0)
    contention, factors, wait = known, np.ones(several), 0.0
    for _ in range(ROUNDS):
        columns = np.column_stack([base * (1 + (contention - 1) * shared), waits])
        found = _least_squares(np.vstack([columns, firm * np.eye(several + 1)]), np.concatenate([target, drawn]))
        factors, wait = found[:-1], found[-1]
        longer = (base * shared) @ factors
        if longer.any():
            even = base @ factors + wait * waits
            contention = float(np.clip(1 + longer @ (target - even) / (longer @ longer), 1.0, 8.0))
    scale = {
        name: round(float(hardware.scale.get(name, 1.0) * max(factor, 0.05)), 4)
        for name, factor in zip(CLASSES, factors, strict=True)
    }
    device = hardware.device.model_copy(update={"contention_factor": round(contention, 4)})
    link = hardware.link.model_copy(update={"sync_wait_seconds": round(float(wait) * MOMENT, 8)})
    return hardware.model_copy(update={"scale": scale, "device": device, "link": link})


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
