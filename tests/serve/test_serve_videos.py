"""Videos through a server: a tiny LTX pipeline on two ranks, asked for by the official client and by hand."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image, ImageSequence

from ditmesh.client import Client
from ditmesh.config import ParallelConfig
from ditmesh.generate.receipt import PNG_KEYWORD, Receipt
from ditmesh.generate.video import frames_digest, metadata_of, write_mp4
from ditmesh.media.videos import read_frames
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.service import Service
from ditmesh.serve.settings import ApiSettings, ServiceSettings
from ditmesh.serve.worker.protocol import Finished, Frames, ModelReady, TaskStepped
from support.batching import Owner, of, task
from support.serving import serving
from support.tiny import save_tiny_anyflow, save_tiny_ltx

pytestmark = pytest.mark.timeout(400)

SIZE, FRAMES, STEPS, FPS = (64, 32), 9, 3, 10
ASKED: dict[str, Any] = {"prompt": "a fox", "seed": 5, "steps": STEPS, "guidance": 3.0, "fps": FPS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_ltx(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def http(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    # Its usual size is that of a large model, which the memory that other tests leave may not hold.
    films = ModelSpec("films", str(folder), ParallelConfig(ulysses=2), check_memory=False)
    folder = save_tiny_anyflow(tmp_path_factory.mktemp("chunks"))
    chunks = ModelSpec("chunks", str(folder), ParallelConfig(ulysses=2), check_memory=False)
    settings = ServiceSettings(devices=2, device="cpu", threads=1, launcher="local")
    service = Service([films, chunks], tmp_path_factory.mktemp("state"), settings)
    with serving(service, ApiSettings()) as url, httpx.Client(base_url=url, timeout=30) as http:
        limit = time.monotonic() + 200
        while http.get("/readyz").status_code != 200:
            assert time.monotonic() < limit
            time.sleep(0.1)
        yield http


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with warnings.catch_warnings(), openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
        # All of its videos are.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield client


@pytest.fixture(scope="module")
def frames(folder: Path) -> np.ndarray:
    """What the unmodified pipeline makes: (F, H, W, 3) integers."""
    import diffusers

    pipe = diffusers.LTXPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    shape = {"width": SIZE[0], "height": SIZE[1], "num_frames": FRAMES, "frame_rate": FPS, "output_type": "pil"}
    generator = [torch.Generator().manual_seed(5)]
    made = pipe("a fox", **shape, num_inference_steps=STEPS, guidance_scale=3.0, generator=generator)
    return np.stack([np.asarray(frame).astype(int) for frame in made.frames[0]])


def finished(http: httpx.Client, id: str) -> dict[str, Any]:
    """The data of a job's last event, when it has come."""
    return [event.data for event in Client(str(http.base_url)).events(id)][-1]


def frames_in(data: bytes) -> list[Image.Image]:
    # The iterator yields one object, at another frame each time.
    return [frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open(BytesIO(data)))]


def test_the_official_client_gets_the_pipelines_frames(
    http: httpx.Client, client: openai.OpenAI, frames: np.ndarray, tmp_path: Path
):
    made = client.videos.create(
        model="films", prompt="a fox", size="64x32", seconds="0.9", extra_body=ASKED | {"prompt": "a fox"}
    )
    assert (made.object, made.model, made.size, made.seconds) == ("video", "films", "64x32", "0.9")
    assert made.status in ("queued", "in_progress")
    finished(http, made.id)
    done = client.videos.retrieve(made.id)
    assert (done.status, done.progress, done.size) == ("completed", 100, "64x32")
    assert done.completed_at >= done.created_at
    data = client.videos.download_content(made.id).read()

    # The same job without loss.
    again = http.post("/v1/jobs", json={**ASKED, "size": "64x32", "frames": FRAMES, "format": "png"}).json()
    job = finished(http, again["id"])
    assert job["status"] == "succeeded", job
    drawn = frames_in(http.get(job["images"][0]["url"]).content)
    assert len(drawn) == FRAMES
    difference = np.abs(np.stack([np.asarray(frame).astype(int) for frame in drawn]) - frames)
    assert difference.max() <= 1
    assert np.abs(frames[0] - frames[-1]).max() > 1
    # What was encoded is exactly that, and the file says so.
    write_mp4(drawn, tmp_path / "drawn.mp4", FPS, {})
    encoded = [frame.tobytes() for frame in read_frames(tmp_path / "drawn.mp4", "drawn")]
    assert [frame.tobytes() for frame in read_frames(data, "served")] == encoded
    (tmp_path / "served.mp4").write_bytes(data)
    receipt = Receipt.model_validate_json(metadata_of(tmp_path / "served.mp4")[PNG_KEYWORD])
    assert (receipt.frames, receipt.fps, receipt.frames_digest) == (FRAMES, FPS, frames_digest(drawn))


