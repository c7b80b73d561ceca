"""Seconds of requests' calls, as measured on the ranks, and guesses for calls without a measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

# Measurements of a call that are kept; the median of the latest ones counts.
KEPT = 7
# Relative time of a call that is shared over n ranks and was never measured, in the place of 1 / n; and of a row more
# in a batch. Both are hopeful, so that they are tried, and measured, when ranks have nothing else to do.
HOPED_SHARE, HOPED_ROW = 1.1, 0.8
# Seconds of a call of a model of which nothing is known.
UNKNOWN = 0.2
# The parts of a request that no step is: text encoders before the steps, the autoencoder after them.
BEFORE, AFTER = "before", "after"


class Kind(NamedTuple):
    """Requests that cost the same a step.

    Attributes:
        model: name of the model.
        width, height, frames: of a result.
        guided: guidance runs two branches.
    """

    model: str
    width: int
    height: int
    frames: int = 1
    guided: bool = True

    @property
    def size(self) -> float:
        """Relative work of a step among requests of one model."""
        return float(self.width * self.height * self.frames * (1 + self.guided))


class Mode(NamedTuple):
    """A way in which ranks share a call of a transformer.

    Attributes:
        rows: ranks that share the rows of a call (branches of guidance, several requests).
        tokens: ranks that share the tokens of a row.
    """

    rows: int = 1
    tokens: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.rows * self.tokens

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"


ALONE = Mode()


@dataclass
class StepCosts:
    """Seconds of calls. The same additions in the same order give the same answers on every rank.

    Args:
        prior: seconds of a call alone on one rank by its kind, from a cost model, while nothing is measured; None: it
            does not know either.
        share: by kind and mode, the time relative to one rank that a cost model predicts; None: it does not know.
    """

    prior: Callable[[Kind], float | None] | None = None
    share: Callable[[Kind, Mode], float | None] | None = None
    calls: dict[tuple[Kind, Mode, int], list[float]] = field(default_factory=dict)
    parts: dict[tuple[Kind, str], list[float]] = field(default_factory=dict)
    per_step: dict[str, float] = field(default_factory=dict)
    # Number of additions, and answers since the last one.
    version: int = 0
    _known: dict[tuple[Kind, Mode, int], float] = field(default_factory=dict, repr=False)
    _parts: dict[tuple[Kind, str], float] = field(default_factory=dict, repr=False)

    def _changed(self) -> None:
        self.version += 1
        self._known.clear()
        self._parts.clear()

    def add(self, kind: Kind, mode: Mode, together: int, seconds: float) -> None:
        """Record a call of a transformer for ``together`` requests."""
        key = kind, mode, together
        _keep(self.calls.setdefault(key, []), seconds)
        if _apart(self._call(*key), self._known.get(key)):
            self._changed()

    def add_part(self, kind: Kind, part: str, seconds: float) -> None:
        """Record all calls before the first step of a request (`BEFORE`), or after the last one (`AFTER`)."""
        key = kind, part
        _keep(self.parts.setdefault(key, []), seconds)
        if _apart(self._part(*key), self._parts.get(key)):
            self._changed()

    def add_steps(self, model: str, calls: int, steps: int) -> None:
        """Record how many calls of a transformer the steps of a request took."""
        if steps > 0 and calls > 0:
            before, self.per_step[model] = self.per_step.get(model), calls / steps
            if before != self.per_step[model]:
                self._changed()

    # ---- answers

    def knows(self, model: str) -> bool:
        """True if a call of a model was measured."""
        return any(kind.model == model for kind, _, _ in self.calls)

    def measured(self, kind: Kind, mode: Mode = ALONE, together: int = 1) -> bool:
        """True if such a call was measured at least twice: the first one may be slow."""
        return len(self.calls.get((kind, mode, together), ())) > 1

    def call(self, kind: Kind, mode: Mode = ALONE, together: int = 1) -> float:
        """Seconds of a call of a transformer."""
        key = kind, mode, together
        if key not in self._known:
            self._known[key] = self._call(*key)
        return self._known[key]

    def _call(self, kind: Kind, mode: Mode, together: int) -> float:
        found = self.calls.get((kind, mode, together), [])
        if len(found) > 2:
            return median(found)
        if mode == ALONE and together == 1 and found:
            return min(found)
        guess = self._guess(kind, mode, together)
        return min([guess, *found])

    def _seen(self, kind: Kind, mode: Mode) -> float:
        """The seconds of a measured call: the least of two, the median of more."""
        found = self.calls[kind, mode, 1]
        return median(found) if len(found) > 2 else min(found)

    def _guess(self, kind: Kind, mode: Mode, together: int) -> float:
        if together > 1:
            known = [n for n in range(1, together) if self.measured(kind, mode, n)]
            near = max(known, default=1)
            base = self.call(kind, mode, near)
            # Beyond what is known rows cost what they cost there; more of them were no better.
            row = base / near if near > 1 else base * HOPED_ROW
            return base + row * (together - near)
        if mode == ALONE:
            return self._alone(kind)
        alone = self.call(kind)
        predicted = None if self.share is None else self.share(kind, mode)
        share = HOPED_SHARE / mode.ranks if predicted is None else predicted
        # What a smaller or larger request of the model has shown.
        others = [one for one, how, n in self.calls if one.model == kind.model and how == mode and n == 1]
        if others := [one for one in others if self.measured(one, mode) and self.measured(one) and one != kind]:
            near = min(others, key=lambda one: abs(one.size - kind.size))
            share = self._seen(near, mode) / self._seen(near, ALONE)
        return alone * share

    def _alone(self, kind: Kind) -> float:
        others = [one for one, mode, n in self.calls if one.model == kind.model and mode == ALONE and n == 1]
        if others:
            near = min(others, key=lambda one: (abs(one.size - kind.size), one))
            return self.call(near) * max(kind.size / near.size, 0.1)
        predicted = None if self.prior is None else self.prior(kind)
        return UNKNOWN if predicted is None else predicted

    def part(self, kind: Kind, part: str) -> float:
        """Seconds of what comes before the steps of a request, or after them."""
        if (kind, part) not in self._parts:
            self._parts[kind, part] = self._part(kind, part)
        return self._parts[kind, part]

    def _part(self, kind: Kind, part: str) -> float:
        found = self.parts.get((kind, part))
        if found:
            return median(found)
        others = [one for one, name in self.parts if one.model == kind.model and name == part]
        if not others:
            return 0.0
        near = min(others, key=lambda one: (abs(one.size - kind.size), one))
        # Text encoders do not see the size of the result.
        return median(self.parts[near, part]) * (1.0 if part == BEFORE else max(kind.size / near.size, 0.1))

    def calls_of(self, kind: Kind, steps: int) -> int:
        """Calls of a transformer in so many steps."""
        return max(1, round(steps * self.per_step.get(kind.model, 1.0))) if steps else 0

    def request(self, kind: Kind, steps: int, mode: Mode = ALONE) -> float:
        """Seconds of a whole request that has the ranks of a mode for itself."""
        return self.part(kind, BEFORE) + self.calls_of(kind, steps) * self.call(kind, mode) + self.part(kind, AFTER)

    # ---- between processes

    def table(self) -> CostTable:
        """The known costs, to be sent to another process."""
        return CostTable(
            {key: list(values) for key, values in self.calls.items()},
            {key: list(values) for key, values in self.parts.items()},
            dict(self.per_step),
        )

    def take(self, table: CostTable) -> None:
        """Know what another process knows, in the place of what was known."""
        self.calls, self.parts, self.per_step = dict(table.calls), dict(table.parts), dict(table.per_step)
        self._changed()


@dataclass(frozen=True)
class CostTable:
    """The measurements of `StepCosts`, as data."""

    calls: Mapping[tuple[Kind, Mode, int], list[float]]
    parts: Mapping[tuple[Kind, str], list[float]]
    per_step: Mapping[str, float]


def _apart(value: float, known: float | None) -> bool:
    """True if a value differs so much from the known one that decisions should change."""
    return known is None or abs(value - known) > 0.03 * known


def _keep(values: list[float], seconds: float) -> None:
    values.append(seconds)
    del values[:-KEPT]


def sizes_of(ranks: int) -> list[int]:
    """Numbers of ranks that may share a call: each divides the next one, so that blocks of any of them fit together.

    Args:
        ranks: of the pool.
    """
    sizes = [1]
    for size in range(2, ranks + 1):
        if ranks % size == 0 and size % sizes[-1] == 0 and (size <= 2 * sizes[-1] or size == ranks):
            sizes.append(size)
    return sizes


def modes_of(ranks: int, heads: int | None, guided: bool, most: Iterable[int] = ()) -> list[Mode]:
    """The ways in which so many ranks may share a call of a transformer, one rank first.

    Args:
        ranks: of the pool.
        heads: of the attention; None: not known. Ranks that share tokens beyond them share them as a ring.
        guided: calls may have two rows for the branches of guidance.
        most: numbers of ranks that are allowed; empty: all of `sizes_of`.
    """
    allowed = set(most) or set(sizes_of(ranks))
    modes = [ALONE]
    for size in sizes_of(ranks)[1:]:
        if size in allowed:
            if guided and size % 2 == 0:
                modes.append(Mode(2, size // 2))
            modes.append(Mode(1, size))
    return modes
