"""The HTTP API over a backend in memory: what clients send, what they are answered, and who is let in."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from ditmesh.errors import InputError, ServerError
from ditmesh.serve.errors import without_quotes
from ditmesh.serve.http.app import create_app
from ditmesh.serve.http.keys import Keys, new_key, read_keys
from ditmesh.serve.http.listen import HttpServer, bound
from ditmesh.serve.http.logs import LineFormatter, log_config
from ditmesh.serve.settings import ApiSettings
from support.serving import FakeBackend, drawn, serving

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(scope="module")
def url(backend: FakeBackend) -> Iterator[str]:
    with serving(
        backend, ApiSettings(keep_alive=0.2, state_interval=0.02, max_body=200_000, max_input_pixels=10_000)
    ) as url:
        yield url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def picture(data: str) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(data)))


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    out = BytesIO()
    image.save(out, format=kind)
    return out.getvalue()


def sse(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Events of a stream; comments are events without fields."""
    event: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            yield {}
        elif line:
            name, _, value = line.partition(": ")
            event[name] = value
        elif event:
            yield event
            event = {}


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "code", "param"}
    return body["error"]


# --- as OpenAI's clients speak


def test_generations_with_the_official_client(client: openai.OpenAI):
    made = client.images.generate(prompt="a red fox", n=2, size="32x16", extra_body={"seed": 5, "steps": 3})
    assert made.data is not None
    assert [image.seed for image in made.data] == [5, 6]  # type: ignore[attr-defined]
    assert (made.size, made.output_format, made.background) == ("32x16", "png", "opaque")
    for image in made.data:
        seed = image.seed  # type: ignore[attr-defined]
        assert picture(image.b64_json or "").convert("RGB").tobytes() == drawn("a red fox", seed, (32, 16)).tobytes()


def test_urls_and_formats(client: openai.OpenAI, http: httpx.Client):
    made = client.images.generate(
        prompt="a", response_format="url", output_format="webp", size="auto", quality="auto", background="opaque",
        moderation="low", user="somebody",
    )  # fmt: skip
    assert made.data is not None
    answer = http.get(made.data[0].url or "")
    assert answer.headers["content-type"] == "image/webp"
    assert Image.open(BytesIO(answer.content)).size == (64, 64)


def test_streams_with_partial_images(client: openai.OpenAI):
    events = list(client.images.generate(prompt="a", stream=True, partial_images=3, extra_body={"steps": 8, "seed": 1}))
    assert [event.type for event in events] == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:3]] == [0, 1, 2]  # type: ignore[union-attr]
    assert picture(events[0].b64_json).format == events[0].output_format.upper() == "JPEG"
    assert picture(events[-1].b64_json).convert("RGB").tobytes() == drawn("a", 1, (64, 64)).tobytes()
    (only,) = client.images.generate(prompt="a", stream=True)
    assert only.type == "image_generation.completed"


def test_edits_with_the_official_client(client: openai.OpenAI, backend: FakeBackend):
    image = Image.new("RGB", (32, 32), "red")
    hole = Image.new("RGBA", (32, 32), (0, 0, 0, 255))
    hole.paste((0, 0, 0, 0), (8, 8, 16, 16))
    made = client.images.edit(
        image=("a.jpg", file_of(image, "JPEG")),
        mask=("m.png", file_of(hole)),
        prompt="a hat",
        extra_body={"strength": 0.5, "seed": 9},
    )
    assert made.data is not None
    job = asyncio.run(backend.job(made.job, ""))  # type: ignore[attr-defined]
    assert (job.request.strength, job.request.seed) == (0.5, 9)
    kept = {one.role: Image.open(BytesIO(backend.inputs[one.digest])) for one in job.request.inputs}
    assert (kept["image"].mode, kept["mask"].mode) == ("RGB", "L")
    # White is what is generated anew: where the mask was transparent.
    assert kept["mask"].getbbox() == (8, 8, 16, 16)
    streamed = list(client.images.edit(image=file_of(image), prompt="a", stream=True, partial_images=1))
    assert [event.type for event in streamed] == ["image_edit.partial_image", "image_edit.completed"]