def test_frames_come_chunk_by_chunk(http: httpx.Client):
    client = Client(str(http.base_url))
    asked = {"model": "chunks", "size": "32x32", "frames": 17, "format": "png", "seed": 5}
    job = client.submit("a fox", steps=STEPS, **asked)
    told = list(client.events(job.id))
    names = [event.event for event in told]
    assert [names.count(name) for name in ("step", "frames")] == [9, 3]
    chunks = [event.data for event in told if event.event == "frames"]
    assert [(chunk["part"], chunk["first"], chunk["count"]) for chunk in chunks] == [(0, 0, 1), (1, 1, 8), (2, 9, 8)]
    assert client.file(job.id, 0, 1) == http.get(chunks[1]["url"]).content
    shown = [frame.tobytes() for chunk in chunks for frame in frames_in(http.get(chunk["url"]).content)]
    assert shown == [frame.tobytes() for frame in frames_in(client.file(job.id))]
    assert http.get(f"/v1/jobs/{job.id}/images/0?part=3").status_code == 404

    # A job ends between two chunks, and the next one is drawn.
    id = http.post("/v1/videos", json=asked | {"prompt": "a fox", "steps": 99}).json()["id"]
    for event in client.events(id):
        if event.event == "frames":
            assert http.delete(f"/v1/videos/{id}").json()["deleted"]
    assert http.get(f"/v1/jobs/{id}").json()["status"] == "cancelled"
    assert finished(http, client.submit("a fox", steps=1, **asked).id)["status"] == "succeeded"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"frames": 10}, "videos of films have 1 + a multiple of 4 frames; use 9 or 13"),
        ({"model": "chunks", "frames": 10}, "frames 10: AnyFlowFARPipeline makes 17, in chunks of 1+2+2; use 17"),
        ({"frames": 9, "seconds": 1}, "seconds and frames both set the length"),
        ({"seconds": 100}, "1001 frames are more than this server's 257"),
        ({"size": "63x32"}, "63x32"),
        ({"format": "jpeg"}, "films makes videos, which are no JPEG; ask for format mp4, png or webp"),
        ({"inputs": [{"role": "mask", "digest": "0" * 64}]}, "mask"),
    ],
    ids=str,
)
def test_what_is_refused(http: httpx.Client, more: dict[str, Any], words: str):
    answer = http.post("/v1/videos", json={**ASKED, "size": "64x32", **more})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_the_model_says_what_its_videos_are(http: httpx.Client):
    card, _ = http.get("/v1/models").json()["data"]
    assert (card["video"], card["frames"], card["fps"], card["frame_multiple"]) == (True, 161, 25, 4)
    assert card["batching"], card["why"]


@pytest.mark.parametrize("config", [{}, {"ulysses": 2}], ids=["one", "two"])
def test_a_video_goes_on_in_the_chunk_in_which_it_was_paused(ranks, config: dict[str, Any], tmp_path: Path):
    spec = ModelSpec("chunks", str(save_tiny_anyflow(tmp_path)), ParallelConfig(**config), check_memory=False)
    more: dict[str, Any] = {"model": "chunks", "width": 32, "height": 32, "frames": 17, "format": "png", "steps": 3}
    whole, video, hurried = (task(id, "a fox", seed=len(id), **more) for id in ("whole", "video", "hurried"))

    def script(message: Any, send: Any) -> None:
        if isinstance(message, ModelReady):
            send(video)
        elif isinstance(message, TaskStepped) and (message.id, message.step) == ("video", 4):
            send(replace(hurried, left=1e6, seconds=1.0))
        elif isinstance(message, TaskStepped) and (message.id, message.step) == ("hurried", 1):
            # Two half-drawn ones are enough.
            send(replace(task("third", "a fox", **more), left=9e5, seconds=1.0))
        elif isinstance(message, Finished) and message.id == "video":
            send(whole)

    said = Owner(script, 4).serve(ranks(2 if config else 1), [spec])
    order = [id for id, _ in groupby(message.id for message in of(said, TaskStepped))]
    assert order == ["video", "hurried", "third", "video", "whole"]
    made = {id: [one.data for kind in (Frames, Finished) for one in of(said, kind, id)] for id in order}
    assert list(map(len, made.values())) == [4] * 4
    # Apart from the receipt, which has the seconds.
    assert made["video"][:3] == made["whole"][:3]
