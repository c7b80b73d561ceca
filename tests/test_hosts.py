"""Two hosts: network namespaces of this machine, with a real network path between them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import hosts as support
from support.hosts import hosts
from support.processes import alive

pytestmark = pytest.mark.skipif(support.missing() is not None, reason=str(support.missing()))

# Takes one connection and says the bits a second that came through it.
RECEIVER = """
import socket, time
listening = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
connection, _ = listening.accept()
count = len(connection.recv(1))
began = time.perf_counter()
while got := len(connection.recv(1 << 20)):
    count += got
print(8 * count / (time.perf_counter() - began))
"""
SENDER = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(bytes(int(sys.argv[2])))"


def throughput(source: support.Host, target: support.Host, size: int) -> float:
    """Bits a second of one TCP connection."""
    receiver = target.start([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True)
    receiver.stdout.readline()
    source.run([sys.executable, "-c", SENDER, target.address, str(size)])
    return float(receiver.communicate()[0])


def test_hosts_share_a_network_of_a_rate_and_nothing_else(tmp_path):
    with hosts(2, rate=200e6, folder=tmp_path) as two:
        one, other = two
        before = one.sent(), other.received()
        # The clock of a busy machine only makes it slower.
        assert 0.5 * 200e6 < throughput(one, other, 4 << 20) < 1.1 * 200e6
        # Headers of Ethernet, IP and TCP are a twentieth of what is sent; most are of packets of 64 KiB.
        for counted in (one.sent() - before[0], other.received() - before[1]):
            assert 4 << 20 < counted < 1.05 * (4 << 20)
        two.set_rate(1e9)
        assert throughput(other, one, 4 << 20) > 200e6
        for folder in ("/dev/shm", "/tmp", str(tmp_path)):
            one.run(["touch", f"{folder}/a"])
            assert ("a" in other.run(["ls", folder]).split()) == (folder == str(tmp_path))
        assert (one.run(["hostname"]), other.run(["hostname"])) == ("host0\n", "host1\n")
        assert not Path("/dev/shm/a").exists()


def test_three_hosts_meet_at_a_switch():
    with hosts(3, rate=200e6) as three:
        assert 0.5 * 200e6 < throughput(three[2], three[0], 2 << 20) < 1.1 * 200e6


# Makes hosts in which something runs, says its process ids, and waits to be killed.
KILLED = """
import time
from support.hosts import hosts
with hosts(2) as two:
    for host in two:
        host.start(["sleep", "1000"])
    while not all(host.processes() for host in two):
        time.sleep(0.01)
    print(*[pid for host in two for pid in (host.inside, *host.processes())], flush=True)
    time.sleep(1000)
"""


def test_nothing_is_left_of_hosts_whose_maker_was_killed():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    maker = subprocess.Popen([sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, text=True)
    processes = [int(pid) for pid in maker.stdout.readline().split()]
    assert list(map(alive, processes)) == [True] * 4
    maker.kill()
    maker.wait()
    limit = time.monotonic() + 10
    while any(map(alive, processes)) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not any(map(alive, processes))
