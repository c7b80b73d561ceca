"""Ranks on a Ray cluster of two nodes: the contract of the pool, and a node that is killed in the middle of a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from ditmesh.errors import ConfigError, RankFailed
from ditmesh.launch import launcher
from support import rank_functions as on_rank

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

# A cluster takes longer to start than all of the pool's tests.
pytestmark = pytest.mark.matrix
TIMEOUT = 10.0


class Nodes:
    """A cluster with a head that has no CPUs to give, and nodes of one CPU."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(2)]
        self.address: str = self.cluster.address

    def again(self) -> None:
        while len(self.nodes) < 2:
            self.nodes.append(self.cluster.add_node(num_cpus=1))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    there = Nodes()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_ADDRESS", there.address)
        yield there
    ray.shutdown()
    there.cluster.shutdown()


@pytest.fixture
def ranks2(nodes: Nodes) -> Iterator[Any]:
    nodes.again()
    with launcher("ray", 2, "cpu", 1, TIMEOUT) as ranks:
        yield ranks


def actors() -> list[int]:
    """Process ids of ranks that are there."""
    return [
        process.pid
        for process in psutil.process_iter(["name", "status"])
        if process.info["name"] == "ray::_Rank" and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def gone() -> bool:
    limit = time.monotonic() + 20
    while actors() and time.monotonic() < limit:
        time.sleep(0.1)
    return not actors()


def test_calls_messages_replies_and_exceptions(ranks2: Any) -> None:
    def there(report: Any) -> tuple[int, float]:
        import torch
        import torch.distributed as dist

        report(("here", dist.get_rank()))
        total = torch.full((3,), float(dist.get_rank() + 1))
        dist.all_reduce(total)
        return report.reply(), total.sum().item()

    heard: list[tuple[int, Any]] = []

    def hear(rank: int, message: Any) -> None:
        heard.append((rank, message))
        if len(heard) == 2:
            ranks2.reply(7)

    assert ranks2.run(there, on_message=hear) == [(7, 9.0), (7, 9.0)]
    assert sorted(heard) == [(0, ("here", 0)), (1, ("here", 1))]
    assert ranks2.run(os.getpid) != [os.getpid()] * 2
    with pytest.raises(TypeError, match="cannot send"):
        ranks2.run(on_rank.__name__.__len__, threading.Lock())
    assert len(ranks2.run(os.getcwd)) == 2
    exceptions(ranks2)


def raises(*which: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() in which:
        raise ValueError("no such thing")


def exceptions(ranks2: Any) -> None:
    with pytest.raises(RankFailed, match="ValueError: no such thing") as failed:
        ranks2.run(raises, 0, 1)
    assert isinstance(failed.value.__cause__, ValueError)
    assert (failed.value.pool_open, failed.value.lost) == (True, ())
    assert "in raises" in str(failed.value)
    with pytest.raises(RankFailed):
        ranks2.run(raises, 1)
    # Rank 0 has answered and rank 1 has raised: in a new group.
    assert ranks2.generation == 2
    assert ranks2.run(sum_of_ones) == [2.0, 2.0]


def sum_of_ones() -> float:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def signalled(number: int) -> float:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    return sum_of_ones()


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "rank 1 of 2 is gone"), (signal.SIGSTOP, "rank 1 of 2 stalled")]
)
def test_a_rank_that_is_lost_is_named(ranks2: Any, number: int, said: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match=said) as failed:
        ranks2.run(signalled, number)
    assert time.monotonic() - started < TIMEOUT + 15
    assert (failed.value.lost, failed.value.pool_open) == ((1,), False)
    with pytest.raises(ConfigError, match="is closed"):
        ranks2.run(os.getpid)
    assert gone()


@pytest.mark.parametrize(
    ("world_size", "threads", "said"),
    [(3, None, "3 ranks of 1 CPUs each need 3, and the Ray cluster has 2"), (1, 3, "need 3")],
)
def test_what_the_cluster_has_not(nodes: Nodes, world_size: int, threads: int | None, said: str) -> None:
    nodes.again()
    with pytest.raises(ConfigError, match=said):
        launcher("ray", world_size, "cpu", threads, TIMEOUT)
    with pytest.raises(ConfigError, match="GPUs, and the Ray cluster has 0"):
        launcher("ray", 1, "cuda")


def test_generate_on_a_cluster_has_the_bits_of_ranks_of_this_machine(nodes: Nodes, tmp_path: Path) -> None:
    nodes.again()
    settings = ("--devices", "2", "--ulysses", "2", "--reproducible", "--steps", "6", "--seed", "3", "--json")
    where = ("--device", "cpu", "--threads", "1", "--timeout", "60")

    def pixels(out: str, *launcher: str) -> list[bytes]:
        program = [sys.executable, "-m", "ditmesh", "generate", "a red fox", *settings, *where, *launcher]
        done = subprocess.run(
            [*program, "--out", str(tmp_path / out)], capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        return [Image.open(picture["path"]).tobytes() for picture in json.loads(done.stdout)["images"]]

    assert pixels("cluster", "--launcher", "ray") == pixels("here")
    assert gone()


def test_no_cluster_there() -> None:
    code = "from ditmesh.launch import launcher; launcher('ray', 1, 'cpu')"
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "no Ray cluster answers at 127.0.0.1:1" in done.stderr
