"""The server's web page in a real browser: against a backend that does what a test says, and against real ranks."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.browser import browser

from ditmesh.errors import InputError

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install playwright")
uvicorn = pytest.importorskip("uvicorn", reason="no server here: pip install ditmesh[serve]")
pytest.importorskip("fastapi", reason="no server here: pip install ditmesh[serve]")

from ditmesh.serve.app import create_app  # noqa: E402
from ditmesh.serve.backend import ResultFile, UnknownJob  # noqa: E402
from ditmesh.serve.settings import Settings  # noqa: E402
from ditmesh.serve.types import (  # noqa: E402
    ENDED,
    Event,
    Job,
    JobError,
    JobImage,
    JobRequest,
    ModelCard,
    RankState,
    ReplicaState,
    ServerState,
    Status,
)

pytestmark = pytest.mark.skipif(browser() is None, reason="no Chromium here: apt-get install chromium")

PAGE = Path(create_app.__code__.co_filename).with_name("page")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# In milliseconds: other processes may have the machine for a while.
PATIENCE = 30_000
PHONE, WIDE = {"width": 360, "height": 740}, {"width": 1360, "height": 860}

CARDS = [
    ModelCard(
        id="text-model",
        created=0,
        pipeline="StableDiffusion3Pipeline",
        width=64,
        height=64,
        size_multiple=16,
        steps=12,
        guidance=2.0,
        loras=["ink"],
        inputs=["image"],
        loaded=True,
    ),
    ModelCard(
        id="class-model", created=0, pipeline="DiTPipeline", width=32, height=32, steps=20, labels=["coat", "bag"]
    ),
]
TWO_RANKS = [RankState(rank=rank, device="cpu", tiles=(8 * rank, 8 * rank + 8)) for rank in range(2)]


def picture(seed: int, size: tuple[int, int] = (64, 64), form: str = "PNG") -> bytes:
    """A file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


