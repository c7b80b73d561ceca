"""All gloo groups of a rank have one device between them, and one thread that polls."""

from __future__ import annotations

import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.comm import gloo
from support import ruled

SOURCE = Path(ditmesh.__file__).parent
DISPLACED = {"ring": 2, "exchange": "displaced"}
# Seconds in which a closed connection is noticed, on a busy machine; the deadline of the groups is longer.
SOON, DEADLINE = 10.0, 60.0


def pollers() -> int:
    """Threads of this process that poll for gloo."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def at_rest(count: int) -> int:
    """Polling threads, once there are so many or a moment has passed: they end after their groups."""
    until = time.monotonic() + 5
    while pollers() != count and time.monotonic() < until:
        time.sleep(0.01)
    return pollers()


def polling(shares: bool) -> tuple[list[int], bool]:
    """Polling threads more than before: with two meshes, with a group of the host, and when all are closed."""
    torchs = dist.distributed_c10d.ProcessGroupGloo
    before = pollers()
    with mock.patch.object(gloo, "_options_of", gloo._options_of if shares else lambda group: None):
        meshes = [ditmesh.Mesh(ditmesh.ParallelConfig(**DISPLACED, shared_memory=False)) for _ in range(2)]
        found = [pollers() - before]
        group = meshes[0].new_host_group()
        found.append(pollers() - before)
    for mesh in meshes:
        assert mesh.ring.transport == "gloo"
        assert float(mesh.ring.all_reduce(torch.ones(1))) == 2.0
        mesh.close()
    mesh = None
    assert group is not None
    assert dist.get_backend(group) == "gloo"
    dist.destroy_process_group(group)
    del group, meshes[:]
    found.append(at_rest(before) - before)
    return found, dist.distributed_c10d.ProcessGroupGloo is torchs


@ruled.gloo
def test_groups_of_a_rank_poll_in_one_thread(ranks):
    assert ranks(2).run(polling, True) == [([0, 0, 0], True)] * 2
    for (first, second, last), restored in ranks(2).run(polling, False):
        # Each mesh has a group of all ranks, one for displaced keys, and one for boundaries; torch's comparison of
        # collectives (DETAIL) makes one more of each.
        assert (first, second) in ((6, 7), (12, 14))
        assert (last, restored) == (0, True)


def one_given_up() -> tuple[str, float, list[float], float]:
    """What a rank that waits in one group hears when its peer gives that group up, and what other groups do then."""
    rank = dist.get_rank()
    timeout = timedelta(seconds=DEADLINE)
    lost, kept = (gloo.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    sums, heard, began = [], "", time.monotonic()
    box = torch.zeros(1)
    # Of the groups that stay: begun before, ended after.
    pending = kept.recv([box], 1 - rank, 7)
    if rank == 0:
        try:
            lost.recv([torch.zeros(1)], 1, 0).wait()
        except RuntimeError as error:
            heard = str(error)
    else:
        time.sleep(0.3)
        dist.destroy_process_group(lost)
        lost = None
    seconds = time.monotonic() - began
    kept.send([torch.full((1,), 5.0 + rank)], 1 - rank, 7).wait()
    pending.wait()
    for group in (kept, gloo.new_group(backend="gloo", timeout=timeout), None):
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        sums.append(float(value))
        if group is not None:
            dist.destroy_process_group(group)
    if rank == 0:
        dist.destroy_process_group(lost)
    return heard, seconds, sums, float(box)


@ruled.gloo
def test_a_group_that_is_given_up_leaves_the_others_alone(ranks):
    (heard, seconds, *first), (_, _, *second) = ranks(2).run(one_given_up)
    assert "closed" in heard.lower(), heard
    assert seconds < SOON
    assert [first, second] == [[[2.0] * 3, 6.0], [[2.0] * 3, 5.0]]


def test_only_one_file_makes_groups():
    """Others would have a device of their own."""
    made = re.compile(r"dist\.new_group\(|ProcessGroupGloo\)?\(")
    assert {file.name for file in SOURCE.rglob("*.py") if made.search(file.read_text())} == {"gloo.py"}


# --- the replacement


class Options:
    """Of a gloo group."""

    _devices, _threads, _timeout = (), 0, None


class Made:
    """In the place of torch's group: what it was made with."""

    _Options = Options
    create_default_device = staticmethod(lambda: "a device")

    def __init__(self, *args: Any, **named: Any) -> None:
        self.args, self.named = args, named


