"""API keys."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from pathlib import Path

from ...core.files import written_whole
from ...errors import InputError

# Keys are 256 random bits, too many to be tried out: one round of SHA-256 hides them as well as a slow hash would.
PREFIX = "dm-"
LINE = re.compile(r"(?P<hash>[0-9a-f]{64})(?:\s+(?P<name>\S.*))?")
# Seconds between two checks whether the file has changed.
RELOAD_SECONDS = 1.0


def digest_of_key(key: str) -> str:
    """SHA-256 of a key, in hexadecimal, as it is stored in the file and as the owner of jobs."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key(file: str | Path, name: str = "") -> str:
    """Create a key, and append its hash to the key file, which is created if needed.

    Args:
        file: where the hash goes; readable to its owner alone when it is made.
        name: of the client, for those who read the file.

    Returns:
        The key, which cannot be found out from the file.

    Raises:
        InputError: the file holds something else, or cannot be written.
    """
    path, key = Path(file), PREFIX + secrets.token_urlsafe(32)
    if "\n" in name or "\r" in name:
        raise InputError(f"the key's name {name!r} has several lines; use one")
    if path.exists():
        read_keys(path)
    try:
        lines = path.read_text(encoding="utf-8") if path.exists() else "# SHA-256 of each key, and its owner's name.\n"
        with written_whole(path) as temporary:
            temporary.touch(mode=0o600)
            line = f"{digest_of_key(key)} {name}".rstrip()
            temporary.write_text(f"{lines.rstrip()}\n{line}\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot write the keys {str(path)!r} ({error.strerror or error}); choose another file"
        ) from None
    return key


def read_keys(file: str | Path) -> dict[str, str]:
    """Names by hashes. Raises `InputError`: the file cannot be read, or a line is no hash."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot read the keys {str(file)!r} ({reason}); make one with ditmesh serve --keys FILE --new-key NAME"
        ) from None
    names: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None:
            # The line itself may be a key that was put there as it is.
            raise InputError(
                f"line {number} of the keys {str(file)!r} is not a SHA-256 in hexadecimal; write keys there with "
                "ditmesh serve --keys FILE --new-key NAME"
            )
        names[match["hash"]] = match["name"] or ""
    return names


class Keys:
    """The keys of a file. Added or removed lines take effect within a second.

    Raises `InputError`: the file cannot be read, or holds no key.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._hashes = [value.encode() for value in read_keys(file)]
        self._stamp: tuple[int, int] | None = None
        self._looked = time.monotonic()
        if not self._hashes:
            raise InputError(
                f"the keys {str(file)!r} hold none; make one with ditmesh serve --keys FILE --new-key NAME"
            )

    def owner(self, key: str) -> str | None:
        """The owner's hash; None: there is no such key. Takes the same time for every key."""
        now = time.monotonic()
        if now >= self._looked + RELOAD_SECONDS:
            self._looked = now
            self._read_again()
        given, found = digest_of_key(key), False
        for known in self._hashes:
            found |= hmac.compare_digest(given.encode(), known)
        return given if found else None

    def _read_again(self) -> None:
        try:
            status = os.stat(self._file)
            stamp = status.st_mtime_ns, status.st_size
            if stamp == self._stamp:
                return
            self._hashes = [value.encode() for value in read_keys(self._file)]
        except (InputError, OSError):
            # The file is being written or is missing: the known keys stay valid until it can be read.
            return
        self._stamp = stamp