class Scripted:
    """A backend without ranks: what happens to its jobs, the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: dict[str, Job] = {}
        self.said: dict[str, list[Event]] = {}
        self.cuts = 0  # of all streams
        self.asked_after: list[int] = []
        self.cards = CARDS
        replica = ReplicaState(name="r0", state="ready", models=["text-model"], mesh={"ulysses": 2}, ranks=TWO_RANKS)
        self.server = ServerState(version="1", ready=True, queued=0, running=0, replicas=[replica])

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def stop(self, grace: float) -> None: ...

    async def submit(self, request: JobRequest, owner: str) -> Job:
        if request.steps == 13:
            raise InputError("steps=13 is not served here; use 12 or fewer")
        job = Job(id=f"job_{len(self.held):032x}", status="queued", request=request, created=time.time(), position=0)
        job.images = [JobImage(index=index, seed=request.seed + index) for index in range(request.n)]  # type: ignore[operator]
        self.held[job.id], self.said[job.id] = job, []
        return job

    async def put_input(self, data: bytes) -> str:
        return "0" * 64

    async def job(self, id: str, owner: str) -> Job:
        if id not in self.held:
            raise UnknownJob(f"there is no job {id}")
        return self.held[id]

    async def jobs(self, owner: str, limit: int = 50, status: Status | None = None) -> list[Job]:
        return [job for job in reversed(self.held.values()) if status in (None, job.status)][:limit]

    async def cancel(self, id: str, owner: str) -> Job:
        self.end(id, "cancelled")
        return self.held[id]

    async def events(self, id: str, owner: str, after: int = 0) -> AsyncIterator[Event]:
        self.asked_after.append(after)
        cuts = self.cuts
        while cuts == self.cuts:
            for event in self.said[id][after:]:
                after = event.id
                yield event
                if event.event in ENDED:
                    return
            await asyncio.sleep(0.02)

    async def result(self, id: str, index: int, owner: str) -> ResultFile:
        return ResultFile(self.folder / f"{id}-{index}.png", "image/png")

    def models(self) -> list[ModelCard]:
        return self.cards

    def state(self) -> ServerState:
        return self.server

    # --- what a test says

    def say(self, id: str, event: Any, /, **data: Any) -> None:
        said = self.said[id]
        said.append(Event(id=len(said) + 1, event=event, data=data))

    def begin(self, id: str) -> None:
        self.held[id].status = "running"
        self.say(id, "started", attempt=1)

    def step(self, id: str, step: int, image: int = 0, preview: bool = False) -> None:
        steps = self.held[id].request.steps
        self.say(id, "step", image=image, step=step, steps=steps, eta=9.0, batch=1)
        if preview:
            jpeg = base64.b64encode(picture(step, (16, 16), "JPEG")).decode()
            self.say(id, "preview", image=image, step=step, width=16, height=16, b64_json=jpeg)

    def finish(self, id: str, file: bytes | None = None) -> None:
        job = self.held[id]
        for image in job.images:
            (self.folder / f"{id}-{image.index}.png").write_bytes(file or picture(image.seed))
            image.url, image.width, image.height = f"/v1/jobs/{id}/images/{image.index}", 64, 64
            image.receipt = {"prompt": job.request.prompt, "seed": image.seed, "devices": 2, "config": {"ulysses": 2}}
            self.say(id, "image", **image.model_dump(mode="json"))
        self.end(id, "succeeded")

    def end(self, id: str, status: Any, error: JobError | None = None) -> None:
        job = self.held[id]
        job.status, job.error, job.finished = status, error, time.time()
        self.say(id, status, **job.model_dump(mode="json"))

    def last(self) -> str:
        """The job that was sent last, once there is one more than a test has seen."""
        return list(self.held)[-1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(backend: Scripted, port: int, **settings: Any) -> Iterator[str]:
    """The real HTTP side over a backend; its address."""
    app = create_app(backend, Settings(**settings))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        # Streams end first: the server waits for them.
        backend.loop.call_soon_threadsafe(app.state.server.closing.set)
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def backend(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path)


@pytest.fixture
def address(backend: Scripted) -> Iterator[str]:
    with serving(backend, free_port()) as url:
        yield url


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        program = playwright.chromium.launch(executable_path=browser(), args=list(ARGUMENTS))
        yield program
        program.close()


class Seen:
    """A page, and what went wrong on it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if self._bad(message) else None)
        page.on("request", lambda request: self.requests.append(request.url))

    @staticmethod
    def _bad(message: Any) -> bool:
        # The browser itself reports every answer that is an error; what the page makes of it is what counts.
        return message.type in ("error", "warning") and "Failed to load resource" not in message.text

    def until(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE / 1000
        while not what():
            assert time.monotonic() < end, self.page.inner_text("body")
            self.page.wait_for_timeout(20)

    def generate(self, prompt: str, **values: Any) -> None:
        """Enter what is given and send it from the keyboard."""
        self.page.locator("#model option").first.wait_for(state="attached")
        for name, value in values.items():
            self.page.fill(f"#{name}", str(value))
        self.page.fill("#prompt", prompt)
        self.page.press("#prompt", "Control+Enter")
        self.page.locator("#gallery .prompt", has_text=prompt).first.wait_for()


@pytest.fixture
def seen(chromium: Any) -> Iterator[Seen]:
    context = chromium.new_context(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
    found = Seen(context.new_page())
    yield found
    context.close()
    # Script errors, and what the content security policy has forbidden.
    assert found.errors == []
    assert all(url.startswith(("http://127.0.0.1:", "blob:", "data:")) for url in found.requests)


def text(seen: Seen, place: str) -> str:
    return seen.page.inner_text(place)


def test_first_paint_and_size(seen: Seen, backend: Scripted, address: str) -> None:
    """The first paint comes within a second, and all that it and the form need is small."""
    sizes: list[int] = []
    seen.page.on(
        "response", lambda response: sizes.append(len(response.body())) if "/v1/" not in response.url else None
    )
    seen.page.goto(address, wait_until="load")
    seen.until(lambda: bool(paint(seen)))
    assert paint(seen)[0] < 1000
    seen.until(lambda: seen.page.locator("#model option").count() == 2)
    assert 20_000 < sum(sizes) < 60_000
    assert sum(path.stat().st_size for path in PAGE.iterdir()) < 80_000


def paint(seen: Seen) -> list[float]:
    return seen.page.evaluate("performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)")


def test_a_job_from_the_prompt_to_the_receipt(seen: Seen, backend: Scripted, address: str) -> None:
    """Position, steps, time left and previews of every picture are shown as they come, then pictures and receipt."""
    seen.page.goto(address)
    seen.generate("a red fox", n=2, steps=10, seed=7)
    id = backend.last()
    request = backend.held[id].request
    assert (request.seed, request.n, request.steps, request.width, request.previews) == (7, 2, 10, 64, 1)
    backend.say(id, "queued", position=3)
    seen.until(lambda: "3 jobs before it" in text(seen, "#queue"))
    backend.begin(id)
    backend.step(id, 4, image=1, preview=True)
    seen.until(lambda: re.search(r"Step 4 of 20, \d s left", text(seen, "#queue")) is not None)
    tiles = seen.page.locator("#gallery .tile")
    assert tiles.count() == 2
    assert tiles.nth(0).locator("img").count() == 0
    seen.until(lambda: (tiles.nth(1).locator("img").get_attribute("src") or "").startswith("data:image/jpeg"))
    assert "4 / 10" in tiles.nth(1).inner_text()
    backend.say(id, "restarted", attempt=2, reason="rank 1 was killed")
    seen.until(lambda: "Begun again, attempt 2: rank 1 was killed" in text(seen, "#queue"))
    backend.finish(id)
    seen.until(lambda: not seen.page.locator("#queue-section").is_visible())
    assert "Done: 2 pictures" in text(seen, "#announcer")
    assert "seed 8" in tiles.nth(1).inner_text()
    seen.until(lambda: tiles.nth(1).locator("img").evaluate("(image) => image.naturalWidth") == 64)
    tiles.nth(1).locator("button").click()
    receipt = text(seen, "#receipt")
    assert all(line in receipt for line in ("Seed\n8", "Ranks\n2", "Configuration\nulysses=2", "Size\n64 × 64"))
    with seen.page.expect_download() as download:
        seen.page.click("#download")
    assert Path(download.value.path()).read_bytes() == picture(8)
    seen.page.keyboard.press("ArrowLeft")
    seen.until(lambda: "Seed\n7" in text(seen, "#receipt"))
    seen.page.keyboard.press("Escape")
    assert not seen.page.locator("dialog").is_visible()


def test_the_form_follows_the_model(seen: Seen, backend: Scripted, address: str) -> None:
    """Defaults, sizes, classes, adapters and input pictures are those of the model's card."""
    seen.page.goto(address)
    page = seen.page
    seen.until(lambda: page.input_value("#steps") == "12")
    assert page.input_value("#guidance") == "2"
    assert "r0: ulysses=2, 2 ranks" in text(seen, "#served")
    sizes = page.locator("#size option").evaluate_all("(options) => options.map(({ value }) => value)")
    assert sizes[0] == "64x64"
    assert sizes[-1] == "custom"
    assert all(int(length) % 16 == 0 for size in sizes[:-1] for length in size.split("x"))
    page.click("#more summary")
    page.check("#loras input[type=checkbox]")
    page.fill("#loras input[type=number]", "0.5")
    page.set_input_files("#input-image", {"name": "in.png", "mimeType": "image/png", "buffer": picture(1)})
    page.locator(".chosen img").wait_for()
    page.fill("#amount-image", "0.6")
    page.fill("#negative_prompt", "blurred")
    page.select_option("#size", "custom")
    page.fill("#width", "70")
    page.fill("#height", "96")
    page.fill("#prompt", "a fox")
    page.click("#generate")
    seen.until(lambda: text(seen, "#form-error") == "width 70 is no multiple of 16; use 64 or 80.")
    assert page.evaluate("document.activeElement.id") == "width"
    page.fill("#width", "80")
    page.click("#generate")
    seen.until(lambda: len(backend.held) == 1)
    request = backend.held[backend.last()].request
    assert (request.width, request.height, request.strength, request.negative_prompt) == (80, 96, 0.6, "blurred")
    assert [(each.name, each.scale) for each in request.loras] == [("ink", 0.5)]
    assert [(each.role, each.digest) for each in request.inputs] == [("image", "0" * 64)]
    page.select_option("#model", "class-model")
    assert page.input_value("#steps") == "20"
    assert not page.locator("#prompt").is_visible()
    page.fill("#label", "shoe")
    page.click("#generate")
    seen.until(lambda: "class-model has no class" in text(seen, "#form-error"))
    page.fill("#label", "bag")
    page.click("#generate")
    seen.until(lambda: len(backend.held) == 2)
    request = backend.held[backend.last()].request
    assert (request.model, request.prompt, request.width, request.inputs) == ("class-model", "bag", 32, ())


def test_errors_are_the_servers_sentences(seen: Seen, backend: Scripted, address: str) -> None:
    """What is refused is said below the button, why a job failed in the place of its picture."""
    seen.page.goto(address)
    seen.page.locator("#model option").first.wait_for(state="attached")
    seen.page.click("#generate")
    seen.until(lambda: "Enter what the picture shows" in text(seen, "#form-error"))
    seen.page.fill("#steps", "13")
    seen.page.fill("#prompt", "a fox")
    seen.page.click("#generate")
    seen.until(lambda: text(seen, "#form-error") == "steps=13 is not served here; use 12 or fewer")
    seen.generate("a cactus", steps=12)
    assert not seen.page.locator("#form-error").is_visible()
    sentence = "rank 1 ran out of memory; use a smaller size"
    backend.end(backend.last(), "failed", JobError(code="out_of_memory", message=sentence))
    seen.until(lambda: sentence in text(seen, "#gallery"))
    assert sentence in text(seen, "#announcer")
    seen.page.select_option("#status", "cancelled")
    seen.until(lambda: seen.page.locator("#gallery li").count() == 0)
    seen.page.select_option("#status", "failed")
    seen.until(lambda: seen.page.locator("#gallery li").count() == 1)


def test_cancel_and_reload(seen: Seen, backend: Scripted, address: str) -> None:
    """A job that runs is there after a reload, with its steps, and can be cancelled."""
    seen.page.goto(address)
    seen.generate("a red fox", steps=10)
    id = backend.last()
    backend.begin(id)
    backend.step(id, 3)
    seen.until(lambda: "Step 3 of 10" in text(seen, "#queue"))
    seen.page.reload()
    seen.until(lambda: "Step 3 of 10" in text(seen, "#queue"))
    assert seen.page.input_value("#prompt") == "a red fox"
    backend.step(id, 4, preview=True)
    seen.page.locator("#gallery img").wait_for()
    seen.page.get_by_role("button", name="Cancel: a red fox").click()
    seen.until(lambda: "Cancelled" in text(seen, "#gallery"))
    assert backend.held[id].status == "cancelled"
    assert not seen.page.locator("#queue-section").is_visible()


def test_a_stream_goes_on_where_it_broke_off(seen: Seen, backend: Scripted, address: str) -> None:
    """The next stream is asked for what came after the last event that was seen."""
    seen.page.goto(address)
    seen.generate("a red fox", steps=10)
    id = backend.last()
    backend.begin(id)
    backend.step(id, 1)
    seen.until(lambda: "Step 1 of 10" in text(seen, "#queue"))
    backend.asked_after.clear()
    backend.cuts += 1
    seen.until(lambda: len(backend.asked_after) > 0)
    backend.step(id, 2)
    seen.until(lambda: "Step 2 of 10" in text(seen, "#queue"))
    assert backend.asked_after == [2]


def test_server_that_goes_away(seen: Seen, backend: Scripted) -> None:
    """The page says so, and goes on by itself when the server is back."""
    port = free_port()
    with serving(backend, port) as url:
        seen.page.goto(url)
        seen.until(lambda: "ready" in text(seen, "#server"))
        seen.generate("a red fox", steps=10)
    seen.page.locator("#offline").wait_for()
    backend.finish(backend.last())
    with serving(backend, port):
        seen.page.locator("#offline").wait_for(state="hidden")
        seen.until(lambda: "seed" in text(seen, "#gallery") and not seen.page.locator("#queue-section").is_visible())


def test_same_again_is_compared(seen: Seen, backend: Scripted, address: str) -> None:
    """The same request with the same seed, all digits of it, and a verdict on the bytes of the picture."""
    seed = 2**60 + 1
    seen.page.goto(address)
    seen.generate("a red fox", seed=seed)
    former = backend.last()
    assert backend.held[former].request.seed == seed
    file = picture(3)
    backend.finish(former, file)
    seen.page.get_by_role("button", name=f"Open: a red fox, seed {seed}").click()
    seen.page.click("#again")
    seen.until(lambda: len(backend.held) == 2)
    again = backend.last()
    assert backend.held[again].request == backend.held[former].request
    # The receipt inside is another one: the time is.
    with Image.open(io.BytesIO(file)) as image:
        other = io.BytesIO()
        image.save(other, "PNG", compress_level=1)
        image.putpixel((5, 6), tuple(value ^ 1 for value in image.getpixel((5, 6))))  # type: ignore[union-attr]
        changed = io.BytesIO()
        image.save(changed, "PNG")
    assert other.getvalue() != file
    backend.finish(again, other.getvalue())
    seen.until(lambda: "all bytes of the picture are equal" in text(seen, "#action-status"))
    seen.page.click("#again")
    seen.until(lambda: len(backend.held) == 3)
    backend.finish(backend.last(), changed.getvalue())
    seen.until(lambda: "1 of 4096 pixels differ" in text(seen, "#action-status"))
    assert "by 1 of 255 at most" in text(seen, "#action-status")
    seen.page.click("#vary")
    seen.until(lambda: len(backend.held) == 4)
    request = backend.held[backend.last()].request
    assert request.seed != seed
    assert request.model_copy(update={"seed": seed}) == backend.held[former].request
    seen.page.click("#use")
    assert seen.page.input_value("#seed") == str(seed)
    assert seen.page.is_checked("#lock")


def test_api_key(seen: Seen, backend: Scripted, tmp_path: Path) -> None:
    """A server with keys asks for one; it stays in the tab, and pictures are fetched with it."""
    from ditmesh.serve.keys import new_key

    file = tmp_path / "keys.json"
    key = new_key(file, "page")
    with serving(backend, free_port(), keys=file) as url:
        seen.page.goto(url)
        seen.page.locator("#key-panel").wait_for()
        seen.page.fill("#key", "wrong")
        seen.page.press("#key", "Enter")
        seen.until(lambda: seen.page.locator("#key").is_visible() and "key" in text(seen, "#key-error"))
        seen.page.fill("#key", key)
        seen.page.press("#key", "Enter")
        seen.generate("a red fox")
        backend.finish(backend.last())
        image = seen.page.locator("#gallery img")
        seen.until(lambda: image.count() > 0 and image.evaluate("(image) => image.naturalWidth") == 64)
        assert (image.get_attribute("src") or "").startswith("blob:")
        assert seen.page.evaluate("JSON.stringify(localStorage) + document.cookie + location") == "{}" + url
        seen.page.locator("#gallery button").click()
        with seen.page.expect_download() as download:
            seen.page.click("#download")
        assert Path(download.value.path()).read_bytes() == picture(backend.held[backend.last()].images[0].seed)
        seen.page.keyboard.press("Escape")
        seen.page.click("#forget-key")
        seen.page.locator("#key-panel").wait_for()


def test_devices(seen: Seen, backend: Scripted, address: str) -> None:
    """The mesh, the tiles of every rank, and its step and waiting time as they change."""
    ranks = [
        RankState(rank=rank, device=f"cuda:{rank}", tiles=(4 * (rank % 2), 4 + 4 * (rank % 2)), memory_bytes=2_000_000)
        for rank in range(4)
    ]
    replica = ReplicaState(
        name="r1",
        state="restarting",
        models=["text-model"],
        strategy="cfg+ulysses",
        mesh={"ulysses": 2, "cfg": 2},
        ranks=ranks,
        restarts=2,
        message="rank 1 was killed by signal 9",
        calls=10,
        rows=25,
        bytes={"ulysses": 4_400_000},
    )
    backend.server = backend.server.model_copy(update={"replicas": [*backend.server.replicas, replica]})
    seen.page.goto(f"{address}#devices")
    card = seen.page.get_by_role("region", name="Replica r1")
    card.wait_for()
    shown = card.inner_text()
    for words in ("restarting", "Restarted 2 times: rank 1 was killed by signal 9", "2.50", "4.4 MB", "0–4 of 8"):
        assert words in shown
    # Axes from the slowest-varying: ranks 0 and 1 share a branch of guidance.
    boxes = card.locator(".axis .axis").all_inner_texts()
    assert [box.split() for box in boxes] == [["ulysses", "2", "0", "1"], ["ulysses", "2", "2", "3"]]
    tilings = card.locator(".tiling")
    assert tilings.count() == 2
    assert tilings.nth(0).get_attribute("aria-label") == "Tiles: rank 0: 0 to 4 of 8, rank 1: 4 to 8 of 8"
    colours = [
        part.evaluate("(part) => getComputedStyle(part).backgroundColor")
        for part in card.locator(".tiling .rank").all()
    ]
    assert len(set(colours)) == 4
    ranks[1] = ranks[1].model_copy(update={"step_seconds": 0.2, "waiting_seconds": 0.05})
    ranks[0] = ranks[0].model_copy(update={"step_seconds": 0.1})
    changed = replica.model_copy(update={"ranks": ranks, "calls": 11, "batch": 3})
    backend.server = backend.server.model_copy(update={"replicas": [changed]})
    row = card.locator("tbody tr").nth(1)
    seen.until(lambda: "200 ms" in row.inner_text() and "25 %" in row.inner_text())
    widths = [part.bounding_box()["width"] for part in row.locator(".bar-of *").all()]
    assert widths[0] == pytest.approx(3 * widths[1], abs=1)
    assert seen.page.get_by_role("region", name="Replica r0").count() == 0


# Text whose contrast to what is behind it is below AA, and controls without a name.
FAULTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const values = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  const found = [];
  for (const part of document.querySelectorAll("body *")) {
    if (!part.checkVisibility() || part.matches(":disabled, option")) continue;
    const said = [...part.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (part.matches("input, select, textarea, button") &&
        !(part.labels?.length || part.ariaLabel || (part.tagName === "BUTTON" && part.textContent.trim())))
      found.push(`no name: ${part.outerHTML.slice(0, 80)}`);
    if (!said || part.closest(".hidden, .skip")) continue;
    let behind = part;
    while (behind && values(getComputedStyle(behind).backgroundColor)[3] < 255) behind = behind.parentElement;
    const [one, other] = [getComputedStyle(part).color, getComputedStyle(behind ?? document.body).backgroundColor]
      .map((colour) => light(values(colour)) + 0.05);
    const contrast = Math.max(one, other) / Math.min(one, other);
    if (contrast < 4.5) found.push(`${contrast.toFixed(2)}: ${part.outerHTML.slice(0, 80)}`);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_it(seen: Seen, backend: Scripted, address: str, scheme: Any) -> None:
    """AA contrast, names for all controls, headings in order, nothing wider than a phone, in both themes."""
    page = seen.page
    page.emulate_media(color_scheme=scheme)
    page.goto(address)
    seen.generate("a red fox, and a prompt that is much longer than what a phone has room for in one line", steps=10)
    backend.begin(backend.last())
    backend.step(backend.last(), 3, preview=True)
    seen.generate("a cactus")
    backend.finish(backend.last())
    seen.generate("a pizza")
    backend.end(backend.last(), "failed", JobError(code="internal", message="rank 1 " + 20 * "has failed "))
    page.click("#more summary")
    seen.until(lambda: page.locator("#gallery img").count() == 2)
    for viewport in (WIDE, PHONE):
        page.set_viewport_size(viewport)
        for view in ("pictures", "devices"):
            page.click(f"nav a[href='#{view}']")
            page.locator(f"#{view}").wait_for()
            seen.until(lambda: view == "pictures" or page.locator(".replica").count() == 1)  # noqa: B023
            assert page.evaluate(FAULTS) == []
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.click("nav a[href='#pictures']")
        page.get_by_role("button", name="Open: a cactus").click()
        page.locator("dialog[open]").wait_for()
        assert page.evaluate(FAULTS) == []
        page.keyboard.press("Escape")
    levels = page.locator("h1, h2, h3").evaluate_all("(all) => all.map(({ tagName }) => Number(tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    ink = page.evaluate("getComputedStyle(document.body).color")
    other = "dark" if scheme == "light" else "light"
    for _ in range(3):
        page.click("#theme")
        if page.evaluate("document.documentElement.dataset.theme") == other:
            break
    assert page.evaluate("getComputedStyle(document.body).color") != ink
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).color") != ink