SHARED = SimpleNamespace(_devices=["the device"], _threads=2)
GIVEN = ("store", 0, 2)


@pytest.fixture
def torchs(monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupGloo", Made)
    return dist.distributed_c10d


def test_only_the_thread_that_asks_shares(torchs):
    seen: list[Any] = []
    with gloo._made_with(SHARED):
        mine = torchs.ProcessGroupGloo(*GIVEN, timeout=timedelta(seconds=3))
        thread = threading.Thread(target=lambda: seen.append(torchs.ProcessGroupGloo(*GIVEN, timeout=3)))
        thread.start()
        thread.join()
        # As torch asks while a group is made, and what others may ask meanwhile.
        assert isinstance(mine, torchs.ProcessGroupGloo)
        assert not isinstance(3, torchs.ProcessGroupGloo)
        assert torchs.ProcessGroupGloo.create_default_device() == "a device"
    *three, options = mine.args
    assert (tuple(three), mine.named) == (GIVEN, {})
    assert (options._devices, options._threads, options._timeout) == (["the device"], 2, timedelta(seconds=3))
    assert (seen[0].args, seen[0].named) == (GIVEN, {"timeout": 3})
    assert torchs.ProcessGroupGloo is Made


def test_the_last_thread_that_leaves_puts_torchs_own_back(torchs):
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with gloo._made_with(SHARED):
            entered.set()
            leave.wait(SOON)

    thread = threading.Thread(target=other)

    def fail() -> None:
        with gloo._made_with(SHARED):
            thread.start()
            entered.wait(SOON)
            raise ValueError("a peer has not come")

    with pytest.raises(ValueError, match="a peer"):
        fail()
    assert torchs.ProcessGroupGloo is not Made
    # This thread has left: its groups are torch's again.
    assert torchs.ProcessGroupGloo(*GIVEN, timeout=3).named == {"timeout": 3}
    leave.set()
    thread.join()
    assert torchs.ProcessGroupGloo is Made


@pytest.mark.parametrize(
    ("kind", "shared", "args", "named"),
    [
        (Made, None, (*GIVEN, 3), {}),
        (Made, SHARED, GIVEN, {}),
        (Made, SHARED, GIVEN, {"timeout": 3, "lazy": True}),
        (Made, SHARED, (*GIVEN, 3, "more"), {}),
        (type("Another", (Made,), {"_Options": None}), SHARED, (*GIVEN, 3), {}),
    ],
    ids=["nothing to share", "without a deadline", "another argument", "more arguments", "without options"],
)
def test_what_is_not_known_is_left_to_torch(kind, shared, args, named):
    made = gloo._make(kind, shared, args, named)
    assert (made.args, made.named) == (args, named)


def test_a_job_with_nccl_alone_shares_the_device_of_its_first_group(monkeypatch, torchs):
    """The others have that one's, and it goes with the default group."""

    class Group:
        def __init__(self, options: Any) -> None:
            self._options = options

        def _get_backend(self, device: torch.device) -> Any:
            if self._options is None:
                raise RuntimeError(f"No backend type associated with device type {device.type}")
            return SimpleNamespace(wrapped_pg=SimpleNamespace(options=self._options))

    def new_group() -> Group:
        made = torchs.ProcessGroupGloo(*GIVEN, timeout=3)
        shared = made.args[-1] if isinstance(made.args[-1], Options) else None
        return Group(shared or SimpleNamespace(_devices=[f"device {os.urandom(4).hex()}"], _threads=2))

    world = Group(None)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(dist, "ProcessGroup", Group)
    monkeypatch.setattr(dist, "new_group", new_group)
    devices = [gloo.new_group()._options._devices for _ in range(3)]
    assert devices[0] == devices[1] == devices[2]
    assert gloo._beside[cast(Any, world)]._devices == devices[0]
    monkeypatch.undo()
    count = len(gloo._beside)
    del world
    assert len(gloo._beside) == count - 1
