"""The state of a request between two of its steps, as a value that can be put aside and taken up again.

Several requests can be open on the same ranks if each finds its own keys, counters and messages when its next step
begins. So nothing of a request lies in the objects that work for all of them: they have a `Keeper` each, which finds
their value in the state that is in hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class KeptState:
    """All that is kept of one request. The last reference to it keeps its tensors alive.

    Attributes:
        begun: whether a request has begun with it.
    """

    def __init__(self) -> None:
        self.begun = False
        self.values: dict[Keeper[Any], Any] = {}


class Keeper(Generic[T]):
    """One kind of kept value: its place in every state. Made by `KeptStates.keeper`."""

    def __init__(
        self,
        states: KeptStates,
        make: Callable[[], T],
        settle: Callable[[T], None],
        resume: Callable[[T], None],
        size: Callable[[T], int],
    ) -> None:
        self._states, self._make = states, make
        self.settle, self.resume, self.size = settle, resume, size

    @property
    def value(self) -> T:
        """The value of the request in hand."""
        values = self._states.current.values
        try:
            return values[self]
        except KeyError:
            value = values[self] = self._make()
            return value

    def renew(self) -> T:
        """Another value for the request in hand, as of one that begins; returns the one that it had."""
        before = self.value
        self._states.current.values[self] = self._make()
        return before

    def every(self) -> Iterator[T]:
        """The values of all requests that are open."""
        for state in [*self._states.open]:
            if self in state.values:
                yield state.values[self]


class KeptStates:
    """The states of all open requests on one rank, of which one is in hand.

    Attributes:
        current: the one in hand.
        open: all that are referred to.
    """

    def __init__(self) -> None:
        self._keepers: list[Keeper[Any]] = []
        self.open: weakref.WeakSet[KeptState] = weakref.WeakSet()
        self._own = self.new()
        self.current = self._own

    def new(self) -> KeptState:
        """The state of a request that has not begun."""
        state = KeptState()
        self.open.add(state)
        return state

    def keeper(
        self,
        make: Callable[[], T],
        settle: Callable[[T], None] = lambda _: None,
        resume: Callable[[T], None] = lambda _: None,
        size: Callable[[T], int] = lambda _: 0,
    ) -> Keeper[T]:
        """A kind of kept value.

        Args:
            make: a value of a request that has not begun.
            settle: waits for the messages of a value that are on their way, when its request is put aside; what they
                bring stays in the value, and is used when it would have been used without a pause.
            resume: is told when the request goes on.
            size: bytes of a value.
        """
        keeper = Keeper(self, make, settle, resume, size)
        self._keepers.append(keeper)
        return keeper

    @property
    def shared(self) -> bool:
        """True if no request's own state is in hand."""
        return self.current is self._own

    def put_aside(self) -> None:
        """Put the state in hand aside: none of its messages is on its way any more.

        Raises:
            PeerError: another rank has gone. The state is out of hand all the same, and of no more use.
        """
        state, self.current = self.current, self._own
        for keeper, value in [*state.values.items()]:
            keeper.settle(value)

    def take_up(self, state: KeptState) -> None:
        """Take a state in hand that was put aside, or that is new."""
        self.current = state
        for keeper, value in [*state.values.items()]:
            keeper.resume(value)

    def drop(self) -> None:
        """Let go of the state in hand after its request has ended, or failed."""
        self.current = self._own

    def nbytes(self, state: KeptState) -> int:
        """Bytes that a state keeps on this rank."""
        return sum(keeper.size(value) for keeper, value in state.values.items())
