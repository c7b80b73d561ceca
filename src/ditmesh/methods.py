"""Methods replaced on one instance, and put back exactly."""

from __future__ import annotations

from .core.patching import Patch


class replace_method(Patch):  # noqa: N801  (used like a function)
    """Replace ``owner.name`` on the instance; calling the result puts things back as they were."""

    def __call__(self) -> None:
        self.undo()