def test_models_with_the_official_client(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["stripes", "films"]
    assert client.models.retrieve("films").owned_by == "ditmesh"
    with pytest.raises(openai.NotFoundError, match="use one of: 'stripes', 'films'"):
        client.models.retrieve("some/other")


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"prompt": ""}, openai.BadRequestError, "prompt: string should have at least 1 character, not ''"),
        ({"n": 17}, openai.BadRequestError, "n: 17 results are more than this server's 16"),
        ({"size": "4096x4096"}, openai.BadRequestError, "size 4096x4096 has more than this server's 4194304 pixels"),
        ({"size": "33x32"}, openai.BadRequestError, "33 pixels are no multiple of 8"),
        ({"size": "large"}, openai.BadRequestError, "size large: write WIDTHxHEIGHT, for example 1024x1024"),
        ({"extra_body": {"negative_prompt": "a" * 10_001}}, openai.BadRequestError, "10001 characters"),
        ({"extra_body": {"seed": 2**63}}, openai.BadRequestError, "seed: "),
        ({"extra_body": {"sead": 3}}, openai.BadRequestError, "sead: there is no field .sead.; .* did you mean .seed."),
        ({"extra_body": {"loras": [{"name": "../x"}]}}, openai.BadRequestError, "there is no LoRA '../x'"),
        ({"style": "vivid"}, openai.BadRequestError, "style='vivid' means nothing to this server; leave it out"),
        ({"output_compression": 50}, openai.BadRequestError, "output_compression"),
        ({"partial_images": 2}, openai.BadRequestError, "partial_images needs stream=true"),
        ({"model": "dall-e-3"}, openai.NotFoundError, "model 'dall-e-3' is none of this server's"),
        ({"model": "films"}, openai.BadRequestError, "model 'films' makes videos; use POST /v1/videos"),
        ({"prompt": "fail:out_of_memory"}, openai.InternalServerError, "it failed of out_of_memory"),
        ({"prompt": "fail:invalid_request"}, openai.BadRequestError, "it failed of invalid_request"),
    ],
)
def test_errors_are_those_of_the_official_client(client: openai.OpenAI, arguments: Any, kind: Any, words: str):
    with pytest.raises(kind, match=words):
        client.images.generate(**({"prompt": "a"} | arguments))


def test_a_failure_in_a_stream_is_the_clients_error(client: openai.OpenAI):
    with pytest.raises(openai.APIError, match="it failed of stalled") as failed:
        list(client.images.generate(prompt="fail:stalled", stream=True))
    assert failed.value.code == "stalled"


def test_full_queues_and_disks(client: openai.OpenAI, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend, "most", 0)
    with pytest.raises(openai.RateLimitError, match="jobs wait already") as full:
        client.images.generate(prompt="a")
    assert full.value.response.headers["retry-after"] == "7"
    monkeypatch.setattr(backend, "most", 10)
    monkeypatch.setattr(backend, "full_disk", True)
    with pytest.raises(openai.InternalServerError, match="the disk is full") as full_disk:
        client.images.generate(prompt="a")
    assert full_disk.value.status_code == 507


