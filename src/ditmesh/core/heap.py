"""The C library's heap."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def return_free_memory() -> None:
    """Have the C library return memory that is free to the system: between live blocks glibc keeps it.

    Other C libraries have no such function; nothing happens with them.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
