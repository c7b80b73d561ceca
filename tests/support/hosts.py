"""Hosts in namespaces of Linux: a network path between them, and nothing else in common but files that are named.

A host here is a network namespace with one interface and its loopback, a host name, a ``/dev/shm`` and a ``/tmp`` of
its own, and process numbers of its own, so that no rank can reach the memory of another host's. It lives as long as its
first process, which ends with the process that made it, however that ends: nothing has to be cleaned up after a kill.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .processes import alive

# Addresses are NET.1, NET.2, …
NET = "10.77.0"
# The interface of every host.
INTERFACE = "eth0"
TOOLS = ("unshare", "nsenter", "ip", "mount", "env")
# Where ranks meet.
PORT = 29500

# First process of a host: it takes children over that their parents have left, and ends with its standard input.
_FIRST = "trap '' CHLD; exec cat"
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
_PR_SET_PDEATHSIG = 1


class NoHosts(RuntimeError):
    """Namespaces cannot be made here; says why."""


@dataclass
class Host:
    """One host.

    Attributes:
        number: 0 for the first.
        name: its host name.
        address: IPv4 address of its interface.
        process: ``unshare``, which has made it.
        inside: process id of its first process.
    """

    number: int
    name: str
    address: str
    process: subprocess.Popen[bytes]
    inside: int
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def command(self, command: Sequence[str], folder: str | os.PathLike[str] | None = None) -> list[str]:
        """The command line that runs a command on this host, in a folder (default: the one this process is in)."""
        where = os.fspath(folder or os.getcwd())
        return [*self._enter(), "env", "-C", where, "--", *map(str, command)]

    def start(
        self,
        command: Sequence[str],
        extra: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        **more: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on this host.

        Args:
            command: the program and its arguments.
            extra: variables besides this process's environment.
            folder: to run in.
            more: of `subprocess.Popen`, such as ``stdout=subprocess.PIPE, text=True``.
        """
        environment = {**os.environ, **(extra or {}), "HOSTNAME": self.name}
        started = subprocess.Popen(self.command(command, folder), env=environment, **more)
        self._started.append(started)
        return started

    def run(self, command: Sequence[str], **more: Any) -> str:
        """Run a command on this host and return its standard output. `subprocess.CalledProcessError`: it failed."""
        done = subprocess.run(self.command(command), stdout=subprocess.PIPE, text=True, check=True, **more)
        return done.stdout

    def net(self, *command: str) -> None:
        """Run a program that knows this machine's processes and files in the host's network alone."""
        subprocess.run(["nsenter", "--target", str(self.inside), "--net", "--", *command], check=True)

    def processes(self) -> list[int]:
        """Process ids, as this process sees them, of all that runs on the host, without its first process."""
        mine = os.readlink(f"/proc/{self.inside}/ns/pid")
        found = []
        for one in Path("/proc").iterdir():
            if one.name.isdigit() and int(one.name) != self.inside:
                with suppress(OSError):
                    if os.readlink(one / "ns/pid") == mine:
                        found.append(int(one.name))
        return found

    def die(self) -> None:
        """End everything on the host at once, with its network, as when its power fails: no connection is closed."""
        # Without the interface the kernel cannot tell the other side that connections end.
        self.cut()
        self._forsake()
        _end(self.process, self.inside)

    def cut(self) -> None:
        """Take its interface down: packets to it and from it get lost."""
        self.net("ip", "link", "set", INTERFACE, "down")

    def drop(self, ports: str) -> None:
        """Lose without a word what this host would send from TCP ports, ``"29500"`` or ``"30000-65534"``, to others.

        Whoever connects to one of them waits for an answer in vain, as behind a firewall.
        """
        self.net("ip", "rule", "add", "ipproto", "tcp", "sport", ports, "blackhole")

    def _forsake(self) -> None:
        """Kill what stands outside for each command: one whose command is stopped stops too, and buries it no more."""
        for started in self._started:
            started.kill()

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self.inside), *_NAMESPACES, "--"]


