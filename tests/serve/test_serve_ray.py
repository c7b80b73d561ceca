"""A server whose ranks are actors of a Ray cluster, and several replicas behind one queue, with the embedded model."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

import ditmesh
from ditmesh import zoo
from ditmesh.cli.values import embedded_or
from ditmesh.config import ParallelConfig
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.service import Service
from ditmesh.serve.settings import ServiceSettings
from ditmesh.serve.types import Event, JobRequest
from support import processes
from support.batching import GUIDANCE, alone, pixels
from support.serve import ended, until

pytestmark = [pytest.mark.timeout(400), pytest.mark.matrix]

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray")
# As the command has it for the embedded model.
TOKENS = embedded_or("emoji-sd3", None, None)[3]
TEST_PATH = os.pathsep.join(path for path in sys.path if path)


def within(seconds: float, condition: Callable[[], Any]) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.1)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """What all processes carry that a test starts."""
    mark, _ = processes.marked({})
    monkeypatch.setenv(processes.MARK, mark)
    return mark


# --- the command


@pytest.fixture
def cluster(mark: str) -> Iterator[str]:
    """The address of a cluster of two nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


@needs_ray
def test_the_command_serves_from_actors_of_a_cluster(cluster: str, mark: str, tmp_path: Path) -> None:
    """Progress, previews, cancelling, an actor that is killed, and an end that leaves none."""
    environment = {**os.environ, "PYTHONPATH": TEST_PATH, "OMP_NUM_THREADS": "1"}
    arguments = ["--launcher", f"ray@{cluster}", "--device", "cpu", "--devices", "2", "--ulysses", "2"]
    command = [sys.executable, "-m", "ditmesh", "serve", *arguments, "--port", "0", "--folder", str(tmp_path / "state")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said.startswith("ditmesh: loading emoji-sd3; listening at http://127.0.0.1:"), process.communicate()
            url = said.split()[-1]
            within(200, lambda: httpx.get(f"{url}/readyz").status_code == 200)
            assert len(processes.actors_of(mark)) == 2
            with ditmesh.Client(url) as client:
                uses(client, mark)
        finally:
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == ""
    assert "Traceback" not in err
    within(20, lambda: not processes.actors_of(mark))


def uses(client: ditmesh.Client, mark: str) -> None:
    seen: list[Event] = []
    asked = {"prompt": "a red fox", "seed": 3, "steps": 8, "guidance": GUIDANCE}
    (first,) = client.generate(**asked, previews=3, on_event=seen.append)
    assert [one.data["step"] for one in seen if one.event == "step"] == list(range(1, 9))
    assert [one.data["step"] for one in seen if one.event == "preview"] == [3, 6]
    assert abs(pixels(first) - alone("a red fox", 3, num_inference_steps=8, max_sequence_length=TOKENS)).max() <= 1

    job, steps = client.submit("a pizza", steps=200), 0
    for event in client.events(job.id):
        steps = event.data["step"] if event.event == "step" else steps
        if event.event == "step" and steps == 3:
            client.cancel(job.id)
    assert event.event == "cancelled"
    assert steps <= 5

    job, before, names = client.submit(**asked, n=2), processes.actors_of(mark), Counter[str]()
    for event in client.events(job.id):
        names[event.event] += 1
        if event.event == "step" and names["step"] == 3:
            os.kill(before[1], signal.SIGKILL)
        if event.event == "restarted":
            assert "is gone: its process on host" in event.data["reason"]
    assert (event.event, names["restarted"], names["image"]) == ("succeeded", 1, 2)
    again = client.job(job.id)
    assert again.attempt == 2
    one, _ = client.images(again)
    assert abs(pixels(one) - pixels(first)).max() <= 1
    within(30, lambda: before[1] not in processes.actors_of(mark))
    (replica,) = client.server().replicas
    assert (replica.state, replica.restarts) == ("ready", 1)


# --- replicas


@pytest.mark.parametrize(("launcher", "devices"), [("local", 1), ("local", 2), pytest.param("ray", 1, marks=needs_ray)])
def test_replicas_share_the_jobs_and_finish_those_of_one_that_is_killed(
    tmp_path: Path, mark: str, launcher: str, devices: int
) -> None:
    spec = ModelSpec("emoji-sd3", str(zoo.path()), ParallelConfig(ulysses=devices), together=2)
    settings = ServiceSettings(devices=devices, replicas=2, device="cpu", threads=1, launcher=launcher, max_batch=2)
    service = Service([spec], tmp_path, settings)
    asyncio.run(shared(service, mark if launcher == "ray" else ""))
    if launcher == "ray":
        import ray

        assert not ray.is_initialized()
        within(20, lambda: not processes.actors_of(mark))


async def shared(service: Service, mark: str) -> None:
    """``mark``: of the cluster whose actors are the ranks."""
    await service.start()
    try:
        await until(lambda: all(one.state == "ready" for one in service.state().replicas), 120.0)
        asked = [JobRequest(prompt="a red fox", seed=seed, steps=16, guidance=GUIDANCE) for seed in range(7)]
        jobs = [await service.submit(one, "") for one in asked]
        # Which replicas a job was seen on, before and after one of them is killed.
        seen: dict[str, set[str]] = {job.id: set() for job in jobs}
        killed: set[str] = set()

        def look() -> bool:
            replicas = service.state().replicas
            for replica in replicas:
                for id in replica.running:
                    seen[id].add(replica.name)
            return all(len(replica.running) > 0 for replica in replicas)

        await until(look)
        group = service._dispatcher.slots[0]
        killed |= {live.id for live, _ in group.running.values()}
        pids = processes.actors_of(mark) if mark else group.replica._pool.pids  # type: ignore[union-attr]
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: look() or any(one.restarts for one in service.state().replicas), 30.0)
        watching = asyncio.create_task(_watched(look))
        done = [await ended(service, job) for job in jobs]
        watching.cancel()

        for job in done:
            assert job.status == "succeeded", job
            names = Counter([event.event async for event in service.events(job.id, "")])
            # Each picture once, whatever happened meanwhile.
            assert names["image"] == job.request.n
            assert names["restarted"] == job.attempt - 1
            for one in job.images:
                file = await service.result(job.id, one.index, "")
                drawn = pixels(Image.open(file.path))
                assert abs(drawn - alone("a red fox", one.seed, num_inference_steps=16)).max() <= 1
        assert Counter(len(names) for names in seen.values())[0] == 0
        assert {name for names in seen.values() for name in names} == {"replica-0", "replica-1"}
        again = {job.id for job in done if job.attempt > 1}
        assert again
        # Which of the replicas an actor belongs to is not looked at.
        assert mark or again <= killed
        # Those that nobody killed went on.
        assert len(again) < len(done)
        await until(lambda: all(one.state == "ready" for one in service.state().replicas), 60.0)
        assert sum(one.restarts for one in service.state().replicas) == 1
    finally:
        await service.stop(5.0)


async def _watched(look: Callable[[], Any]) -> None:
    while True:
        look()
        await asyncio.sleep(0.02)
