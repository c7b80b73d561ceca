"""System errors of the server's folder as server errors: a locked database differs from a full disk."""

from __future__ import annotations

import errno
import sqlite3

from ..errors import NoSpace, StorageError

# Kinds of failures by the system's error number, and by SQLite's primary code.
SYSTEM_CODES = {
    errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EFBIG: "full",
    errno.EACCES: "rights", errno.EPERM: "rights", errno.EROFS: "rights",
    errno.EMFILE: "descriptors", errno.ENFILE: "descriptors",
    errno.ENOTDIR: "place", errno.EISDIR: "place", errno.EEXIST: "place", errno.ENAMETOOLONG: "place",
    errno.ELOOP: "place",
}  # fmt: skip
SQLITE_CODES = {
    sqlite3.SQLITE_FULL: "full", sqlite3.SQLITE_BUSY: "locked", sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_CORRUPT: "broken", sqlite3.SQLITE_NOTADB: "broken", sqlite3.SQLITE_PERM: "rights",
    sqlite3.SQLITE_READONLY: "rights", sqlite3.SQLITE_AUTH: "rights", sqlite3.SQLITE_CANTOPEN: "open",
    sqlite3.SQLITE_IOERR: "disk", sqlite3.SQLITE_NOMEM: "memory",
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
    """The kind of failure, a key of ``WAYS_OUT``; None: a mistake in a statement, not a system failure."""
    if isinstance(error, OSError):
        return SYSTEM_CODES.get(error.errno or 0, "disk")
    return SQLITE_CODES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)


def storage_error(what: str, error: OSError | sqlite3.Error) -> StorageError | None:
    """The error for clients and the log; None: it is a mistake in a statement.

    Args:
        what: that could not be done, such as ``"cannot write /x"``.
    """
    kind = failure_kind(error)
    if kind is None:
        return None
    words = (error.strerror if isinstance(error, OSError) else None) or str(error)
    message = f"{what} ({words}); {WAYS_OUT[kind]}"
    if kind == "full":
        return NoSpace(message)
    return StorageError(message, passes=kind in TEMPORARY_FAILURES, broken=kind == "broken")
