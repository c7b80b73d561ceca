"""The client of a server."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DitmeshError, InputError, ServerError
from .generate.receipt import Receipt
from .media.files import read_whole
from .media.images import as_mask, as_seen, opened_image
from .requirements import not_installed
from .serve.errors import NoSpace, QueueFull, UnknownJob
from .serve.types import ENDED, Event, Job, ModelCard, ServerState, Status

try:
    import httpx
except ModuleNotFoundError as error:
    raise InputError(not_installed("a client of a server", str(error.name), "serve")) from None

if TYPE_CHECKING:
    from PIL.Image import Image

# An image to send: a PIL image, a file name, or bytes.
Picture = Any
OnEvent = Callable[[Event], None]

URL, KEY = "http://127.0.0.1:8000", "DITMESH_API_KEY"
# Arguments of `generate` that are images, and their roles.
ROLES = {"image": "image", "mask": "mask", "control": "control", "ip_image": "ip-image"}
# Seconds: to connect and to be answered; of silence in a stream, in which the server says every 15 that it is alive;
# between two attempts when the server does not say.
TIMEOUT, SILENCE, PAUSE = 30.0, 45.0, 1.0


# --- requests as data


def job_body(prompt: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a job from the arguments of `Client.generate`; `InputError`: an image cannot be read."""
    body: dict[str, Any] = {"prompt": prompt}
    inputs = []
    for name, value in options.items():
        if value is None:
            continue
        if name in ROLES:
            inputs.append({"role": ROLES[name], "data": data_url(value, name)})
        elif name == "size" and not isinstance(value, str):
            width, height = value
            body["size"] = f"{width}x{height}"
        elif name == "loras":
            pairs = value.items() if isinstance(value, Mapping) else [(one, 1.0) for one in value]
            body["loras"] = [{"name": lora, "scale": scale} for lora, scale in pairs]
        else:
            body[name] = value
    return body | ({"inputs": inputs} if inputs else {})


def data_url(picture: Picture, name: str) -> str:
    """An image in the form that servers accept; `InputError`: it is none, or cannot be read."""
    from PIL import Image

    what = name
    if isinstance(picture, Image.Image):
        image = (as_mask if name == "mask" else as_seen)(picture, name)
    else:
        if not isinstance(picture, bytes):
            what = f"the {name} {str(picture)[:200]!r}"
            picture = read_whole(Path(picture).expanduser(), what)
        with opened_image(BytesIO(picture), what) as opened:
            if opened.format in ("PNG", "JPEG", "WEBP"):
                return f"data:image/{opened.format.lower()};base64,{base64.b64encode(picture).decode()}"
            opened.load()
            image = (as_mask if name == "mask" else as_seen)(opened, what)
    out = BytesIO()
    image.save(out, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def _wait(response: httpx.Response, waited: float, patience: float) -> float | None:
    """Seconds to wait before a retry; None: this is the final response."""
    if response.status_code not in (429, 503) or response.headers.get("x-should-retry") == "false":
        return None
    try:
        wait = float(response.headers.get("retry-after", PAUSE))
    except ValueError:
        wait = PAUSE
    return wait if waited + wait <= patience else None


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), str(error["code"])
    except (ValueError, KeyError, TypeError):
        # A proxy has answered instead of the server.
        message, code = f"the server has answered with HTTP status {response.status_code}", ""
    status = response.status_code
    if code == "job_not_found":
        raise UnknownJob(message)
    if status == 429:
        wait = response.headers.get("retry-after", "")
        raise QueueFull(message, float(wait) if wait.isdecimal() else PAUSE)
    if status == 507:
        raise NoSpace(message)
    if 400 <= status < 500:
        raise InputError(message)
    raise ServerError(message, status, code)


def _unreachable(url: str, error: Exception) -> ServerError | InputError:
    if isinstance(error, (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL)):
        return InputError(f"no server answers at {url} ({error}); start one with ditmesh serve, or check the address")
    return ServerError(f"the server at {url} does not answer ({str(error) or type(error).__name__}); ask again")


def _event(fields: Mapping[str, str]) -> Event | None:
    """The event of a block of lines; None: none, or one of a newer server.

    `ServerError`: the server says that its stream has failed.
    """
    if "data" not in fields:
        return None
    data = json.loads(fields["data"])
    if fields.get("event") == "error":
        raise ServerError(data["error"]["message"], code=data["error"]["code"])
    try:
        return Event(id=int(fields.get("id", 0)), event=fields["event"], data=data)  # type: ignore[arg-type]
    except (KeyError, ValueError):
        return None


# --- the client


