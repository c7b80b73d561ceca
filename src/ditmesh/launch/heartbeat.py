"""Heartbeats of ranks on other hosts, one a second, through the rendezvous store.

A rank that waits for another one says so as well: its thread has nothing else to do. A stopped rank does not, nor one
that has lost its host or network. So after a deadline the one that all waited for is named, and not the one that this
rank happened to wait for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Seconds between two heartbeats, for a check of the other ranks, and for the store to answer.
INTERVAL, LOOK, ANSWER = 1.0, 4.0, 5.0


class Heartbeat:
    """A thread that increments this rank's counter in a store, and reads those of the other ranks.

    Args:
        store: a connection of its own, with answers within `ANSWER` seconds.
        hosts: names of the hosts of all ranks.
    """

    def __init__(self, store: Store, rank: int, hosts: Sequence[str]) -> None:
        self._store, self._rank, self._hosts = store, rank, hosts
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="ditmesh-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeats."""
        self._stop.set()

    def silent(self) -> list[int]:
        """Ranks without heartbeats during `LOOK` seconds; rank 0 if its store does not answer."""
        try:
            before = self._counts()
            time.sleep(LOOK)
            after = self._counts()
        except RuntimeError:
            return [0] if self._rank else []
        return [rank for rank in range(len(self._hosts)) if rank != self._rank and before[rank] == after[rank]]

    def describe(self, silent: Sequence[int]) -> str:
        """A sentence about silent ranks."""
        names = " and ".join(f"rank {rank} on {self._hosts[rank]}" for rank in silent)
        return (
            f"{names} of {len(self._hosts)} ranks {'says' if len(silent) == 1 else 'say'} nothing any more: ended, "
            "stopped, or cut off from the network; see what stands in the output there, and start the job again"
        )

    def _beat(self) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            # Rank 0 may have left, and the store with it.
            with suppress(RuntimeError), self._lock:
                self._store.set(f"beat-{self._rank}", str(count))
            self._stop.wait(INTERVAL)

    def _counts(self) -> list[bytes]:
        with self._lock:
            keys = [f"beat-{rank}" for rank in range(len(self._hosts))]
            return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
