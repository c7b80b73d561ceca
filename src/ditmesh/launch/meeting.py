"""The rendezvous of ranks on several hosts: one address, the same versions, a deadline; then a heartbeat a second.

Before the first collective every rank leaves a note at the store of `torch.distributed`: its host, its address and its
versions. A rank that does not come, or comes with something else, is named. Only the monotonic clock of each host is
asked, never what time it is.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from .._version import library_versions
from ..errors import MeetingError, reason_of
from .devices import interface_of, use_interface

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Versions that must be the same on all hosts.
COMPARED_VERSIONS = ("ditmesh", "torch", "diffusers", "python")
# Seconds between two heartbeats, for a check of the other ranks, and for the store to answer.
INTERVAL, LOOK, ANSWER = 1.0, 4.0, 5.0


class Meeting(NamedTuple):
    """Connected ranks.

    Attributes:
        store: by which process groups are made.
        rank, hosts: which rank this is; names of the hosts of all.
        place: address and port of the store.
    """

    store: Store
    rank: int
    hosts: tuple[str, ...]
    place: str

    def heartbeat(self) -> Heartbeat:
        """Start this rank's heartbeats, over a separate connection."""
        return Heartbeat(
            _store(self.rank, self.hosts[self.rank], self.place, ANSWER, opens=False), self.rank, self.hosts
        )


def meet(rank: int, world_size: int, timeout: float) -> Meeting:
    """Wait for all ranks at ``MASTER_ADDR`` and ``MASTER_PORT``.

    ``timeout``: seconds until all have to be there. `MeetingError`: they are not, they cannot reach one another, or
    their versions differ.
    """
    # Public, but undocumented.
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    limit, place = time.monotonic() + timeout, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    mine = _note()
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _store(rank, mine["host"], place, timeout, opens)
    notes = PrefixStore("ditmesh", store)
    keys = [str(other) for other in range(world_size)]
    try:
        notes.set(str(rank), json.dumps(mine))
        try:
            notes.wait(keys, timedelta(seconds=max(0.001, limit - time.monotonic())))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not notes.check([key])]
            if not missing:
                raise
            names = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} of {world_size}"
            raise MeetingError(
                f"{names} did not come to {place} within {timeout:g} s; start all ranks within that time with the same "
                "--master-addr and --master-port, or give more with --timeout"
            ) from error
        every = [json.loads(notes.get(key)) for key in keys]
        # The rank that keeps the store leaves only after all ranks have read it.
        notes.set(f"read-{rank}", "")
        if rank == 0:
            notes.wait([f"read-{other}" for other in keys], timedelta(seconds=max(1.0, limit - time.monotonic())))
    except MeetingError:
        raise
    except RuntimeError as error:
        raise MeetingError(
            f"rank {rank} on {mine['host']} has lost rank 0 at {place} before all ranks had come; see what that says"
        ) from error
    _compare(every)
    return Meeting(store, rank, tuple(one["host"] for one in every), place)


def _store(rank: int, host: str, place: str, timeout: float, opens: bool) -> Store:
    """The store at an address, which rank 0 ``opens`` there unless an agent of torchrun has."""
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    address, _, port = place.rpartition(":")
    try:
        # Each attempt of an agent uses separate keys.
        attempt, limit = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), timedelta(seconds=timeout)
        options: dict[str, Any] = {"is_master": opens, "wait_for_workers": False, "multi_tenant": True}
        return PrefixStore(f"attempt-{attempt}", TCPStore(address, int(port), None, timeout=limit, **options))
    except (RuntimeError, ValueError) as error:
        if opens:
            text = str(error)
            why = "the address is in use" if "in use" in text or "EADDRINUSE" in text else text.splitlines()[0][:100]
            raise MeetingError(
                f"rank 0 on {host} cannot open port {port} ({why}); choose another with --master-port"
            ) from error
        raise MeetingError(
            f"rank {rank} on {host} did not reach rank 0 at {place} within {timeout:g} s; give the first host's "
            "address as --master-addr on every host, and open that port between them"
        ) from error


def _note() -> dict[str, Any]:
    """This rank's data for the others; also sets gloo's interface to the one that reaches rank 0."""
    note = {"host": socket.gethostname(), "address": "", "versions": library_versions()}
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return note
    master = os.environ["MASTER_ADDR"]
    try:
        # Nothing is sent: the local address of the route there.
        family, kind, protocol, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            address = probe.getsockname()[0]
    except OSError as error:
        raise MeetingError(
            f"MASTER_ADDR={master!r} cannot be reached from {note['host']} ({reason_of(error)}); give the first "
            "host's address as --master-addr on every host"
        ) from error
    if name := interface_of(address):
        use_interface(name, nccl=False)
    return {**note, "address": address}


def _compare(every: Sequence[dict[str, Any]]) -> None:
    """Reject ranks that cannot work together: `MeetingError`."""
    first = every[0]
    for rank, note in enumerate(every):
        if other := [name for name in COMPARED_VERSIONS if note["versions"].get(name) != first["versions"].get(name)]:
            name = other[0]
            raise MeetingError(
                f"rank {rank} on {note['host']} has {name} {note['versions'].get(name)}, and rank 0 on {first['host']} "
                f"{first['versions'].get(name)}; install the same on all hosts"
            )
    # If all of them are on the loopback, it is one host's.
    places = {rank: note["address"].partition("%")[0] for rank, note in enumerate(every) if note["address"]}
    inside = [rank for rank, address in places.items() if ipaddress.ip_address(address).is_loopback]
    if 0 < len(inside) < len(every):
        note = every[inside[0]]
        raise MeetingError(
            f"MASTER_ADDR={os.environ['MASTER_ADDR']} leads to the loopback on {note['host']}, where no other host "
            "reaches it; give the first host's address in the network that hosts share as --master-addr"
        )


def join_error(rank: int, error: RuntimeError) -> RuntimeError:
    """The error if a rank could not join the process group of connected ranks."""
    text = str(error)
    if "gloo" not in text.lower() and "nccl" not in text.lower():
        return error
    host, name = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME", "its usual interface")
    return MeetingError(
        f"rank {rank} on {host} has met the others, but cannot exchange tensors with all of them over {name} "
        f"({' '.join(text.split())[:160]}); open all ports between the hosts, or name the interface they share in "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on every host"
    )


class Heartbeat:
    """A thread that increments this rank's counter in a store, and reads those of the other ranks.

    A rank that waits for another one says so as well: its thread has nothing else to do. A stopped rank does not, nor
    one that has lost its host or network. So after a deadline the one that all waited for is named, and not the one
    that this rank happened to wait for. ``store``: a connection of its own, with answers within `ANSWER` seconds.
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
