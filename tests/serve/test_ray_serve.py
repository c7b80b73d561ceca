"""The server under Ray Serve: its proxy, its health check and its end, with ranks as actors of the same cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

import ditmesh
from ditmesh.cli.values import embedded_or
from ditmesh.errors import InputError
from ditmesh.ray_serve import build, plan_of
from ditmesh.serve.types import Event
from support import processes
from support.batching import GUIDANCE, alone, pixels

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "serve" / "ray-serve.yaml"
# As the command has it for the embedded model.
TOKENS = embedded_or("emoji-sd3", None, None)[3]
TEST_PATH = os.pathsep.join(path for path in sys.path if path)

pytestmark = pytest.mark.timeout(400)


def test_settings_are_the_options_of_serve(tmp_path: Path):
    # As `serve run` has them, and as YAML has them.
    text = {"devices": "2", "ulysses": "2", "reproducible": "true", "log_prompts": "false", "max_pixels": "4096"}
    plan = plan_of({**text, "keys": str(tmp_path / "keys"), "folder": str(tmp_path)})
    assert plan == plan_of(
        {**text, "devices": 2, "ulysses": 2, "reproducible": True, "log_prompts": False, "max_pixels": 4096}
        | {"keys": str(tmp_path / "keys"), "folder": str(tmp_path)}
    )
    assert (plan.service.devices, plan.settings.max_pixels, plan.models.folder) == (2, 4096, tmp_path)
    (spec,) = plan.specs
    assert spec.config.ulysses == 2
    assert spec.config.reproducible
    (spec,) = plan_of({"vae": "whole", "text_encoder": "freed", "strict": False}).specs
    assert (spec.config.vae, spec.config.text_encoder, spec.config.strict) == ("whole", "freed", False)
    both = plan_of({"model": ["emoji-sd3", "clothes=fashion-dit"], "allow_host": "images.example.org"})
    assert [spec.name for spec in both.specs] == ["emoji-sd3", "clothes"]
    assert both.settings.hosts == ("127.0.0.1", "localhost", "::1", "127.0.0.1", "images.example.org")
    assert plan_of(yaml.safe_load(EXAMPLE.read_text())["applications"][0]["args"]).service.grace == 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "cpu", "ulyses": 2}, "setting 'ulyses' is none of ditmesh serve's; did you mean 'ulysses'"),
        ({"devices": "two"}, "'--devices'"),
        ({"log_prompts": "maybe"}, "log_prompts='maybe' is neither true nor false"),
        ({"launcher": "local"}, "leave the launcher out"),
    ],
)
def test_what_is_refused_before_anything_is_deployed(arguments: dict[str, Any], words: str):
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'ray[serve]'")
    with pytest.raises(InputError) as refused:
        build(arguments)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def within(seconds: float, condition: Any) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """The address of a cluster, and the mark of its processes."""
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'ray[serve]'")
    from ray.cluster_utils import Cluster

    mark, _ = processes.marked({})
    monkeypatch.setenv(processes.MARK, mark)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster.address, mark
    cluster.shutdown()


@pytest.mark.matrix
def test_the_example_serves_until_it_is_deleted(cluster: tuple[str, str], tmp_path: Path):
    """The example's own file, on another port and in another folder; two meshes behind one queue."""
    config = yaml.safe_load(EXAMPLE.read_text())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = config["http_options"]["port"] = free.getsockname()[1]
    (application,) = config["applications"]
    application["args"] |= {"folder": str(tmp_path / "state"), "devices": 1, "ulysses": 1, "replicas": 2}
    application["args"] |= {"threads": 1, "device": "cpu"}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    address, mark = cluster
    environment = {**os.environ, "PYTHONPATH": TEST_PATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", address, str(tmp_path / "serve.yaml")]
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, preexec_fn=processes._hear)
        try:
            within(200, lambda: process.poll() is not None or answers(url))
            assert process.poll() is None
            with ditmesh.Client(url) as client:
                uses(client, url, mark)
                left = leaves(client, url, address)
            # What was under way was ended, and no rank is left.
            assert [path.name for path in (tmp_path / "state" / "results" / left).iterdir()] == ["0.png"]
            within(30, lambda: not processes.actors_of(mark))
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        except BaseException:
            print((tmp_path / "said").read_text()[-8000:])
            raise
        finally:
            process.kill()


def uses(client: ditmesh.Client, url: str, mark: str) -> None:
    asked = {"prompt": "a red fox", "seed": 3, "steps": 8, "guidance": GUIDANCE}
    seen: list[Event] = []
    (first,) = client.generate(**asked, previews=3, on_event=seen.append)
    assert abs(pixels(first) - alone("a red fox", 3, num_inference_steps=8, max_sequence_length=TOKENS)).max() <= 1
    # As they happen: the picture is not there yet.
    assert [one.data["step"] for one in seen if one.event == "step"] == list(range(1, 9))
    assert [one.data["step"] for one in seen if one.event == "preview"] == [3, 6]
    assert "<form" in httpx.get(url).text
    assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
    assert "ditmesh_jobs_queued" in httpx.get(f"{url}/metrics").text
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as official:
        events = list(
            official.images.generate(prompt="a pizza", stream=True, partial_images=2, extra_body={"steps": 6})
        )
    assert [event.type.rpartition(".")[2] for event in events] == ["partial_image", "partial_image", "completed"]

    # A client that goes away cancels its job.
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/images/generations", json={"prompt": "left", "steps": 200}, timeout=2)
    within(20, lambda: client.jobs()[0].request.prompt == "left" and client.jobs()[0].status == "cancelled")

    job, steps = client.submit("a pizza", steps=200), 0
    for event in client.events(job.id):
        steps = event.data["step"] if event.event == "step" else steps
        if event.event == "step" and steps == 3:
            client.cancel(job.id)
    assert event.event == "cancelled"

    # Both meshes work, and one that is killed costs nobody a picture.
    jobs = [client.submit("a red fox", seed=seed, steps=10, guidance=GUIDANCE) for seed in range(20)]
    within(60, lambda: sum(len(one.running) > 0 for one in client.server().replicas) == 2)
    os.kill(processes.actors_of(mark)[0], signal.SIGKILL)
    for seed, one in enumerate(jobs):
        names = Counter(event.event for event in client.events(one.id))
        assert (names["succeeded"], names["image"]) == (1, 1)
        (drawn,) = client.images(client.job(one.id))
        assert (
            abs(pixels(drawn) - alone("a red fox", seed, num_inference_steps=10, max_sequence_length=TOKENS)).max() <= 1
        )
    assert sum(one.restarts for one in client.server().replicas) == 1


DELETE = "import ray, sys; from ray import serve; ray.init(sys.argv[1], namespace='serve'); serve.delete('ditmesh')"


def leaves(client: ditmesh.Client, url: str, address: str) -> str:
    """Delete the application while a job runs and a stream without an end is read; the job's id."""
    with httpx.stream("GET", f"{url}/v1/server/events", timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: state"
        assert json.loads(next(lines).removeprefix("data: "))["ready"]
        job = client.submit("a red fox", steps=150)
        within(20, lambda: client.job(job.id).step > 2)
        deleting = subprocess.Popen([sys.executable, "-c", DELETE, address], stderr=subprocess.DEVNULL)
        # Ray Serve waits for the stream, and the stream ends when the job has.
        for _ in lines:
            pass
    assert deleting.wait(60) == 0
    return job.id
