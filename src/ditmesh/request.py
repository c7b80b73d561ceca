"""The door to a pipeline's call: the boundary of a request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Call = tuple[tuple[Any, ...], dict[str, Any]]


class PipelineDoor:
    """Runs steps before every call of a pipeline.

    Python looks ``__call__`` up on the class, so the pipeline gets a subclass of its own class, of the same
    name, for as long as the door is open; `close` gives it its class back.

    Args:
        pipe: the pipeline.
        steps: each takes the call's arguments and returns those to use, in order.
        within: made anew for every call, which runs inside it.
        finish: takes the call's result and returns that to use.
    """

    def __init__(
        self,
        pipe: Any,
        steps: list[Callable[[tuple[Any, ...], dict[str, Any]], Call]],
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
        finish: Callable[[Any], Any] = lambda result: result,
    ) -> None:
        self._pipe = pipe
        self._class = type(pipe)
        call = self._class.__call__

        @functools.wraps(call)
        def through_the_door(pipe: Any, *args: Any, **kwargs: Any) -> Any:
            with within():
                for step in steps:
                    args, kwargs = step(args, kwargs)
                return finish(call(pipe, *args, **kwargs))

        members = {"__call__": through_the_door, "__module__": self._class.__module__}
        pipe.__class__ = type(self._class.__name__, (self._class,), members)

    def close(self) -> None:
        """Give the pipeline its own class back."""
        self._pipe.__class__ = self._class
