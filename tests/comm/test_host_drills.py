"""What goes wrong between hosts: every rank that is left ends within the deadline, with one sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from support import hosts as support
from support.hosts import Hosts, two_hosts

pytestmark = pytest.mark.skipif(support.missing() is not None, reason=str(support.missing()))

VARIABLES = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
# Seconds that a busy machine takes to import what a rank needs.
START = 60


@pytest.fixture
def two() -> Iterator[Hosts]:
    with two_hosts() as some:
        yield some


def started(some: Hosts, what: str, timeout: float, **extra: str) -> list[subprocess.Popen[str]]:
    """A rank on every host; see `support.host_drills`."""
    command = [sys.executable, "-P", "-m", "support.host_drills", what, str(timeout)]
    pipe = subprocess.PIPE
    return some.ranks(command, extra={**VARIABLES, **extra}, stdout=pipe, stderr=pipe, text=True)


def last_line(rank: subprocess.Popen[str], within: float) -> str:
    """What a rank says last."""
    said, errors = rank.communicate(timeout=START + within)
    return (said.strip().splitlines() or [f"nothing, but on stderr {errors}"])[-1]


def heard(rank: subprocess.Popen[str], line: str) -> None:
    """Wait until a rank has said a line."""
    assert rank.stdout is not None
    for said in rank.stdout:
        if said.strip() == line:
            return
    raise AssertionError(f"the rank has ended without saying {line!r}")


def test_other_versions(two):
    """Both refuse at once."""
    for rank in started(two, "other-torch", 60):
        said = last_line(rank, 0)
        assert "rank 1 on host1 has torch 9.9.9, and rank 0 on host0" in said
        assert said.endswith("; install the same on all hosts")
        assert said.startswith("MeetingError after ")


@pytest.mark.matrix
def test_a_wrong_address(two):
    """Nobody is there: each host says what it has waited for."""
    command = [sys.executable, "-P", "-m", "support.host_drills", "plain", "4"]
    about = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
    pipe = subprocess.PIPE
    ranks = [
        host.start(
            command,
            {**VARIABLES, **about, "RANK": str(number), "MASTER_ADDR": address},
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for number, (host, address) in enumerate(zip(two, (two[0].address, "10.77.0.9"), strict=True))
    ]
    assert "rank 1 of 2 did not come to 10.77.0.1:29500 within 4 s; " in last_line(ranks[0], 4)
    assert "rank 1 on host1 did not reach rank 0 at 10.77.0.9:29500 within 4 s; " in last_line(ranks[1], 4)


@pytest.mark.matrix
def test_a_name_that_is_the_loopback_of_the_first_host(two):
    """As a host's own name is on many systems: the second one knows it by its address."""
    line = f"{two[0].address} host0"
    two[1].run(["sh", "-c", f"echo '{line}' >> /etc/hosts"])
    for rank in started(two, "plain", 20, MASTER_ADDR="host0"):
        assert "MASTER_ADDR=host0 leads to the loopback on host0, where no other host reaches it" in last_line(rank, 20)


@pytest.mark.matrix
def test_a_firewall_before_all_other_ports(two):
    """They meet, and no tensor gets through."""
    two[0].drop("30000-65534")
    said = [last_line(rank, 20) for rank in started(two, "plain", 10)]
    assert all("cannot exchange tensors with all of them over eth0" in one for one in said), said
    assert all("open all ports between the hosts" in one for one in said)


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["the host", "its network", "its processes", "stopped"])
def test_a_host_that_is_lost_in_the_middle_of_a_job(two, what):
    """The rank that is left names it within the deadline and a look around."""
    timeout = 10.0
    ranks = started(two, "plain", timeout)
    heard(ranks[0], "step 20")
    began = time.monotonic()
    if what == "the host":
        two[1].die()
    elif what == "its network":
        two[1].cut()
    else:
        for process in two[1].processes():
            os.kill(process, signal.SIGKILL if what == "its processes" else signal.SIGSTOP)
    said = last_line(ranks[0], timeout)
    # Ten seconds of the collective, a look at who is silent, and what a busy machine takes for both.
    assert time.monotonic() - began < timeout + 20
    assert "RankFailed after " in said
    assert "rank 1 on host1 of 2 ranks says nothing any more: ended, stopped, or cut off from the network" in said