def test_a_bug_is_a_sentence_and_not_a_traceback(
    http: httpx.Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(backend, "broken", True)
    answer = http.post("/v1/jobs", json={"prompt": "a secret"})
    assert answer.status_code == 500
    assert error_of(answer)["message"] == "the server has failed; its log says more"
    assert "the queue is broken" in caplog.text
    assert "a secret" not in caplog.text


# --- clients that go away


def until(true: Any, seconds: float = 10.0) -> bool:
    limit = time.monotonic() + seconds
    while not true() and time.monotonic() < limit:
        time.sleep(0.01)
    return bool(true())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_job(url: str, backend: FakeBackend, stream: bool):
    backend.hold(True)
    try:
        sent = {"prompt": "left", "stream": stream}
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.stream("POST", f"{url}/v1/images/generations", json=sent, timeout=0.5) as answer,
        ):
            assert stream
            # The first is a comment, in the silence of ranks that do nothing.
            assert next(answer.iter_lines()).startswith(":")
        (job,) = asyncio.run(backend.jobs("", 1))
        assert job.request.prompt == "left"
        assert until(lambda: job.status == "cancelled")
    finally:
        backend.hold(False)
    # Nobody listens any more.
    assert until(lambda: backend.open_streams == 0)


def test_streams_of_clients_that_went_away_are_closed(url: str, http: httpx.Client, backend: FakeBackend):
    backend.hold(True)
    try:
        job = http.post("/v1/jobs", json={"prompt": "a"}).json()
        with httpx.Client(base_url=url) as other, other.stream("GET", f"/v1/jobs/{job['id']}/events") as stream:
            events = sse(stream.iter_lines())
            assert next(events)["event"] == "queued"
            assert backend.open_streams == 1
            # A comment in every silence.
            assert any(event == {} for event in (next(events), next(events)))
        assert until(lambda: backend.open_streams == 0)
        # The job of a client of jobs goes on.
        assert http.get(f"/v1/jobs/{job['id']}").json()["status"] in ("queued", "running")
    finally:
        backend.hold(False)


# --- jobs


def ended(http: httpx.Client, id: str) -> dict[str, Any]:
    with http.stream("GET", f"/v1/jobs/{id}/events") as stream:
        last = list(sse(stream.iter_lines()))[-1]
    return json.loads(last["data"])


