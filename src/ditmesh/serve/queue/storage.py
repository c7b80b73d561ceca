"""System errors of the server's folder as server errors: a locked database differs from a full disk."""

from __future__ import annotations

import errno
import sqlite3

from ..errors import NoSpace, StorageError

# Kinds of failures by the system's error number, and by SQLite's primary code.
SYSTEM_KINDS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "full"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM), "busy"),
}
SQLITE_KINDS = {
    sqlite3.SQLITE_FULL: "full",
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM), "busy"),
    **dict.fromkeys((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB), "broken"),
}
WAYS_OUT = {
    "full": "make room on the disk",
    "busy": "end the program that uses it or raise the limit of open files (ulimit -n), and ask again",
    "broken": "move the folder away, and start the server again",
    "disk": "let the server's user write there, check the disk for errors (dmesg), or give another folder",
}


def storage_error(what: str, error: OSError | sqlite3.Error) -> StorageError:
    """The error for clients and the log.

    Args:
        what: that could not be done, such as ``"cannot write /x"``.

    Raises:
        sqlite3.Error: it is a mistake in a statement.
    """
    if isinstance(error, OSError):
        words, kind = error.strerror or str(error), SYSTEM_KINDS.get(error.errno or 0, "disk")
    else:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISUSE):
            raise error
        words, kind = str(error), SQLITE_KINDS.get(code, "disk")
    message = f"{what} ({words}); {WAYS_OUT[kind]}"
    if kind == "full":
        return NoSpace(message)
    return StorageError(message, passes=kind == "busy", broken=kind == "broken")
