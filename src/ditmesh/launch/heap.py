"""The C library's heap."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

# Bytes of free memory at the end of its heap that a process keeps.
KEPT_BYTES = 256 << 20
# The largest blocks that glibc takes from the heap, the most that it accepts; larger ones are mappings of their own.
_LARGEST_OF_HEAP_BYTES = 32 << 20
# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def return_free_memory() -> None:
    """Have the C library return memory that is free to the system: between live blocks glibc keeps it.

    Other C libraries have no such function; nothing happens with them.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_free_memory() -> bool:
    """Have the C library keep free memory between the calls of a model; for the whole process.

    A transformer's call frees tens of megabytes and needs them again at once: each page would be fetched and filled
    with zeros again. More than `KEPT_BYTES` is returned at once, and all of it by `return_free_memory`.

    Returns True if it does. False: the environment sets it otherwise, or the C library has no such settings.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    with suppress(AttributeError, OSError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        return bool(set_option(_MMAP_THRESHOLD, _LARGEST_OF_HEAP_BYTES)) and bool(
            set_option(_TRIM_THRESHOLD, KEPT_BYTES)
        )
    return False
