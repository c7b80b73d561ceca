"""The store by which ranks of one machine find one another: a file, which they look at often."""

from __future__ import annotations

import time
from datetime import timedelta

# Public, but undocumented.
from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage]

# Seconds between two looks, of which each is longer than the one before.
_SHORTEST_NAP, _LONGEST_NAP = 2e-4, 1e-2


class WatchedFile(Store):
    """torch's `FileStore`, but for its waits, which look every 10 ms: every new process group has several.

    It has to live as long as the groups that are made with it: torch holds its part in C++ alone.

    Args:
        path: of the file, the same on all ranks.
        world_size: how many ranks there are.
        timeout: of every wait, in seconds.
    """

    def __init__(self, path: str, world_size: int, timeout: float) -> None:
        super().__init__()
        # torch's own code asks the store for its timeout, which it has in C++.
        self.set_timeout(timedelta(seconds=timeout))
        self._file, self._seconds = FileStore(path, world_size), timeout

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there: `RuntimeError` if they are not in time."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        nap, limit = _SHORTEST_NAP, time.monotonic() + seconds
        while not self._file.check(keys):
            if time.monotonic() >= limit:
                raise RuntimeError(f"no rank has written {', '.join(keys)} in time")
            time.sleep(nap)
            nap = min(1.2 * nap, _LONGEST_NAP)

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        self.wait([key])
        return self._file.get(key)

    # What torch calls from C++ has to be methods of this class.
    def set(self, key: str, value: str) -> None:
        self._file.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._file.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._file.check(keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._file.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._file.delete_key(key)

    def num_keys(self) -> int:
        return self._file.num_keys()