def test_a_job_from_its_submission_to_its_file(http: httpx.Client):
    answer = http.post("/v1/jobs", json={"prompt": "a red fox", "n": 2, "size": "32x32", "seed": 3, "previews": 4})
    assert answer.status_code == 202, answer.text
    job = answer.json()
    with http.stream("GET", f"/v1/jobs/{job['id']}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [event for event in sse(stream.iter_lines()) if event]
    names = [event["event"] for event in events]
    assert names[:2] == ["queued", "started"]
    assert names[-1] == "succeeded"
    assert (names.count("step"), names.count("preview"), names.count("image")) == (16, 2, 2)
    assert [int(event["id"]) for event in events] == list(range(1, len(events) + 1))
    # After a lost connection only what is missing comes.
    with http.stream("GET", f"/v1/jobs/{job['id']}/events", headers={"Last-Event-ID": "15"}) as stream:
        assert next(sse(stream.iter_lines()))["id"] == "16"
    done = http.get(f"/v1/jobs/{job['id']}").json()
    assert (done["status"], done["step"]) == ("succeeded", 16)
    file = http.get(done["images"][1]["url"])
    assert file.headers["content-type"] == "image/png"
    assert Image.open(BytesIO(file.content)).tobytes() == drawn("a red fox", 4, (32, 32)).tobytes()
    saved = http.get(done["images"][1]["url"], params={"download": 1})
    assert saved.headers["content-disposition"] == f'attachment; filename="{job["id"]}-1.png"'
    assert http.get(f"/v1/jobs/{job['id']}/images/2").status_code == 404
    listed = http.get("/v1/jobs", params={"limit": 1}).json()
    assert [one["id"] for one in listed["data"]] == [job["id"]]
    assert http.get("/v1/jobs", params={"status": "queued"}).json()["data"] == []


def test_inputs_as_data_urls(http: httpx.Client, backend: FakeBackend):
    def submitted(data: str) -> httpx.Response:
        return http.post("/v1/jobs", json={"prompt": "a", "inputs": [{"role": "image", "data": data}]})

    image = Image.new("RGB", (16, 16), "blue")
    good = submitted("data:image/png;base64," + base64.b64encode(file_of(image)).decode())
    assert good.status_code == 202, good.text
    (kept,) = good.json()["request"]["inputs"]
    assert Image.open(BytesIO(backend.inputs[kept["digest"]])).tobytes() == image.tobytes()
    # Under its digest it can be used again.
    again = http.post("/v1/jobs", json={"prompt": "a", "inputs": [{"role": "image", "digest": kept["digest"]}]})
    assert again.status_code == 202
    large = base64.b64encode(file_of(Image.new("RGB", (101, 100)))).decode()
    for data, words in {
        "file:///etc/passwd": "no data URL",
        "http://example.org/a.png": "no data URL",
        "/etc/passwd": "no data URL",
        "data:image/svg+xml;base64,PHN2Zy8+": "no data URL",
        "data:image/png;base64,AAA": "not base64",
        "data:image/png;base64,AAAA": "is not an image",
        f"data:image/png;base64,{large}": "more than 10000 pixels",
        "data:image/png;base64," + base64.b64encode(file_of(image)[:60]).decode(): "cannot be decoded",
    }.items():
        refused = submitted(data)
        assert refused.status_code == 400, data
        assert words in error_of(refused)["message"]
        assert error_of(refused)["param"] == "image"


def test_cancelling_and_unknown_jobs(http: httpx.Client, backend: FakeBackend):
    backend.hold(True)
    try:
        job = http.post("/v1/jobs", json={"prompt": "a"}).json()
        assert http.delete(f"/v1/jobs/{job['id']}").json()["status"] == "cancelled"
        waiting = http.post("/v1/jobs", json={"prompt": "b"}).json()
        answers: list[httpx.Response] = []
        ask = threading.Thread(
            target=lambda: answers.append(http.post("/v1/images/generations", json={"prompt": "cancelled by another"}))
        )
        ask.start()
        assert until(lambda: asyncio.run(backend.jobs("", 1))[0].request.prompt == "cancelled by another")
        http.delete(f"/v1/jobs/{asyncio.run(backend.jobs('', 1))[0].id}")
        ask.join(10)
        assert answers[0].status_code == 409
        # The official client would ask again.
        assert answers[0].headers["x-should-retry"] == "false"
        http.delete(f"/v1/jobs/{waiting['id']}")
    finally:
        backend.hold(False)
    assert ended(http, job["id"])["status"] == "cancelled"
    for id in ("job_" + "0" * 32, "job_x", "..%2f..%2fetc"):
        for path in ("", "/events", "/images/0"):
            answer = http.get(f"/v1/jobs/{id}{path}")
            assert answer.status_code == 404, (id, path)
            error_of(answer)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"\\ud800": 1, "prompt": "a"}', "there is no field"),
        (b'{"prompt": "a", "guidance": NaN}', "guidance"),
        (b'{"prompt": "a", "size": "32x32", "width": 64}', "contradicts width and height"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(http: httpx.Client, sent: bytes, words: str):
    answer = http.post("/v1/jobs", content=sent, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert words in error_of(answer)["message"]
    assert "\n" not in error_of(answer)["message"]


# --- the server


def test_states_and_health(http: httpx.Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch):
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").status_code == 200
    monkeypatch.setattr(backend, "ready", False)
    answer = http.get("/readyz")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert error_of(answer)["message"] == "no replica is ready yet; ask again"
    whole = backend.state

    def failed() -> Any:
        state = whole()
        state.replicas[0].message = "rank 1 of 2 was killed by SIGKILL"
        return state

    monkeypatch.setattr(backend, "state", failed)
    said = error_of(http.get("/readyz"))["message"]
    assert said == "no replica is ready (rank 1 of 2 was killed by SIGKILL); ask again"
    monkeypatch.setattr(backend, "state", whole)
    assert http.get("/v1/server").json()["ready"] is False
    with http.stream("GET", "/v1/server/events") as stream:
        events = sse(stream.iter_lines())
        first = next(events)
        assert (first["event"], json.loads(first["data"])["ready"]) == ("state", False)
        # Only what has changed is sent, and comments meanwhile.
        assert next(events) == {}
        monkeypatch.setattr(backend, "ready", True)
        assert json.loads(next(event for event in events if event)["data"])["ready"] is True


def test_metrics_and_their_dashboard(http: httpx.Client, client: openai.OpenAI):
    with pytest.raises(openai.InternalServerError):
        client.images.generate(prompt="fail:stalled")
    assert http.post("/v1/jobs", json={"prompt": "a", "model": "none"}).status_code == 404
    text = http.get("/metrics").text
    for line in (
        'ditmesh_rank_step_seconds{device="cpu",rank="1",replica="0"} 0.01',
        'ditmesh_sent_bytes_total{axis="ulysses",replica="0"}',
        'ditmesh_job_failures_total{code="stalled"}',
        'ditmesh_jobs_refused_total{code="model_not_found"}',
        'ditmesh_http_requests_total{method="POST",route="/v1/jobs",status="404"}',
        "ditmesh_job_waiting_seconds_count",
        "ditmesh_drift{",
    ):
        assert line in text, line
    # Ids of jobs are no labels.
    assert "job_" not in re.sub(r"ditmesh_job_\w+", "", text)


def test_a_route_from_outside():
    """The page's example: it touches jobs, and one file."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8").partition("## A server's route")[2]
    code = text.partition("```python\n")[2].partition("```")[0]
    backend = FakeBackend()
    app = create_app(backend, ApiSettings(max_steps=8))
    # Its own application is of a server with ranks. Endpoints' annotations are looked up in their module.
    code, made = re.subn(r"^app = create_app\(.*\)$", "", code, flags=re.MULTILINE)
    assert made == 1
    exec(code, {"app": app, "__name__": __name__})

    async def ask() -> None:
        await backend.start()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            job = (await http.post("/v1/jobs", json={"prompt": "a fox", "seed": 3, "n": 2})).json()
            answer = await http.post(f"/v1/jobs/{job['id']}/again")
            assert (answer.status_code, answer.json()["request"]["seed"]) == (202, 5)
            answer = await http.post("/v1/jobs/x/again")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
            assert 'route="/v1/jobs/{id}/again",status="404"' in (await http.get("/metrics")).text
        await app.state.server.stop(0.0)

    asyncio.run(ask())


def test_answers_carry_what_browsers_heed(http: httpx.Client):
    for path in ("/", "/openapi.json", "/v1/models", "/nothing"):
        headers = http.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers


def test_hosts_and_origins(http: httpx.Client, url: str):
    """Names that lead here by somebody else's doing are not answered to, and pages of others not listened to."""
    answer = http.get("/v1/models", headers={"Host": "evil.example"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "wrong_host")
    port = url.rpartition(":")[2]
    for host in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200
    for origin in ("https://evil.example", "null", f"http://evil.example:{port}"):
        answer = http.post("/v1/images/edits", headers={"Origin": origin}, data={"prompt": "a"})
        assert answer.status_code == 403
    assert http.post("/v1/jobs", headers={"Origin": url}, json={"prompt": "a"}).status_code == 202


def test_bodies_are_bounded(http: httpx.Client):
    answer = http.post("/v1/jobs", json={"prompt": "a" * 200_001})
    assert answer.status_code == 413
    assert error_of(answer)["message"] == "the request's body has more than 200000 bytes; send a smaller one"

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(300):
            yield b"a" * 1000

    # Its length is not said before.
    answer = http.post("/v1/jobs", content=pieces(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    error_of(answer)
    files = {"image": ("a.png", b"a" * 200_001)}
    assert http.post("/v1/images/edits", data={"prompt": "a"}, files=files).status_code == 413


def test_edits_that_cannot_be(http: httpx.Client):
    image, small = file_of(Image.new("RGB", (32, 32))), file_of(Image.new("L", (16, 16)))
    for data, files, words in (
        ({"prompt": "a"}, {}, "an edit needs a picture"),
        ({}, {"image": image}, "prompt: field required"),
        ({"prompt": "a"}, {"image": image, "mask": small}, "use one size"),
        ({"prompt": "a"}, {"image": image, "other": image}, "other: the files here are image and mask"),
        ({"prompt": "a", "loras": "x"}, {"image": image}, "loras: no JSON"),
    ):
        answer = http.post(
            "/v1/images/edits", data=data, files={name: ("f", file) for name, file in files.items()} or {"x": b""}
        )
        assert answer.status_code == 400
        assert words in error_of(answer)["message"] or not files, answer.text
    twice = [("image", ("a", image)), ("image[]", ("b", image))]
    assert "given twice" in error_of(http.post("/v1/images/edits", data={"prompt": "a"}, files=twice))["message"]


# --- keys


def test_keys(tmp_path: Path):
    """Only who has a key is answered, and each sees its own jobs."""
    file = tmp_path / "keys"
    ours, theirs = new_key(file, "ours"), new_key(file)
    assert sorted(read_keys(file).values()) == ["", "ours"]
    assert ours not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    with (
        serving(FakeBackend(0.05), ApiSettings(keys=file, cors=("https://page.example",))) as url,
        httpx.Client(base_url=url) as http,
    ):
        for headers in ({}, {"Authorization": f"Basic {ours}"}, {"x-api-key": ours}):
            for path in ("/v1/models", "/metrics", "/v1/server/events"):
                answer = http.get(path, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert error_of(answer)["code"] == "invalid_api_key"
        for path in ("/healthz", "/readyz", "/openapi.json"):
            assert http.get(path).status_code == 200
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=ours, max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="the key is unknown"):
            client.with_options(api_key="dm-wrong").models.list()
        job = client.images.generate(prompt="a").job  # type: ignore[attr-defined]
        mine, other = ({"Authorization": f"Bearer {key}"} for key in (ours, theirs))
        assert http.get(f"/v1/jobs/{job}", headers=mine).status_code == 200
        for path in ("", "/events", "/images/0"):
            assert http.get(f"/v1/jobs/{job}{path}", headers=other).status_code == 404
        assert http.delete(f"/v1/jobs/{job}", headers=other).status_code == 404
        assert http.get("/v1/jobs", headers=other).json()["data"] == []
        long = http.post("/v1/jobs", json={"prompt": "x", "steps": 100}, headers=mine).json()["id"]
        assert until(lambda: http.get("/v1/server", headers=mine).json()["replicas"][0]["running"] == [long])
        assert http.get("/v1/server", headers=other).json()["replicas"][0]["running"] == []
        with http.stream("GET", "/v1/server/events", headers=other) as stream:
            assert long not in next(sse(stream.iter_lines()))["data"]
        http.delete(f"/v1/jobs/{long}", headers=mine)
        # A page that may ask is told so before it sends its key.
        origin = {"Origin": "https://page.example"}
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for answer in (http.options("/v1/jobs", headers=origin | asks), http.get("/v1/models", headers=origin)):
            assert answer.headers["access-control-allow-origin"] == "https://page.example"
        schema = http.get("/openapi.json").json()
        assert schema["paths"]["/v1/jobs"]["post"]["security"] == [{"key": []}]


def test_an_alias_is_a_model_that_front_ends_ask_for():
    with (
        serving(FakeBackend(), ApiSettings(aliases={"dall-e-3": "stripes"})) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        made = client.images.generate(
            prompt="a", model="dall-e-3", quality="hd", style="vivid", response_format="b64_json"
        )
        assert picture(made.data[0].b64_json).size == (64, 64)
        with pytest.raises(openai.BadRequestError, match="quality='hd' means nothing"):
            client.images.generate(prompt="a", model="stripes", quality="hd")
        with pytest.raises(openai.NotFoundError, match="model 'dall-e-2' is none of this server's"):
            client.images.generate(prompt="a", model="dall-e-2")


def test_files_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "keys"
    with pytest.raises(InputError, match="cannot read the keys"):
        Keys(file)
    file.write_text("# nobody\n")
    with pytest.raises(InputError, match="hold none"):
        Keys(file)
    file.write_text("dm-a-key-as-it-is\n")
    with pytest.raises(InputError, match=r"line 1 of the keys .* is not a SHA-256") as wrong:
        Keys(file)
    assert "dm-a-key" not in str(wrong.value)
    file.unlink()
    one = new_key(file)
    keys = Keys(file)
    assert keys.owner(one)
    assert keys.owner(one + "x") is None
    # Keys come and go while the server runs.
    other = new_key(file)
    monkeypatch.setattr("ditmesh.serve.http.keys.RELOAD_SECONDS", 0.0)
    assert keys.owner(other)
    file.write_text("\n".join(file.read_text().splitlines()[:1] + file.read_text().splitlines()[2:]))
    assert keys.owner(one) is None
    assert keys.owner(other)


# --- logs and traces


def test_logs_name_jobs_and_no_secrets(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "keys"
    key = new_key(file)
    for log_prompts in (False, True):
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, logger="ditmesh"),
            serving(FakeBackend(), ApiSettings(keys=file, log_prompts=log_prompts)) as url,
            httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}) as http,
        ):
            job = http.post("/v1/jobs", json={"prompt": "a secret wish", "negative_prompt": "another"}).json()["id"]
            ended(http, job)
            assert until(lambda: "job succeeded" in caplog.text)
        lines = [
            json.loads(LineFormatter("json").format(record)) for record in caplog.records if hasattr(record, "facts")
        ]
        ours = [line for line in lines if line.get("job") == job]
        assert [line["message"] for line in ours if line["logger"] == "ditmesh.serve"] == [
            "job accepted", "job started", "job succeeded"
        ]  # fmt: skip
        assert any(line["logger"] == "ditmesh.serve.access" and line["status"] == 202 for line in ours)
        texts = "\n".join(LineFormatter(form).format(record) for record in caplog.records for form in ("json", "text"))
        assert key not in texts
        assert ("a secret wish" in texts) is log_prompts
        assert "another" not in texts


def test_errors_in_the_log_quote_no_prompt():
    secret = " ".join(("a", "secret", "wish"))
    try:
        try:
            raise ValueError(f"cannot encode {secret!r}")
        except ValueError as error:
            raise RuntimeError(secret) from error
    except RuntimeError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "it failed", (), sys.exc_info())
    for form in ("json", "text"):
        text = LineFormatter(form).format(record)
        assert secret not in text
        assert text.index("ValueError") < text.index("RuntimeError")
        assert secret in LineFormatter(form, prompts=True).format(record)
    missing = logging.LogRecord("x", logging.ERROR, "", 0, "it failed", (), (None, OSError(2, "no file", "/x"), None))
    assert "no file: '/x'" in LineFormatter("text").format(missing)
    wish = "A red Fox, in the snow"
    for text, left in (
        ("rank 1 of 2 raised ValueError: a red fox in the", "rank 1 of 2 raised ValueError: …"),
        ("cut: ['fox in the snow'], see the snow", "cut: ['…'], see the snow"),
        ("rank 1 of 2 was killed by SIGKILL", "rank 1 of 2 was killed by SIGKILL"),
    ):
        assert without_quotes(text, [wish, None]) == left
    assert without_quotes("no 'fox' here, but foxes", ["fox"]) == "no '…' here, but foxes"
    assert without_quotes("no ':)' here", [":)"]) == "no '……' here"
    # A line stays one, whatever a client's text has.
    record = logging.LogRecord("x", logging.INFO, "", 0, "a\n2026-01-01 job succeeded", (), None)
    record.facts = {"model": "b\nc"}
    assert not any("\n" in LineFormatter(form).format(record) for form in ("json", "text"))
    assert log_config("json", "INFO")["loggers"]["ditmesh"]["level"] == "INFO"


# --- the end


@pytest.mark.parametrize("done", [False, True])
def test_a_server_that_stops_ends_what_is_under_way(done: bool):
    """Within its grace jobs end and their clients are answered; then streams end, and who waits is told."""
    backend = FakeBackend(step_seconds=0.05)
    seen: list[dict[str, str]] = []
    answers: list[httpx.Response] = []

    def follow() -> None:
        with httpx.stream("GET", f"{url}/v1/jobs/{job}/events", timeout=20) as stream:
            seen.extend(sse(stream.iter_lines()))

    def ask() -> None:
        answers.append(httpx.post(f"{url}/v1/images/generations", json={"prompt": "b"}, timeout=20))

    with serving(backend, ApiSettings(), grace=10.0 if done else 0.1) as url, httpx.Client(base_url=url) as http:
        backend.hold(not done)
        job = http.post("/v1/jobs", json={"prompt": "a"}).json()["id"]
        clients = [threading.Thread(target=work) for work in (follow, ask)]
        for client in clients:
            client.start()
        assert until(lambda: backend.open_streams == 2)
    for client in clients:
        client.join(10)
        assert not client.is_alive()
    assert seen[0]["event"] == "queued"
    assert (seen[-1]["event"] == "succeeded") is done
    assert answers[0].status_code == (200 if done else 503)
    if not done:
        assert "continues job_" in error_of(answers[0])["message"]
        # The job is not made twice by a client that asks again.
        assert answers[0].headers["x-should-retry"] == "false"
    assert backend.open_streams == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_the_first_signal_waits_and_the_second_does_not():
    path = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, "-m", "support.serving", "--port", "0", "--held"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert httpx.post(f"{url}/v1/jobs", json={"prompt": "a"}).status_code == 202
        process.terminate()
        assert until(lambda: httpx.get(f"{url}/readyz").status_code == 503)
        # Clients of the job that is under way are answered still, and new ones told to come back.
        assert httpx.get(f"{url}/v1/jobs").status_code == 200
        refused = httpx.post(f"{url}/v1/jobs", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
    finally:
        process.kill()


def test_a_server_ends_with_the_reason_when_its_backend_has_given_up():
    class Hopeless(FakeBackend):
        async def permanent_failure(self) -> str:
            await asyncio.sleep(0.2)
            return "there is no GPU; the jobs stay in the queue"

    backend = Hopeless()
    server = HttpServer(create_app(backend), grace=5.0)
    with bound("127.0.0.1", 0) as listening, pytest.raises(ServerError, match="there is no GPU; the jobs stay"):
        asyncio.run(server.run_on(listening))
    assert backend.stopped_with == 5.0


# --- the description, and what it does not describe


def test_the_description_is_complete():
    schema = create_app(FakeBackend(), ApiSettings()).openapi()
    paths = schema["paths"]
    assert set(paths) == {
        "/v1/images/generations", "/v1/images/edits", "/v1/videos", "/v1/videos/{id}", "/v1/videos/{id}/content",
        "/v1/jobs", "/v1/jobs/{id}", "/v1/jobs/{id}/events", "/v1/jobs/{id}/images/{index}", "/v1/models",
        "/v1/models/{id}", "/v1/server", "/v1/server/events", "/healthz", "/readyz", "/metrics",
    }  # fmt: skip
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert operation["summary"], (path, method)
            assert operation["description"], (path, method)
            assert "HTTPValidationError" not in str(operation["responses"].get("422", ""))
            for status, answer in operation["responses"].items():
                if status.startswith(("4", "5")):
                    assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
    statuses = {"202", "400", "403", "404", "413", "429", "500", "503", "507"}
    assert set(paths["/v1/jobs"]["post"]["responses"]) >= statuses
