"""Two hosts: network namespaces of this machine, with a real network path between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support import hosts as support
from support.hosts import two_hosts

pytestmark = pytest.mark.skipif(support.missing() is not None, reason=str(support.missing()))


# --- ranks -----------------------------------------------------------------------------------------------------

TEST_PATH = os.pathsep.join(sys.path)
# The longest that ranks may take to import, meet and compute on a busy machine.
LIMIT = 300

TWO = [{"ulysses": 2}, {"tensor": 2}, {"cfg": 2}, {"pipe": 2, "warmup": "fixed(4)"}]
TWO += [{"ring": 2, "reproducible": True}]
FOUR = [
    {"ulysses": 2, "ring": 2},
    {"ulysses": 4, "shard": 4},
    {"data": 2, "ulysses": 2, "shard": 4},
    {"tensor": 2, "ring": 2},
    {"cfg": 2, "ulysses": 2, "reproducible": True},
    {"data": 2, "cfg": 2},
    {"pipe": 2, "ulysses": 2, "warmup": "fixed(4)"},
    {"ring": 4, "exchange": "displaced", "warmup": "fixed(4)"},
]


def on_hosts(folder: Path, tasks: list[tuple[str, dict[str, Any]]], ranks: int) -> list[list[dict[str, Any]]]:
    """For every task the results of all ranks, which torchrun starts on two hosts; see `support.host_ranks`."""
    (folder / "tasks.json").write_text(json.dumps(tasks))
    with two_hosts(folder) as two:
        extra = {"PYTHONPATH": TEST_PATH, "OMP_NUM_THREADS": "1"}
        command = ["-m", "support.host_ranks", str(folder)]
        agents = two.torchrun(command, ranks, extra=extra, stderr=subprocess.PIPE, text=True)
        said = [agent.communicate(timeout=LIMIT)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * 2, "\n".join(said)
    every = [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]*.json"))]
    return [list(of_ranks) for of_ranks in zip(*every, strict=True)]


def check(name: str, config: dict[str, Any], of_ranks: list[dict[str, Any]], numbers: list[int]) -> None:
    """What ranks on hosts of these numbers have to find."""
    shown = name, config, of_ranks
    assert [one["hosts"] for one in of_ranks] == [numbers] * len(numbers), shown
    assert max(one["error"] for one in of_ranks) <= 1e-5, shown
    if config.get("reproducible"):
        assert {one["hash"] for one in of_ranks} == {hash_on_one_device(name)}, shown


def hash_on_one_device(name: str) -> str:
    """Of the same settings on one device, in this process."""
    import ditmesh
    from support.host_ranks import example, hash_of, run

    model, call = example(name)
    with ditmesh.parallelized(model, {"reproducible": True}):
        return hash_of(run(model, call))


def test_two_hosts_compute_what_one_device_does(tmp_path):
    tasks = [("SD3", config) for config in TWO]
    for (name, config), of_ranks in zip(tasks, on_hosts(tmp_path, tasks, 1), strict=True):
        check(name, config, of_ranks, [0, 1])
        assert all(set(one["transports"].values()) <= {"gloo"} for one in of_ranks)
        # The busiest axes, and on one rank.
        busy = [axis for axis in ("ulysses", "tensor") if axis in config]
        assert [len(one["warned"]) for one in of_ranks] == [len(busy), 0]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["SD3", "Flux"])
def test_two_hosts_of_two_ranks(tmp_path, name):
    tasks = [(name, config) for config in FOUR]
    for (_, config), of_ranks in zip(tasks, on_hosts(tmp_path, tasks, 2), strict=True):
        check(name, config, of_ranks, [0, 0, 1, 1])


@pytest.mark.matrix
def test_the_command_line_on_two_hosts_draws_the_bits_of_one(tmp_path):
    """Under torchrun; the first rank's host writes, and the second one says nothing."""
    words = ["-m", "ditmesh", "generate", "a red fox", "--steps", "2", "--reproducible", "--threads", "1", "--json"]
    extra = {"PYTHONPATH": TEST_PATH, "OMP_NUM_THREADS": "1"}
    with two_hosts(tmp_path) as two:
        pipe = subprocess.PIPE
        agents = two.torchrun(
            [*words, "--ulysses", "2", "--out", str(tmp_path / "two")], extra=extra, stdout=pipe, stderr=pipe, text=True
        )
        said = [agent.communicate(timeout=LIMIT) for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], said
    assert said[1][0] == ""
    assert json.loads(said[0][0])["devices"] == 2
    alone = [sys.executable, "-P", *words, "--devices", "1", "--out", str(tmp_path / "one")]
    subprocess.run(alone, env={**os.environ, **extra}, check=True, capture_output=True, timeout=LIMIT)
    (one,), (other,) = (list((tmp_path / name).glob("*.png")) for name in ("one", "two"))
    with Image.open(one) as first, Image.open(other) as second:
        assert first.tobytes() == second.tobytes()