class Hosts(list[Host]):
    """Hosts that reach one another over a network."""

    def torchrun(
        self, command: Sequence[str], ranks: int = 1, extra: Mapping[str, str] | None = None, **more: Any
    ) -> list[subprocess.Popen[Any]]:
        """Start ``torchrun`` on every host, which meet at the first one's address.

        Args:
            command: what ranks run: a script and its arguments, or ``-m`` and a module.
            ranks: of every host.
            extra, more: see `Host.start`.

        Returns the agents, in the order of hosts.
        """
        meet = ["--master-addr", self[0].address, "--master-port", str(PORT)]
        return [
            host.start(
                [
                    *(sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", str(len(self))),
                    *("--nproc-per-node", str(ranks), "--node-rank", str(host.number), *meet, *command),
                ],
                extra,
                **more,
            )
            for host in self
        ]

    def ranks(
        self, command: Sequence[str], extra: Mapping[str, str] | None = None, **more: Any
    ) -> list[subprocess.Popen[Any]]:
        """Start a rank on every host without torchrun's agents, with the variables that they would set.

        Args: as of `torchrun`; ``command`` is a program and its arguments.
        """
        about = {"WORLD_SIZE": str(len(self)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(PORT)}
        return [
            host.start(
                command, {**about, "RANK": str(host.number), "MASTER_ADDR": self[0].address, **(extra or {})}, **more
            )
            for host in self
        ]


@contextmanager
def two_hosts(folder: str | os.PathLike[str] | None = None) -> Iterator[Hosts]:
    """Two hosts, joined by a cable, for as long as the context lasts.

    ``folder``: one that both of them see at the path that it has here; of the rest of ``/tmp`` they see the Python
    environment and this clone where these lie there, and nothing else.

    `NoHosts`: namespaces cannot be made here.
    """
    if reason := missing():
        raise NoHosts(reason)
    with ExitStack() as undo:
        one, two = made = Hosts(_host(undo, number, folder) for number in range(2))
        one.net("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(two.inside))
        for host in made:
            host.net("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.net("ip", "link", "set", INTERFACE, "up")
        yield made


@cache
def missing() -> str | None:
    """Why hosts cannot be made here, in a few words; None: they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not installed (util-linux, iproute2)"
    script = "mount -t tmpfs none /dev/shm && ip link set lo up && ip link add a0 type veth peer name b0"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "sh", "-c", script], capture_output=True, text=True
    )
    if tried.returncode:
        return f"namespaces are not allowed ({' '.join(tried.stderr.split()) or tried.returncode})"
    return None


def _host(undo: ExitStack, number: int, folder: str | os.PathLike[str] | None) -> Host:
    process, inside = _first(undo)
    name = f"host{number}"
    host = Host(number, name, f"{NET}.{number + 1}", process, inside)
    undo.callback(host._forsake)
    # Only its own name, at an address that no other host reaches: as many a system is installed.
    lines = f"127.0.0.1 localhost\\n127.0.1.1 {name}\\n"
    # What a host must see runs from there: an environment or a clone may lie in /tmp itself.
    kept = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[2]}
    kept |= set() if folder is None else {Path(folder).resolve()}
    shown = [str(one) for one in sorted(kept) if one.is_relative_to("/tmp")]
    steps = [
        "mount -t tmpfs none /dev/shm",
        "mount -t tmpfs none /mnt",
        *(f"mkdir /mnt/{index} && mount --bind '{one}' /mnt/{index}" for index, one in enumerate(shown)),
        "mount -t tmpfs none /tmp",
        *(f"mkdir -p '{one}' && mount --bind /mnt/{index} '{one}'" for index, one in enumerate(shown)),
        "umount -R /mnt",
        "chmod 1777 /tmp /dev/shm",
        f"hostname {name}",
        f"printf '{lines}' > /tmp/.hosts",
        "mount --bind /tmp/.hosts /etc/hosts",
        "ip link set lo up",
    ]
    subprocess.run([*host._enter(), "sh", "-ec", "\n".join(steps)], check=True)
    return host


def _first(undo: ExitStack) -> tuple[subprocess.Popen[bytes], int]:
    """New namespaces: ``unshare``, and its child, the first process in them; they end with this process."""
    process = subprocess.Popen(
        ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", _FIRST],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        preexec_fn=_ends_with_its_parent(),
    )
    # Until the first process is there nothing lives in the namespaces but what this one ends.
    early = undo.enter_context(ExitStack())
    early.callback(process.kill)
    limit = time.monotonic() + 10
    # Only when /proc is its own, and the shell has become what waits.
    while _name(inside := _child(process.pid)) != "cat":
        if time.monotonic() > limit or process.poll() is not None:
            raise NoHosts("the first process of a host did not start")
        time.sleep(0.005)
    early.pop_all()
    undo.callback(_end, process, inside)
    return process, inside


def _end(process: subprocess.Popen[bytes], inside: int) -> None:
    """End a host: all its processes go with the first one, which goes with ``unshare``. Harmless twice."""
    if process.stdin is None or process.stdin.closed:
        return
    process.kill()
    process.wait()
    process.stdin.close()
    while alive(inside):
        time.sleep(0.005)


def _ends_with_its_parent() -> Callable[[], None]:
    """What a child does before its program begins: it asks to be killed when the thread that made it ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(pid: int) -> int:
    """The only child of a process; 0: it has none."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(words[0]) if words else 0
    return 0


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
