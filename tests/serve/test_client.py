"""`ditmesh.Client` against a server without ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

import ditmesh
from ditmesh.client import Client
from ditmesh.errors import InputError
from ditmesh.generate.receipt import Receipt
from ditmesh.serve.errors import NoSpace, QueueFull, UnknownJob
from ditmesh.serve.http.keys import new_key
from ditmesh.serve.settings import ApiSettings
from support.serving import FakeBackend, drawn, serving

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(scope="module")
def url(backend: FakeBackend) -> Iterator[str]:
    with serving(backend, ApiSettings(keep_alive=0.2)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    with ditmesh.Client(url, patience=0.0) as client:
        yield client


def test_importing_the_client_loads_neither_torch_nor_diffusers():
    code = "import sys, ditmesh; ditmesh.Client('http://x').close(); print({'torch', 'diffusers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_pictures_with_their_receipts(client: Client):
    seen: list[str] = []
    pictures = client.generate(
        "a red fox", n=2, seed=7, steps=3, size=(32, 16), previews=2, loras={"oil": 0.5},
        on_event=lambda event: seen.append(event.event),
    )  # fmt: skip
    for picture, seed in zip(pictures, (7, 8), strict=True):
        assert picture.tobytes() == drawn("a red fox", seed, (32, 16)).tobytes()
        receipt = picture.receipt  # type: ignore[attr-defined]
        assert isinstance(receipt, Receipt)
        assert (receipt.seed, receipt.prompt, receipt.steps) == (seed, "a red fox", 3)
    assert {"queued", "step", "preview", "image", "succeeded"} <= set(seen)
    job = client.jobs(limit=1)[0]
    assert [(lora.name, lora.scale) for lora in job.request.loras] == [("oil", 0.5)]
    assert client.job(job.id) == job
    assert client.file(job.id, 1)[:4] == b"\x89PNG"
    assert [model.id for model in client.models()] == ["stripes", "films"]
    assert client.server().ready
    # What is over is told again, from where one asks.
    assert [event.event for event in client.events(job.id, after=12)][-1] == "succeeded"


def test_pictures_to_send(client: Client, backend: FakeBackend, tmp_path: Path):
    image = Image.new("RGB", (8, 8), "red")
    image.save(tmp_path / "a.jpg")
    image.save(tmp_path / "a.bmp")
    for given in (image, tmp_path / "a.jpg", str(tmp_path / "a.bmp"), (tmp_path / "a.jpg").read_bytes()):
        job = client.submit("a", image=given, strength=0.5)
        assert job.request.inputs[0].digest in backend.inputs
    (tmp_path / "text").write_text("no picture")
    for wrong, words in ((tmp_path / "none.png", "cannot read the mask"), (tmp_path / "text", "is not an image")):
        with pytest.raises(InputError, match=words):
            client.submit("a", image=image, mask=wrong)


def test_errors_are_ours_in_the_servers_words(client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="n: 17 results are more than this server's 16"):
        client.generate("a", n=17)
    with pytest.raises(InputError, match="model 'x' is none of this server's"):
        client.generate("a", model="x")
    with pytest.raises(UnknownJob, match="there is no job"):
        client.job("job_" + "0" * 32)
    with pytest.raises(InputError, match="it failed of invalid_request"):
        client.generate("fail:invalid_request")
    with pytest.raises(ditmesh.ServerError, match="it failed of stalled") as failed:
        client.generate("fail:stalled")
    assert (failed.value.code, failed.value.status) == ("stalled", None)
    monkeypatch.setattr(backend, "full_disk", True)
    with pytest.raises(NoSpace, match="the disk is full"):
        client.generate("a")
    monkeypatch.setattr(backend, "full_disk", False)
    monkeypatch.setattr(backend, "broken", True)
    with pytest.raises(ditmesh.ServerError, match="the server has failed") as broken:
        client.generate("a")
    assert broken.value.status == 500


def test_full_servers_are_asked_again(url: str, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch):
    """As long as one is willing to wait, as often as the server says."""
    monkeypatch.setattr(backend, "most", 0)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            monkeypatch.setattr(backend, "most", 10)

    monkeypatch.setattr("ditmesh.client.time.sleep", wait)
    with ditmesh.Client(url, patience=13.0) as client, pytest.raises(QueueFull, match="wait already") as full:
        client.submit("a")
    assert full.value.retry_after == 7
    assert waits == [7.0]
    waits.clear()
    with ditmesh.Client(url, patience=20.0) as client:
        assert client.submit("a").status == "queued"
    assert waits == [7.0, 7.0]


def test_no_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with ditmesh.Client(url) as client, pytest.raises(InputError, match=f"no server answers at {url} .*start one with"):
        client.models()


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key = new_key(tmp_path / "keys")
    with serving(FakeBackend(), ApiSettings(keys=tmp_path / "keys")) as url:
        with ditmesh.Client(url) as client, pytest.raises(InputError, match="a key is needed"):
            client.models()
        with ditmesh.Client(url, key) as client:
            assert len(client.generate("a")) == 1
        monkeypatch.setenv("DITMESH_API_KEY", key)
        with ditmesh.Client(url) as client:
            assert len(client.jobs()) == 1


def test_breaking_off_cancels(url: str, backend: FakeBackend):
    def stop(event: Any) -> None:
        if event.event == "step":
            raise KeyboardInterrupt

    with ditmesh.Client(url) as client:
        with pytest.raises(KeyboardInterrupt):
            client.generate("a", steps=200, on_event=stop)
        assert client.jobs(limit=1)[0].status == "cancelled"


def test_lost_connections_are_made_again(url: str):
    """A stream that breaks off goes on behind the last event that was seen."""
    asked: list[str | None] = []

    class Cut(httpx.HTTPTransport):
        """Answers of streams end after some bytes."""

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if not request.url.path.endswith("/events"):
                return response
            asked.append(request.headers.get("last-event-id"))
            data = response.read()
            if len(asked) > 2:
                return httpx.Response(200, content=data)

            def some() -> Iterator[bytes]:
                yield data[:300]
                raise httpx.ReadError("cut")

            return httpx.Response(200, content=some())

    with ditmesh.Client(url, patience=5.0) as client:
        client._http = httpx.Client(transport=Cut(), base_url=url)
        job = client.submit("a", steps=5)
        ids = [event.id for event in client.events(job.id)]
    assert ids == list(range(1, 10))
    assert asked[0] is None
    assert len(asked) == 3
    assert 0 < int(asked[1] or 0) < int(asked[2] or 0)


def test_a_submission_whose_answer_is_lost_is_not_made_again(url: str):
    class Lost(httpx.HTTPTransport):
        """The server has the request, and its answer does not come."""

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if request.method != "GET":
                response.read()
                raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
            return response

    with ditmesh.Client(url, patience=5.0) as client:
        client._http = httpx.Client(transport=Lost(), base_url=url)
        before = client.jobs(limit=1000)
        with pytest.raises(ditmesh.ServerError, match="does not answer"):
            client.submit("lost")
        (job, *rest) = client.jobs(limit=1000)
        assert rest == before
        # Whoever breaks off does not wait.
        with pytest.raises(ditmesh.ServerError, match="does not answer"):
            client.cancel(job.id)
