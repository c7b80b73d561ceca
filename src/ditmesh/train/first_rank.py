"""What the first rank of a run does for all of them: folders, files and services that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..comm import Link
from ..errors import InputError

T = TypeVar("T")


def on_first(link: Link, call: Callable[[], T], shared: bool = True) -> T:
    """Call a function on the first rank; the others get its result, or None if not ``shared``. Collective.

    Raises:
        InputError: of the first rank, on all of them; so is what its system refuses.
    """
    result: Any = None
    error: InputError | None = None
    if link.rank == 0:
        try:
            result = call()
        except (InputError, OSError) as caught:
            error = caught if isinstance(caught, InputError) else InputError(str(caught))
    error, told = link.broadcast_object((error, result if shared else None))
    if error is not None:
        raise error
    return told if shared else result