class Client:
    """A client of `ditmesh serve`.

    Args:
        url: the server's URL.
        key: the API key; default: the environment variable ``DITMESH_API_KEY``.
        timeout: seconds for a response of the server; the duration of a job has no limit.
        patience: total seconds of retries while a server is full, starting or unreachable.

    Every method raises

    * `InputError` if the server rejects the request, with its message, or if there is no server,
    * `serve.errors.QueueFull`, `NoSpace` and `UnknownJob` as the server does,
    * `ServerError` for other errors.
    """

    def __init__(
        self, url: str = URL, key: str | None = None, *, timeout: float = TIMEOUT, patience: float = 60.0
    ) -> None:
        self.url = url.rstrip("/")
        key = os.environ.get(KEY) if key is None else key
        self._patience = patience
        # Whether the server has answered before: then a retry may succeed.
        self._reached = False
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        self._silence = httpx.Timeout(timeout, read=SILENCE)

    def generate(self, prompt: str, *, on_event: OnEvent | None = None, **options: Any) -> list[Image]:
        """Generate images and wait for them. An interruption such as Ctrl-C cancels the job.

        Args:
            prompt: what to generate.
            on_event: a callback for the job's events.
            options: fields of `serve.types.JobRequest`, such as ``n``, ``steps`` and ``seed``; ``size`` as
                ``(width, height)`` or ``"1024x768"``; ``loras`` as names, or scales by name; and input images
                ``image``, ``mask``, ``control``, ``ip_image`` as PIL images, file names, or bytes.

        Returns the images, each with the ``.receipt`` of its generation (`generate.receipt.Receipt`).
        """
        job = self.submit(prompt, **options)
        try:
            job = self.wait(job.id, on_event)
        except BaseException:
            with contextlib.suppress(DitmeshError):
                self.cancel(job.id)
            raise
        return self.images(job)

    def submit(self, prompt: str, **options: Any) -> Job:
        """Submit a job and return immediately; ``options`` as for `generate`.

        If the answer is lost, the job may run although this raises `ServerError`; see `jobs`.
        """
        return Job.model_validate(self._ask("POST", "/v1/jobs", json=job_body(prompt, options)).json())

    def wait(self, id: str, on_event: OnEvent | None = None) -> Job:
        """Wait until a job has succeeded. Raises the error of a failed job."""
        done = None
        for event in self.events(id):
            if on_event is not None:
                on_event(event)
            if event.event in ENDED:
                done = Job.model_validate(event.data)
        assert done is not None
        if done.status == "succeeded":
            return done
        if done.error is None:
            raise ServerError(f"{id} was {done.status}", code=done.status)
        if done.error.code == "invalid_request":
            raise InputError(done.error.message)
        raise ServerError(done.error.message, code=done.error.code)

    def images(self, job: Job) -> list[Image]:
        """The images of a succeeded job, each with its ``.receipt``."""
        from PIL import Image

        images = []
        for result in job.images:
            try:
                image = Image.open(BytesIO(self.file(job.id, result.index)))
                image.load()
            except OSError:
                raise InputError(f"result {result.index} of {job.id} is not an image; read it with file()") from None
            receipt = None if result.receipt is None else Receipt.model_validate(result.receipt)
            image.receipt = receipt  # type: ignore[attr-defined]
            images.append(image)
        return images

    def file(self, id: str, index: int = 0, part: int | None = None) -> bytes:
        """The file of a result, or of a part of a video that an event ``frames`` tells of, as the server stores it."""
        params = {} if part is None else {"part": part}
        return self._ask("GET", f"/v1/jobs/{id}/images/{index}", params=params).content

    def job(self, id: str) -> Job:
        """The current state of a job."""
        return Job.model_validate(self._ask("GET", f"/v1/jobs/{id}").json())

    def jobs(self, limit: int = 50, status: Status | None = None) -> list[Job]:
        """The jobs of this key, the newest first."""
        params = {"limit": limit} | ({} if status is None else {"status": status})
        return [Job.model_validate(job) for job in self._ask("GET", "/v1/jobs", params=params).json()["data"]]

    def cancel(self, id: str) -> Job:
        """Cancel a job: it stops at the next step."""
        return Job.model_validate(self._ask("DELETE", f"/v1/jobs/{id}").json())

    def events(self, id: str, after: int = 0) -> Iterator[Event]:
        """The events of a job after number ``after``, to its end; lost connections are renewed."""
        lost_since = None
        while True:
            error: Exception = httpx.RemoteProtocolError("the stream ended early")
            headers, fields = {"Last-Event-ID": str(after)} if after else {}, dict[str, str]()
            try:
                url = f"/v1/jobs/{id}/events"
                with self._http.stream("GET", url, headers=headers, timeout=self._silence) as response:
                    if not response.is_success:
                        response.read()
                        if _wait(response, 0.0, self._patience) is None:
                            _check(response)
                    for line in response.iter_lines() if response.is_success else ():
                        lost_since = None
                        if line:
                            name, _, value = line.partition(":")
                            fields[name] = value.removeprefix(" ")
                            continue
                        event, fields = _event(fields), {}
                        if event is not None:
                            after = max(after, event.id)
                            yield event
                            if event.event in ENDED:
                                return
            except httpx.TransportError as lost:
                error = lost
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since >= self._patience:
                raise _unreachable(self.url, error)
            time.sleep(min(PAUSE, self._patience))

    def models(self) -> list[ModelCard]:
        """The models of the server; the first is the default."""
        return [ModelCard.model_validate(card) for card in self._ask("GET", "/v1/models").json()["data"]]

    def server(self) -> ServerState:
        """The server's state."""
        return ServerState.model_validate(self._ask("GET", "/v1/server").json())

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, method: str, url: str, **more: Any) -> httpx.Response:
        """Send a request until it is answered, or until the client's patience ends."""
        waited = 0.0
        while True:
            try:
                response = self._http.request(method, url, **more)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                passing = isinstance(error, (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException))
                absent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)) and not self._reached
                # An interrupted caller does not wait, and a job that may have arrived is not sent twice.
                again = method == "GET" or (method == "POST" and isinstance(error, httpx.ConnectError))
                wait = PAUSE if passing and not absent and again else None
                if wait is None or waited + wait > self._patience:
                    raise _unreachable(self.url, error) from None
            else:
                self._reached = True
                wait = _wait(response, waited, self._patience)
                if wait is None:
                    _check(response)
                    return response
            waited += wait
            time.sleep(wait)
