"""A pipeline's call, wrapped: the boundary of a request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class RequestLeft(BaseException):
    """Leaves a pipeline's call between two calls of its transformer, on all ranks alike: its links stay good.

    Passes every ``except Exception``.
    """


class PipelineCall:
    """Something around every call of one pipeline, until `undo`.

    Python looks ``__call__`` up on the class, so the pipeline gets a subclass of its own class, of the same name.

    Args:
        around: called as ``around(proceed, *args, **kwargs)``; ``proceed(*args, **kwargs)`` is the pipeline's own call.
    """

    def __init__(self, pipe: Any, around: Callable[..., Any]) -> None:
        self._pipe, self._around = pipe, around
        own = type(pipe)
        call = own.__call__

        @functools.wraps(call)
        def wrapped(pipe: Any, *args: Any, **kwargs: Any) -> Any:
            return self._around(functools.partial(call, pipe), *args, **kwargs)

        self._class = own
        self._subclass: Any = type(own.__name__, (own,), {"__call__": wrapped, "__module__": own.__module__})
        pipe.__class__ = self._subclass

    @property
    def outermost(self) -> bool:
        """True if a call comes here first."""
        return type(self._pipe) is self._subclass

    def undo(self) -> None:
        """Give the pipeline its own class back; under another library's subclass, do nothing from now on."""
        self._around = lambda proceed, *args, **kwargs: proceed(*args, **kwargs)
        self._subclass._ditmesh_undone = True
        if type(self._pipe) is self._subclass:
            own = self._class
            # Those that lay under this one and were undone before it.
            while vars(own).get("_ditmesh_undone"):
                own = own.__bases__[0]
            self._pipe.__class__ = own
