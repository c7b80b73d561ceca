"""Detection of ranks on the same host: ranks that reach the same memory, whatever the host names.

Host names repeat (virtual machines made from one image, containers), and so do a system's own identifiers after a
snapshot was started twice. So every rank keeps a random token in anonymous memory, and a rank is near another if it
reads that token through ``/proc``: that is possible exactly where tensors can travel through memory that both map.
Containers on one machine with process numbers of their own are hosts of their own.
"""

from __future__ import annotations

import os
import platform
import stat
import sys
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from .objects import gather_objects

_TOKEN = 16


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job's ranks.

    Attributes:
        near: for every rank the ranks that share memory with it both ways, itself included.
        shares: whether tensors may travel through memory: every rank can do its part in that.
    """

    near: tuple[frozenset[int], ...]
    shares: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """For every rank the number of its host; the first rank's is 0, the first one's on another host 1."""
        firsts = [min(near) for near in self.near]
        order = list(dict.fromkeys(firsts))
        return tuple(order.index(first) for first in firsts)

    def joins(self, ranks: Iterable[int]) -> bool:
        """True if all of these ranks are near one another."""
        ranks = frozenset(ranks)
        return all(self.near[rank] >= ranks for rank in ranks)

    @staticmethod
    def single(ranks: int) -> Hosts:
        """So many ranks of one host."""
        return Hosts((frozenset(range(ranks)),) * ranks)


def find_hosts(group: dist.ProcessGroup | None, shares: bool) -> Hosts:
    """The hosts of all ranks of the job. A collective call.

    Args:
        group: a process group of them that works without GPUs.
        shares: whether this rank's system can send messages through memory.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    system, fd, token = _system(), -1, os.urandom(_TOKEN)
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        fd = os.memfd_create("ditmesh-host", os.MFD_CLOEXEC)
        os.write(fd, token)
    try:
        every: list[tuple[str, int, int, bytes]] = gather_objects((system, os.getpid(), fd, token), group)
        reached = {
            other
            for other, (its_system, process, its_fd, its_token) in enumerate(every)
            # Looked at only where it may be: under the same number may be another process here, and a file of its.
            if other == rank or (its_system == system and (fd < 0 or _read(process, its_fd) == its_token))
        }
        # Behind this every rank has read what it can.
        reports: list[tuple[set[int], bool]] = gather_objects((reached, shares), group)
    finally:
        if fd >= 0:
            os.close(fd)
    reaches = [its for its, _ in reports]
    near = tuple(frozenset(other for other in reaches[r] if r in reaches[other]) for r in range(world))
    return Hosts(near, all(can for _, can in reports))


def _read(process: int, fd: int) -> bytes | None:
    """The token in another process's memory; None if there is none: it is in another container, or hidden from us."""
    with suppress(OSError):
        # As it would be mapped. Whatever kind of file it is, opening it does not block.
        opened = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            about = os.fstat(opened)
            if stat.S_ISREG(about.st_mode) and about.st_size == _TOKEN:
                return os.pread(opened, _TOKEN, 0)
        finally:
            os.close(opened)
    return None


def _system() -> str:
    """A name of the system, for processes that may reach one another's memory; it is equal where they do."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
    return f"{platform.node()} {uuid.getnode()}"
