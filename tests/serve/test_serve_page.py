"""The server's web page in a real browser: against a backend that does what a test says, and against real ranks."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ditmesh.errors import InputError
from ditmesh.serve.errors import IdempotencyKey
from ditmesh.serve.http.keys import new_key
from ditmesh.serve.settings import ApiSettings
from ditmesh.serve.types import (
    ENDED,
    Event,
    Job,
    JobError,
    JobRequest,
    ModelCard,
    RankState,
    ReplicaState,
    ServerState,
)
from support.browser import browser
from support.serving import FakeBackend, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install playwright")

pytestmark = pytest.mark.skipif(browser() is None, reason="no Chromium here: apt-get install chromium")

PAGE = ApiSettings().page
assert PAGE is not None
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
TWO_RANKS = [RankState(rank=rank, device="cpu") for rank in range(2)]


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
        self.cuts = 0  # of all streams
        self.asked_after: list[int] = []
        replica = ReplicaState(name="r0", state="ready", models=["text-model"], mesh={"ulysses": 2}, ranks=TWO_RANKS)
        self.server = ServerState(version="1", ready=True, queued=0, running=0, replicas=[replica])

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def submit(self, request: JobRequest, owner: str, once: IdempotencyKey | None = None) -> Job:
        if request.steps == 13:
            raise InputError("steps=13 is not served here; use 12 or fewer")
        return await super().submit(request, owner, once)

    async def events(self, id: str, owner: str, after: int = 0) -> AsyncIterator[Event]:
        self.asked_after.append(after)
        cuts = self.cuts
        while cuts == self.cuts:
            for event in self._events[id][after:]:
                after = event.id
                yield event
                if event.event in ENDED:
                    return
            await asyncio.sleep(0.02)

    def state(self, owner: str | None = None) -> ServerState:
        return self.server

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


def test_first_paint_and_size(seen: Seen, chromium: Any, address: str) -> None:
    """The first paint comes within a second, and all that it and the form need is small."""
    sizes: list[int] = []
    seen.page.on(
        "response", lambda response: sizes.append(len(response.body())) if "/v1/" not in response.url else None
    )
    seen.page.goto(address, wait_until="load")
    seen.until(lambda: bool(paint(seen)))
    first = paint(seen)[0]
    seen.until(lambda: seen.page.locator("#model option").count() == 2)
    assert 20_000 < sum(sizes) < 60_000
    assert sum(path.stat().st_size for path in PAGE.iterdir()) < 80_000
    # Other processes may have had the machine just then: the best of three counts.
    for _ in range(2):
        if first >= 1000:
            context = chromium.new_context()
            other = Seen(context.new_page())
            other.page.goto(address, wait_until="load")
            other.until(lambda: bool(paint(other)))  # noqa: B023
            first = min(first, paint(other)[0])
            context.close()
    assert first < 1000


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
    seen.until(lambda: "Restarted, attempt 2: rank 1 was killed" in text(seen, "#queue"))
    backend.finish(id)
    seen.until(lambda: not seen.page.locator("#queue-section").is_visible())
    assert "Done: 2 images" in text(seen, "#announcer")
    assert "seed 8" in tiles.nth(1).inner_text()
    seen.until(lambda: tiles.nth(1).locator("img").evaluate("(image) => image.naturalWidth") == 64)
    tiles.nth(1).locator("button").click()
    seen.page.locator("dialog[open]").wait_for()
    receipt = text(seen, "#receipt")
    for line in ("Seed\n8", "Ranks\n2", "Configuration\nulysses=2", "Size\n64 × 64"):
        assert line in receipt
    with seen.page.expect_download() as download:
        seen.page.click("#download")
    assert Path(download.value.path()).read_bytes() == picture(8)
    seen.page.keyboard.press("ArrowLeft")
    seen.until(lambda: "Seed\n7" in text(seen, "#receipt"))
    seen.page.keyboard.press("Escape")
    assert not seen.page.locator("dialog").is_visible()


@pytest.mark.matrix
def test_the_form_follows_the_model(seen: Seen, backend: Scripted, address: str) -> None:
    """Defaults, sizes, classes, adapters and input pictures are those of the model's card."""
    seen.page.goto(address)
    page = seen.page
    seen.until(lambda: page.input_value("#steps") == "12")
    assert page.input_value("#guidance") == "2"
    seen.until(lambda: "r0: ulysses=2, 2 ranks" in text(seen, "#served"))
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
    assert [(each.role, each.digest) for each in request.inputs] == [("image", next(iter(backend.inputs)))]
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
    seen.until(lambda: "Enter a prompt." in text(seen, "#form-error"))
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


@pytest.mark.matrix
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
    assert backend.asked_after == [3]


@pytest.mark.matrix
def test_server_that_goes_away(seen: Seen, backend: Scripted) -> None:
    """The page says so, and goes on by itself when the server is back."""
    with serving(backend) as url:
        seen.page.goto(url)
        seen.until(lambda: "ready" in text(seen, "#server"))
        seen.generate("a red fox", steps=10)
    seen.page.locator("#offline").wait_for()
    with serving(backend, port=int(url.rpartition(":")[2])):
        seen.page.locator("#offline").wait_for(state="hidden")
        backend.finish(backend.last())
        seen.page.get_by_role("button", name="Open: a red fox").wait_for()


