"""Atomic files, and data for JSON."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from itertools import count
from math import isfinite
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def written_whole(path: str | Path, replace: bool = True) -> Iterator[Path]:
    """A temporary file beside ``path`` to write to; when the block ends without an error it takes that name.

    ``replace``: a file of that name is replaced; False: it stays, even if another process makes it meanwhile.
    `FileExistsError`: there is such a file, and ``replace`` is False.
    """
    path = Path(path)
    temporary = path.with_name(f".{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        yield temporary
        if replace:
            temporary.replace(path)
            return
        try:
            # Unlike a rename, a link never takes the name of another file.
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:
            # File systems without hard links.
            if path.exists():
                raise FileExistsError(17, "File exists", str(path)) from None
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def lock_of(file: str | Path) -> IO[str] | None:
    """Lock a file for this process, until the result is closed or the process ends in any way.

    `OSError`: the file cannot be made.

    Returns:
        The open file with this process's number in it; None: another process, or another part of this one, holds it.
    """
    opened = Path(file).open("a+", encoding="utf-8")  # noqa: SIM115 - it stays open
    try:
        if fcntl is not None:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opened.seek(0)
        opened.truncate()
        opened.write(str(os.getpid()))
        opened.flush()
    except BlockingIOError:
        opened.close()
        return None
    except BaseException:
        opened.close()
        raise
    return opened


def digest_of_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; `OSError`: it cannot be read."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_names(path: str | Path) -> Iterator[Path]:
    """The names that a file may have, in order: ``a.png``, ``a-2.png``, ``a-3.png``, …"""
    path = Path(path)
    return (path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))


def finite(value: Any) -> Any:
    """The same data with None in the place of numbers that JSON cannot hold, lists for tuples, and text for keys."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
