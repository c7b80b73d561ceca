"""Methods replaced on one instance, and put back exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class replace_method:  # noqa: N801  (used like a function)
    """Replace ``owner.name`` on the instance; calling the result puts things back as they were."""

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self.original: Callable[..., Any] = getattr(owner, name)
        self._owner, self._name = owner, name
        self._had = vars(owner).get(name, _MISSING)
        vars(owner)[name] = replacement

    def __call__(self) -> None:
        if self._had is _MISSING:
            vars(self._owner).pop(self._name, None)
        else:
            vars(self._owner)[self._name] = self._had