@pytest.mark.matrix
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
    seen.until(lambda: "all bytes of the new image are equal" in text(seen, "#action-status"))
    seen.page.click("#again")
    seen.until(lambda: len(backend.held) == 3)
    backend.finish(backend.last(), changed.getvalue())
    seen.until(lambda: "1 of 4096 pixels differ" in text(seen, "#action-status"))
    assert "by at most 1 of 255" in text(seen, "#action-status")
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
    file = tmp_path / "keys.json"
    key = new_key(file, "page")
    with serving(backend, ApiSettings(keys=file)) as url:
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
        assert seen.page.evaluate("JSON.stringify(localStorage) + document.cookie + location") == f"{{}}{url}/"
        seen.page.locator("#gallery button").click()
        with seen.page.expect_download() as download:
            seen.page.click("#download")
        assert Path(download.value.path()).read_bytes() == picture(backend.held[backend.last()].images[0].seed)
        seen.page.keyboard.press("Escape")
        seen.page.click("#forget-key")
        seen.page.locator("#key-panel").wait_for()


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


@pytest.mark.matrix
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.matrix)])
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
        assert page.evaluate(FAULTS) == []
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.get_by_role("button", name="Open: a cactus").click()
        page.locator("dialog[open]").wait_for()
        assert page.evaluate(FAULTS) == []
        page.keyboard.press("Escape")
    levels = page.locator("h1, h2, h3").evaluate_all("(all) => all.map(({ tagName }) => Number(tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ink = page.evaluate("getComputedStyle(document.body).color")
    other = "dark" if scheme == "light" else "light"
    for _ in range(3):
        page.click("#theme")
        if page.evaluate("document.documentElement.dataset.theme") == other:
            break
    assert page.evaluate("getComputedStyle(document.body).color") != ink
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).color") != ink


# --- against ranks


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`ditmesh serve` with two ranks, as somebody would start it."""
    folder = tmp_path_factory.mktemp("serve")
    log = (folder / "log").open("w+")
    command = [sys.executable, "-m", "ditmesh", "serve", "--devices", "2", "--ulysses", "2", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--reproducible", "--port", "0", "--grace", "1", "--folder", str(folder / "state")],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        end = time.monotonic() + 180
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, (folder / "log").read_text()
            found = re.search(r"http://127\.0\.0\.1:\d+", (folder / "log").read_text())
            with contextlib.suppress(OSError):
                if found and urllib.request.urlopen(f"{found[0]}/readyz", timeout=5).status == 200:
                    break
            time.sleep(0.2)
        yield f"{found[0]}/"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "log").read_text()
        log.close()


@pytest.mark.matrix
def test_with_ranks_type_generate_same_again_and_vary(seen: Seen, real: str) -> None:
    """What is typed is generated step by step, with previews; the same seed gives the same bytes, another others."""
    seen.page.goto(real)
    # Everything that tile and queue have shown.
    seen.page.evaluate(
        """() => {
          window.shown = new Set();
          new MutationObserver(() => {
            shown.add(document.getElementById("queue").textContent);
            for (const image of document.querySelectorAll("#gallery img")) shown.add(image.src.slice(0, 22));
          }).observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true });
        }"""
    )
    seen.generate("a red fox", steps=8, guidance=2, seed=1)
    done = seen.page.get_by_role("button", name="Open: a red fox, seed 1")
    done.wait_for()
    shown = " ".join(seen.page.evaluate("[...shown]"))
    assert len(set(re.findall(r"Step \d of 8", shown))) > 3
    assert "data:image/jpeg;base64" in shown
    done.click()
    seen.page.locator("dialog[open]").wait_for()
    receipt = text(seen, "#receipt")
    for line in ("Steps\n8", "Guidance\n2", "Ranks\n2", "ulysses=2, reproducible"):
        assert line in receipt
    seen.page.click("#again")
    seen.until(lambda: "all bytes of the new image are equal" in text(seen, "#action-status"))
    seen.page.click("#vary")
    seen.until(lambda: "Queued with seed" in text(seen, "#action-status"))
    seen.page.keyboard.press("Escape")
    seen.until(lambda: seen.page.locator("#gallery .tile[data-status=done]").count() == 3)
    first, second, third = (urllib.request.urlopen(url).read() for url in urls(seen))
    pixels = [np.asarray(Image.open(io.BytesIO(file))) for file in (first, second, third)]
    assert (pixels[1] == pixels[2]).all()
    assert (pixels[0] != pixels[1]).any()


def urls(seen: Seen) -> list[str]:
    """Addresses of the pictures in the gallery, the newest first."""
    return seen.page.locator("#gallery img").evaluate_all("(images) => images.map(({ src }) => src)")


@pytest.mark.matrix
def test_with_ranks_reload_and_cancel_in_the_middle(seen: Seen, real: str) -> None:
    """A running job is there after a reload, goes on being shown, and is cancelled at the next step."""
    seen.page.goto(real)
    seen.generate("a cactus", steps=200)
    steps = r"Step (\d+) of 200"
    seen.until(lambda: step_shown(seen, steps) > 2)
    before = step_shown(seen, steps)
    seen.page.reload()
    seen.until(lambda: step_shown(seen, steps) > before)
    seen.page.locator("#gallery .tile[data-status=running] img").wait_for()
    began = time.monotonic()
    seen.page.get_by_role("button", name="Cancel: a cactus").click()
    seen.page.locator("#gallery .tile[data-status=cancelled]").wait_for()
    assert time.monotonic() - began < 10
    jobs = json.loads(urllib.request.urlopen(f"{real}v1/jobs?status=cancelled").read())["data"]
    assert [job["request"]["prompt"] for job in jobs] == ["a cactus"]
    assert jobs[0]["step"] < 200
    seen.page.reload()
    seen.page.locator("#gallery .tile[data-status=cancelled]").wait_for()


def step_shown(seen: Seen, pattern: str) -> int:
    found = re.search(pattern, text(seen, "#queue"))
    return int(found[1]) if found else 0
