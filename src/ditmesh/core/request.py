"""A request: its boundary, which is a pipeline's call, and the values that last until it ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, SupportsIndex, TypeVar

from .patching import refuse_pickling

T = TypeVar("T")

# The attribute of a `PipelineCall`'s class that says whether it does nothing any more.
_UNDONE = "_ditmesh_undone"


def is_stand_in(kind: type) -> bool:
    """True if a class is one that `PipelineCall` has put in the place of an object's own."""
    return _UNDONE in vars(kind)


class RequestLeft(BaseException):
    """Leaves a pipeline's call between two calls of its transformer, on all ranks alike: its links stay good.

    Passes every ``except Exception``.
    """


class RequestValue(Generic[T]):
    """What a part of the engine keeps of the open request from step to step."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.value = make()

    def renew(self) -> T:
        """Make another value, for a request that begins; returns the one before."""
        before, self.value = self.value, self._make()
        return before


class PipelineCall:
    """Something around every call of one pipeline, until `undo`.

    Python looks ``__call__`` up on the class, so the pipeline gets a subclass of its own class, of the same name.
    ``around``: called as ``around(proceed, *args, **kwargs)``; ``proceed(*args, **kwargs)`` is the pipeline's own call.
    """

    def __init__(self, pipe: Any, around: Callable[..., Any]) -> None:
        self._pipe, self._around = pipe, around
        kind = type(pipe)
        call = kind.__call__

        @functools.wraps(call)
        def wrapped(pipe: Any, *args: Any, **kwargs: Any) -> Any:
            return self._around(functools.partial(call, pipe), *args, **kwargs)

        def reduced(pipe: Any, protocol: SupportsIndex) -> Any:
            return refuse_pickling(kind, kind.__name__, pipe, protocol)

        self._class = kind
        members = {
            "__call__": wrapped,
            "__reduce_ex__": reduced,
            "__module__": kind.__module__,
            _UNDONE: False,
        }
        self._subclass: Any = type(kind.__name__, (kind,), members)
        pipe.__class__ = self._subclass

    def undo(self) -> None:
        """Give the pipeline its own class back; under another library's subclass, do nothing from now on."""
        self._around = lambda proceed, *args, **kwargs: proceed(*args, **kwargs)
        setattr(self._subclass, _UNDONE, True)
        if type(self._pipe) is self._subclass:
            kind = self._class
            # Those that lay under this one and were undone before it.
            while vars(kind).get(_UNDONE):
                kind = kind.__bases__[0]
            self._pipe.__class__ = kind
