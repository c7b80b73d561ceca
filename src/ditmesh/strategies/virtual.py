"""Several virtual ranks in one process: a block runs once for each, and they meet where they need one another.

Each run is a coroutine (a greenlet) that is left at `ask` and goes on with the answer. All run in one thread,
one after the other, so the model's code needs to know nothing about it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

from ..errors import LayoutError

T = TypeVar("T")


@dataclass(frozen=True)
class _Question:
    """The request of a paused virtual rank."""

    question: Any


def ask(question: Any) -> Any:
    """Called inside a run: stop here until all runs have asked, and return this run's answer."""
    parent = getcurrent().parent
    assert parent is not None, "asked outside of a virtual rank"
    return parent.switch(_Question(question))


def run_together(
    runs: Sequence[Callable[[], T]],
    meet: Callable[[list[Any]], Sequence[Any]],
    enter: Callable[[int], None] = lambda place: None,
) -> list[T]:
    """The results of every function of ``runs``, each called as a coroutine, whose questions are answered together.

    ``meet`` takes the questions of all runs, in order, and returns the answers; ``enter`` is called with a run's place
    whenever it begins or goes on. `LayoutError`: some runs asked and others returned.
    """
    lets = [greenlet(run) for run in runs]
    for let in lets:
        # A coroutine starts with an empty context; attention's handler and all other variables belong to it.
        let.gr_context = contextvars.copy_context()
    try:
        states = [(enter(place), let.switch())[1] for place, let in enumerate(lets)]
        while any(isinstance(state, _Question) for state in states):
            if not all(isinstance(state, _Question) for state in states):
                raise LayoutError(
                    "some tiles of a block asked for attention and others did not; a block with calls that depend on "
                    "its tokens cannot be run tile by tile"
                )
            answers = meet([state.question for state in states])
            states = [
                (enter(place), let.switch(answer))[1]
                for place, (let, answer) in enumerate(zip(lets, answers, strict=True))
            ]
        return states
    finally:
        # After an exception: the others are ended where they stand, so that their own clean-up runs.
        for let in lets:
            if not let.dead:
                let.throw()
