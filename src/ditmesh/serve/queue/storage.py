"""System errors of the server's folder as server errors: a locked database differs from a full disk."""

from __future__ import annotations

import errno
import sqlite3

from ..errors import NoSpace, StorageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)
DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
PLACES = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)

# SQLite's primary codes by kind of failure; Python before 3.11 has only their texts.
CODES = {
    13: "full", 5: "locked", 6: "locked", 11: "broken", 26: "broken", 3: "rights", 8: "rights", 23: "rights",
    14: "open", 10: "disk", 7: "memory",
}  # fmt: skip
TEXTS = {
    "disk is full": "full", "locked": "locked", "malformed": "broken", "not a database": "broken",
    "readonly": "rights", "unable to open": "open", "disk I/O": "disk",
}  # fmt: skip
WAYS_OUT = {
    "full": "make room on the disk",
    "rights": "give the server's user the right to write there",
    "descriptors": "raise the limit of open files (ulimit -n) or ask again",
    "place": "give another folder",
    "disk": "check the disk for errors (dmesg)",
    "locked": "end the other process that uses it",
    "broken": "start the server again, which moves it aside",
    "open": "give the server's user the right to open it, or raise the limit of open files (ulimit -n)",
    "memory": "free memory",
}
# Temporary failures.
TEMPORARY_FAILURES = ("descriptors", "locked", "memory")


def failure_kind(error: OSError | sqlite3.Error) -> str | None:
    """The kind of failure, a key of ``WAYS_OUT``; None: a mistake in a statement, not a system failure.

    Args:
        error: of the system or of SQLite.
    """
    if isinstance(error, OSError):
        named = {**dict.fromkeys(FULL, "full"), **dict.fromkeys(RIGHTS, "rights")}
        named |= {**dict.fromkeys(DESCRIPTORS, "descriptors"), **dict.fromkeys(PLACES, "place")}
        return named.get(error.errno or 0, "disk")
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return CODES.get(code & 0xFF)
    return next((kind for text, kind in TEXTS.items() if text in str(error)), None)


def storage_error(what: str, error: OSError | sqlite3.Error) -> StorageError | None:
    """The error for clients and the log.

    Args:
        what: that could not be done, such as ``"cannot write /x"``.

    Returns:
        None: it is a mistake in a statement.
    """
    kind = failure_kind(error)
    if kind is None:
        return None
    words = (error.strerror if isinstance(error, OSError) else None) or str(error)
    message = f"{what} ({words}); {WAYS_OUT[kind]}"
    if kind == "full":
        return NoSpace(message)
    return StorageError(message, passes=kind in TEMPORARY_FAILURES, broken=kind == "broken")
