"""The server's web page in a real browser: against a backend that does what a test says."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ditmesh.errors import InputError
from ditmesh.serve.http.keys import new_key
from ditmesh.serve.settings import ApiSettings
from ditmesh.serve.types import Job, JobError, JobRequest, ModelCard
from support.serving import FakeBackend, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install playwright")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

PAGE = ApiSettings().page
assert PAGE is not None
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
# In milliseconds: other processes may have the machine for a while.
PATIENCE = 30_000
WIDE = {"width": 1360, "height": 860}

CARDS = [
    ModelCard(id="text-model", created=0, pipeline="FluxPipeline", width=64, height=64, steps=12, loaded=True),
    ModelCard(id="class-model", created=0, pipeline="DiTPipeline", width=32, height=32, labels=["coat", "bag"]),
]


def picture(seed: int) -> bytes:
    """A PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Scripted(FakeBackend):
    """A backend to whose jobs happens what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.cards = CARDS

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def submit(self, request: JobRequest, owner: str, files: Any = None) -> Job:
        if request.steps == 13:
            raise InputError("steps=13 is not served here; use 12 or fewer")
        return await super().submit(request, owner, files)

    # --- what a test says

    @property
    def held(self) -> dict[str, Job]:
        """All jobs, the last one last."""
        return {id: job for id, (_, job) in self._jobs.items()}

    def last(self) -> str:
        return list(self._jobs)[-1]

    def say(self, id: str, event: Any, /, **data: Any) -> None:
        asyncio.run_coroutine_threadsafe(self._tell(self.held[id], event, data), self.loop).result(20)

    def begin(self, id: str) -> None:
        self.held[id].status = "running"
        self.say(id, "started", attempt=1)

    def step(self, id: str, step: int, image: int = 0, preview: bool = False) -> None:
        steps = self.held[id].request.steps
        self.say(id, "step", image=image, step=step, steps=steps, eta=9.0, batch=1)
        if preview:
            self.say(id, "preview", **self._preview(Image.new("RGB", (64, 64), (10 * step, 0, 0)), image, step))

    def finish(self, id: str, file: bytes | None = None) -> None:
        job = self.held[id]
        for image in job.images:
            self._path(job, image.index).write_bytes(file or picture(image.seed))
            image.url, image.width, image.height = f"/v1/jobs/{id}/images/{image.index}", 64, 64
            image.receipt = {"prompt": job.request.prompt, "seed": image.seed, "devices": 2, "config": {"ulysses": 2}}
            self.say(id, "image", **image.model_dump(mode="json"))
        self.end(id, "succeeded")

    def end(self, id: str, status: Any, error: JobError | None = None) -> None:
        asyncio.run_coroutine_threadsafe(self._end(self.held[id], status, error), self.loop).result(20)


@pytest.fixture
def backend() -> Scripted:
    return Scripted()


@pytest.fixture
def address(backend: Scripted) -> Iterator[str]:
    with serving(backend) as url:
        yield f"{url}/"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        program = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
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
        page.on("console", self._hear)
        page.on("request", lambda request: self.requests.append(request.url))

    def _hear(self, message: Any) -> None:
        # The browser itself reports every answer that is an error; what the page makes of it is what counts.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def until(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE / 1000
        while not what():
            assert time.monotonic() < end, self.page.inner_text("body")
            self.page.wait_for_timeout(20)

    def text(self, place: str) -> str:
        return self.page.inner_text(place)

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


def test_all_that_the_page_needs_is_small(seen: Seen, address: str) -> None:
    sizes: list[int] = []
    seen.page.on(
        "response", lambda response: sizes.append(len(response.body())) if "/v1/" not in response.url else None
    )
    seen.page.goto(address, wait_until="load")
    seen.until(lambda: seen.page.locator("#model option").count() == 2)
    assert 20_000 < sum(sizes) < 60_000
    assert sum(path.stat().st_size for path in PAGE.iterdir()) < 80_000


def test_a_job_from_the_prompt_to_the_receipt(seen: Seen, backend: Scripted, address: str) -> None:
    """Position, steps, time left and previews of every picture are shown as they come, then pictures and receipt."""
    seen.page.goto(address)
    seen.generate("a red fox", n=2, steps=10, seed=7)
    id = backend.last()
    request = backend.held[id].request
    assert (request.seed, request.n, request.steps, request.width, request.previews) == (7, 2, 10, 64, 1)
    backend.say(id, "queued", position=3)
    seen.until(lambda: "3 jobs before it" in seen.text("#queue"))
    backend.begin(id)
    backend.step(id, 4, image=1, preview=True)
    seen.until(lambda: re.search(r"Step 4 of 20, \d s left", seen.text("#queue")) is not None)
    tiles = seen.page.locator("#gallery .tile")
    assert tiles.count() == 2
    assert tiles.nth(0).locator("img").count() == 0
    seen.until(lambda: (tiles.nth(1).locator("img").get_attribute("src") or "").startswith("data:image/jpeg"))
    assert "4 / 10" in tiles.nth(1).inner_text()
    backend.say(id, "restarted", attempt=2, reason="rank 1 was killed")
    seen.until(lambda: "Restarted, attempt 2: rank 1 was killed" in seen.text("#queue"))
    backend.finish(id)
    seen.until(lambda: not seen.page.locator("#queue-section").is_visible())
    assert "Done: 2 images" in seen.text("#announcer")
    assert "seed 8" in tiles.nth(1).inner_text()
    seen.until(lambda: tiles.nth(1).locator("img").evaluate("(image) => image.naturalWidth") == 64)
    tiles.nth(1).locator("button").click()
    seen.page.locator("dialog[open]").wait_for()
    receipt = seen.text("#receipt")
    for line in ("Seed\n8", "Ranks\n2", "Configuration\nulysses=2", "Size\n64 × 64"):
        assert line in receipt
    with seen.page.expect_download() as download:
        seen.page.click("#download")
    assert Path(download.value.path()).read_bytes() == picture(8)
    seen.page.keyboard.press("ArrowLeft")
    seen.until(lambda: "Seed\n7" in seen.text("#receipt"))
    seen.page.keyboard.press("Escape")
    assert not seen.page.locator("dialog").is_visible()


def test_errors_are_the_servers_sentences(seen: Seen, backend: Scripted, address: str) -> None:
    """What is refused is said below the button, why a job failed in the place of its picture."""
    seen.page.goto(address)
    seen.page.locator("#model option").first.wait_for(state="attached")
    seen.page.click("#generate")
    seen.until(lambda: "Enter a prompt." in seen.text("#form-error"))
    seen.page.fill("#steps", "13")
    seen.page.fill("#prompt", "a fox")
    seen.page.click("#generate")
    seen.until(lambda: seen.text("#form-error") == "steps=13 is not served here; use 12 or fewer")
    seen.generate("a cactus", steps=12)
    assert not seen.page.locator("#form-error").is_visible()
    sentence = "rank 1 ran out of memory; use a smaller size"
    backend.end(backend.last(), "failed", JobError(code="out_of_memory", message=sentence))
    seen.until(lambda: sentence in seen.text("#gallery"))
    assert sentence in seen.text("#announcer")
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
    seen.until(lambda: "Step 3 of 10" in seen.text("#queue"))
    seen.page.reload()
    seen.until(lambda: "Step 3 of 10" in seen.text("#queue"))
    assert seen.page.input_value("#prompt") == "a red fox"
    backend.step(id, 4, preview=True)
    seen.page.locator("#gallery img").wait_for()
    seen.page.get_by_role("button", name="Cancel: a red fox").click()
    seen.until(lambda: "Cancelled" in seen.text("#gallery"))
    assert backend.held[id].status == "cancelled"
    assert not seen.page.locator("#queue-section").is_visible()


def test_api_key(seen: Seen, backend: Scripted, tmp_path: Path) -> None:
    """A server with keys asks for one; it stays in the tab, and pictures are fetched with it."""
    file = tmp_path / "keys.json"
    key = new_key(file, "page")
    with serving(backend, ApiSettings(keys=file)) as url:
        seen.page.goto(url)
        seen.page.locator("#key-panel").wait_for()
        seen.page.fill("#key", "wrong")
        seen.page.press("#key", "Enter")
        seen.until(lambda: seen.page.locator("#key").is_visible() and "key" in seen.text("#key-error"))
        seen.page.fill("#key", key)
        seen.page.press("#key", "Enter")
        seen.generate("a red fox")
        backend.finish(backend.last())
        image = seen.page.locator("#gallery img")
        seen.until(lambda: image.count() > 0 and image.evaluate("(image) => image.naturalWidth") == 64)
        assert (image.get_attribute("src") or "").startswith("blob:")
        assert seen.page.evaluate("JSON.stringify(localStorage) + document.cookie + location") == f"{{}}{url}/"
        seen.page.locator("#gallery button").click()
        with seen.page.expect_download() as download:
            seen.page.click("#download")
        assert Path(download.value.path()).read_bytes() == picture(backend.held[backend.last()].images[0].seed)
        seen.page.keyboard.press("Escape")
        seen.page.click("#forget-key")
        seen.page.locator("#key-panel").wait_for()
