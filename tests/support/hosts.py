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
# Bytes that a token bucket holds at least: one large packet of TCP's segmentation, and some more.
BURST = 128 * 1024
# Seconds of its rate that it holds, and those that a packet waits in its queue at most.
HELD, QUEUED = 1e-3, 0.05

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
        folder: the folder that all hosts share, where one was given.
    """

    number: int
    name: str
    address: str
    process: subprocess.Popen[bytes]
    inside: int
    folder: Path | None = None
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
        """Run a command on this host and return its standard output.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
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

    def sent(self) -> int:
        """Bytes that its interface has sent so far, with all headers."""
        return self._counter("tx_bytes")

    def received(self) -> int:
        """Bytes that its interface has received so far, with all headers."""
        return self._counter("rx_bytes")

    def _forsake(self) -> None:
        """Kill what stands outside for each command: one whose command is stopped stops too, and buries it no more."""
        for started in self._started:
            started.kill()

    def _counter(self, name: str) -> int:
        # /sys shows the network namespace of whoever has mounted it: only `ip` and /proc/net follow the process.
        lines = Path(f"/proc/{self.inside}/net/dev").read_text().splitlines()
        words = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:")).partition(":")[2].split()
        return int(words[{"rx_bytes": 0, "tx_bytes": 8}[name]])

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self.inside), *_NAMESPACES, "--"]


@dataclass
class Hosts:
    """Hosts that reach one another over a network.

    Attributes:
        hosts: all of them, in order.
        rate: bits a second in either direction at every host's interface, headers of packets included (4.5 % of what
            TCP sends); None: as fast as it goes.
    """

    hosts: list[Host]
    rate: float | None = None
    _switch: Host | None = None

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    def set_rate(self, rate: float | None) -> None:
        """Change the rate of all interfaces, both ways, in bits a second; None: as fast as it goes."""
        self.rate = rate
        for host in self.hosts:
            _shape(host, INTERFACE, rate)
            if self._switch is not None:
                _shape(self._switch, f"port{host.number}", rate)

    def torchrun(
        self,
        command: Sequence[str],
        ranks: int | Sequence[int] = 1,
        port: int = 29500,
        options: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        **more: Any,
    ) -> list[subprocess.Popen[Any]]:
        """Start ``torchrun`` on every host, which meet at the first one's address.

        Args:
            command: what ranks run: a script and its arguments, or ``-m`` and a module.
            ranks: of every host, or of each.
            port: where they meet.
            options: more of torchrun's options.
            extra, more: see `Host.start`.

        Returns:
            The agents, in the order of hosts.
        """
        each = [ranks] * len(self.hosts) if isinstance(ranks, int) else list(ranks)
        meet = ["--master-addr", self.hosts[0].address, "--master-port", str(port)]
        return [
            host.start(
                [
                    *(sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", str(len(self.hosts))),
                    *("--nproc-per-node", str(count), "--node-rank", str(host.number), *meet, *options, *command),
                ],
                extra,
                **more,
            )
            for host, count in zip(self.hosts, each, strict=True)
        ]

    def ranks(
        self,
        command: Sequence[str],
        ranks: int | Sequence[int] = 1,
        port: int = 29500,
        extra: Mapping[str, str] | None = None,
        **more: Any,
    ) -> list[subprocess.Popen[Any]]:
        """Start ranks without torchrun's agents, with the variables that they would set: a process per rank, in order.

        Args: as of `torchrun`; ``command`` is a program and its arguments.
        """
        each = [ranks] * len(self.hosts) if isinstance(ranks, int) else list(ranks)
        started, rank = [], 0
        for host, count in zip(self.hosts, each, strict=True):
            for local in range(count):
                variables = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(sum(each)),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(count),
                    "MASTER_ADDR": self.hosts[0].address,
                    "MASTER_PORT": str(port),
                }
                started.append(host.start(command, {**variables, **(extra or {})}, **more))
                rank += 1
        return started


@contextmanager
def hosts(
    count: int = 2,
    rate: float | None = None,
    folder: str | os.PathLike[str] | None = None,
    names: Sequence[str] | None = None,
) -> Iterator[Hosts]:
    """Hosts for as long as the context lasts.

    Args:
        count: how many. Two are joined by a cable, more by a switch.
        rate: bits a second in either direction at every host's interface.
        folder: one that all of them see at the path that it has here; of the rest of ``/tmp`` they see the Python
            environment and this clone where these lie there, and nothing else.
        names: their host names; default: ``host0``, ``host1`` …

    Raises:
        NoHosts: namespaces cannot be made here.
    """
    if reason := missing():
        raise NoHosts(reason)
    names = names or [f"host{number}" for number in range(count)]
    with ExitStack() as undo:
        made = [_host(undo, number, name, folder) for number, name in enumerate(names)]
        switch = None
        if count == 2:
            one, two = made
            one.net("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", _pid(two))
        elif count > 2:
            switch = _switch(undo, made)
        for host in made:
            if count > 1:
                host.net("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
                host.net("ip", "link", "set", INTERFACE, "up")
                # BBR takes its time to find out how fast a token bucket is.
                host.net("sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")
        together = Hosts(made, None, switch)
        if rate is not None:
            together.set_rate(rate)
        yield together


def _shape(host: Host, interface: str, rate: float | None) -> None:
    """Limit what an interface of a host sends to so many bits a second; None: to nothing."""
    if rate is None:
        # What an interface of this kind has without being told.
        host.net("tc", "qdisc", "replace", "dev", interface, "root", "noqueue")
    else:
        burst = max(BURST, int(rate / 8 * HELD))
        bucket = ["rate", f"{int(rate)}bit", "burst", str(burst), "latency", f"{QUEUED * 1e3:g}ms"]
        host.net("tc", "qdisc", "replace", "dev", interface, "root", "tbf", *bucket)


@cache
def missing() -> str | None:
    """Why hosts cannot be made here, in a few words; None: they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if absent := [tool for tool in (*TOOLS, "tc") if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not installed (util-linux, iproute2)"
    script = (
        "mount -t tmpfs none /dev/shm && ip link set lo up && ip link add a0 type veth peer name b0 && "
        "tc qdisc add dev a0 root tbf rate 1gbit burst 1mb latency 50ms"
    )
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "sh", "-c", script], capture_output=True, text=True
    )
    if tried.returncode:
        return f"namespaces are not allowed ({' '.join(tried.stderr.split()) or tried.returncode})"
    return None


def _host(undo: ExitStack, number: int, name: str, folder: str | os.PathLike[str] | None) -> Host:
    process, inside = _first(undo)
    shared = None if folder is None else Path(folder).resolve()
    host = Host(number, name, f"{NET}.{number + 1}", process, inside, shared)
    undo.callback(host._forsake)
    # Only its own name, at an address that no other host reaches: as many a system is installed.
    lines = f"127.0.0.1 localhost\\n127.0.1.1 {name}\\n"
    # What a host must see runs from there: an environment or a clone may lie in /tmp itself.
    kept = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[2], *([shared] if shared else [])}
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


def _switch(undo: ExitStack, made: Sequence[Host]) -> Host:
    """Join hosts by a bridge in a namespace of its own."""
    switch = Host(-1, "switch", "", *_first(undo))
    switch.net("ip", "link", "add", "br0", "type", "bridge")
    switch.net("ip", "link", "set", "br0", "up")
    for host in made:
        port = f"port{host.number}"
        switch.net("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", _pid(host))
        switch.net("ip", "link", "set", port, "master", "br0", "up")
    return switch


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


def _pid(host: Host) -> str:
    return str(host.inside)


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
