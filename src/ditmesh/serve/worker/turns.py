"""Turns of requests that keep state from step to step and therefore cannot share a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .protocol import running_indices


@dataclass(frozen=True)
class Waiting:
    """A request as `next_turn` sees it.

    Attributes:
        owner, priority: of its job.
        size: of its kept state, in requests of the model's default size.
        open: whether it has begun, so that something is kept of it.
        served: when it took its latest turn; 0: never.
    """

    owner: str
    priority: int
    size: float
    open: bool
    served: int


def next_turn(requests: Sequence[Waiting], most: int, room: float) -> tuple[int, list[int]]:
    """The index of the request that takes the next turn, and those of the open ones that are paused.

    Of every owner the most urgent requests go on, and those take turns. A request begins if what is kept of all open
    ones leaves room for it; until then the open ones go on, whatever their priority is.

    Args:
        requests: at least one, in the order in which they came.
        most: requests that take turns.
        room: requests of the default size that may be open, paused ones included. One may always be.
    """
    used = sum(one.size for one in requests if one.open)
    able = [place for place, one in enumerate(requests) if one.open or not used or used + one.size <= room]
    chosen = running_indices([(requests[place].owner, requests[place].priority) for place in able], most)
    able = [able[each] for each in chosen]
    urgent: dict[str, int] = {}
    for place in able:
        one = requests[place]
        urgent[one.owner] = max(urgent.get(one.owner, one.priority), one.priority)
    taking = [place for place in able if requests[place].priority == urgent[requests[place].owner]]
    first = min(taking, key=lambda place: (requests[place].served, place))
    return first, [place for place, one in enumerate(requests) if one.open and place not in taking]
