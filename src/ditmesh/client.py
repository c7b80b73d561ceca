"""Clients of a server: `Client`, and `AsyncClient` for programs with an event loop."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import httpx

from .errors import DitmeshError, InputError, ServerError
from .generate.receipt import Receipt
from .media.files import read_whole
from .media.images import as_mask, as_seen, opened_image
from .serve.errors import NoSpace, QueueFull, UnknownJob
from .serve.types import ENDED, Event, Job, ModelCard, ServerState, Status

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")
P = ParamSpec("P")
# An image to send: a PIL image, a file name, or bytes.
Picture = Any
OnEvent = Callable[[Event], None]

URL, KEY = "http://127.0.0.1:8000", "DITMESH_API_KEY"
# Arguments of `generate` that are images, and their roles.
ROLES = {"image": "image", "mask": "mask", "control": "control", "ip_image": "ip-image"}
# Seconds: to connect and to be answered; of silence in a stream, in which the server says every 15 that it is alive;
# between two attempts when the server does not say.
TIMEOUT, SILENCE, PAUSE = 30.0, 45.0, 1.0
# For an answer while a caller that breaks off waits for the end.
CLOSING_SECONDS = 3.0


# --- requests as data


class ApiRequest(NamedTuple):
    """A request that may be sent again; ``more``: other arguments of `httpx.Client.request`."""

    method: str
    url: str
    more: dict[str, Any]


def job_body(prompt: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a job from the arguments of `Client.generate`.

    Raises:
        InputError: an image cannot be read.
    """
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
    """An image in the form that servers accept.

    Raises:
        InputError: it is none, or cannot be read.
    """
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


@dataclass
class EventReader:
    """Reads a stream of events, and resumes it after a lost connection."""

    url: str
    after: int
    patience: float
    over: bool = False
    lost_since: float | None = None
    fields: dict[str, str] = field(default_factory=dict)

    def refused(self, response: httpx.Response) -> None:
        """Raise the error of a response that is not a stream, unless a retry may help."""
        if _wait(response, 0.0, self.patience) is None:
            _check(response)

    def feed(self, line: str) -> Event | None:
        """The event that a line completes; None: none."""
        self.lost_since = None
        if line:
            name, _, value = line.partition(":")
            self.fields[name] = value.removeprefix(" ")
            return None
        fields, self.fields = self.fields, {}
        if "data" not in fields:
            return None
        data = json.loads(fields["data"])
        if fields.get("event") == "error":
            raise ServerError(data["error"]["message"], code=data["error"]["code"])
        try:
            event = Event(id=int(fields.get("id", 0)), event=fields["event"], data=data)  # type: ignore[arg-type]
        except (KeyError, ValueError):
            # An event of a newer server.
            return None
        self.after, self.over = max(self.after, event.id), event.event in ENDED
        return event

    def pause(self, error: Exception | None) -> float:
        """The seconds to wait after a lost connection.

        Raises:
            DitmeshError: it has been lost for longer than one is willing to wait.
        """
        now = time.monotonic()
        self.lost_since = self.lost_since or now
        if now - self.lost_since >= self.patience:
            raise _unreachable(self.url, error or httpx.RemoteProtocolError("the stream ended early"))
        return min(PAUSE, self.patience)


# --- the clients


# What a method of both clients does, as a generator: it yields a request to be sent, seconds to sleep, or a stream of
# events of which it is sent the next (None: there are no more). Every client has its own way to do that.
Flow = Generator[Any, Any, Result]


class _Flows:
    """The methods of both clients; subclasses choose the httpx client."""

    _http: Any
    _library: Callable[..., Any]
    events: Callable[..., Any]

    def __init__(
        self, url: str = URL, key: str | None = None, *, timeout: float = TIMEOUT, patience: float = 60.0
    ) -> None:
        """See `Client`."""
        self.url = url.rstrip("/")
        key = os.environ.get(KEY) if key is None else key
        self._patience = patience
        # Whether the server has answered before: then a retry may succeed.
        self._reached = False
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = self._library(base_url=self.url, headers=headers, timeout=timeout)
        self._silence = httpx.Timeout(timeout, read=SILENCE)

    def _ask(self, method: str, url: str, **more: Any) -> Flow[httpx.Response]:
        """Send a request until it is answered, or until the client's patience ends."""
        ask, waited = ApiRequest(method, url, more), 0.0
        while True:
            try:
                response = yield ask
            except (httpx.TransportError, httpx.InvalidURL) as error:
                passing = isinstance(error, (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException))
                absent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)) and not self._reached
                # An interrupted caller does not wait.
                wait = PAUSE if passing and not absent and method != "DELETE" else None
                if wait is None or waited + wait > self._patience:
                    raise _unreachable(self.url, error) from None
            else:
                self._reached = True
                wait = _wait(response, waited, self._patience)
                if wait is None:
                    _check(response)
                    return response
            waited += wait
            yield wait

    def _generate(self, prompt: str, on_event: OnEvent | None = None, **options: Any) -> Flow[list[Image]]:
        job = yield from self._submit(prompt, **options)
        try:
            job = yield from self._wait(job.id, on_event)
        except BaseException:
            with contextlib.suppress(DitmeshError):
                yield from self._cancel(job.id)
            raise
        return (yield from self._images(job))

    def _submit(self, prompt: str, **options: Any) -> Flow[Job]:
        # With this key a repeated request is the same job.
        once = {"json": job_body(prompt, options), "headers": {"Idempotency-Key": secrets.token_hex(16)}}
        try:
            response = yield from self._ask("POST", "/v1/jobs", **once)
            return Job.model_validate(response.json())
        except Exception:
            raise
        except BaseException:
            # The request may have arrived: repeating it returns its job.
            with contextlib.suppress(Exception):
                response = yield ApiRequest("POST", "/v1/jobs", once | {"timeout": CLOSING_SECONDS})
                yield ApiRequest("DELETE", f"/v1/jobs/{response.json()['id']}", {"timeout": CLOSING_SECONDS})
            raise

    def _wait(self, id: str, on_event: OnEvent | None = None) -> Flow[Job]:
        events, done = self.events(id), None
        while (event := (yield events)) is not None:
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

    def _images(self, job: Job) -> Flow[list[Image]]:
        from PIL import Image

        images = []
        for one in job.images:
            data = yield from self._file(job.id, one.index)
            try:
                image = Image.open(BytesIO(data))
                image.load()
            except OSError:
                raise InputError(f"result {one.index} of {job.id} is not an image; read it with file()") from None
            receipt = None if one.receipt is None else Receipt.model_validate(one.receipt)
            image.receipt = receipt  # type: ignore[attr-defined]
            images.append(image)
        return images

    def _file(self, id: str, index: int = 0) -> Flow[bytes]:
        return (yield from self._ask("GET", f"/v1/jobs/{id}/images/{index}")).content

    def _job(self, id: str) -> Flow[Job]:
        return Job.model_validate((yield from self._ask("GET", f"/v1/jobs/{id}")).json())

    def _jobs(self, limit: int = 50, status: Status | None = None) -> Flow[list[Job]]:
        params = {"limit": limit} | ({} if status is None else {"status": status})
        response = yield from self._ask("GET", "/v1/jobs", params=params)
        return [Job.model_validate(one) for one in response.json()["data"]]

    def _cancel(self, id: str) -> Flow[Job]:
        return Job.model_validate((yield from self._ask("DELETE", f"/v1/jobs/{id}")).json())

    def _models(self) -> Flow[list[ModelCard]]:
        response = yield from self._ask("GET", "/v1/models")
        return [ModelCard.model_validate(one) for one in response.json()["data"]]

    def _server(self) -> Flow[ServerState]:
        return ServerState.model_validate((yield from self._ask("GET", "/v1/server")).json())

    def _stream(self, id: str, reader: EventReader) -> Any:
        reader.fields = {}
        headers = {"Last-Event-ID": str(reader.after)} if reader.after else {}
        return self._http.stream("GET", f"/v1/jobs/{id}/events", headers=headers, timeout=self._silence)


class Client(_Flows):
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

    _http: httpx.Client
    _library = httpx.Client

    def generate(self, prompt: str, *, on_event: OnEvent | None = None, **options: Any) -> list[Image]:
        """Generate images and wait for them. An interruption such as Ctrl-C cancels the job.

        Args:
            prompt: what to generate.
            on_event: a callback for the job's events.
            options: fields of `serve.types.JobRequest`, such as ``n``, ``steps`` and ``seed``; ``size`` as
                ``(width, height)`` or ``"1024x768"``; ``loras`` as names, or scales by name; and input images
                ``image``, ``mask``, ``control``, ``ip_image`` as PIL images, file names, or bytes.

        Returns:
            The images, each with the ``.receipt`` of its generation (`generate.receipt.Receipt`).
        """
        return self._do(self._generate(prompt, on_event, **options))

    def submit(self, prompt: str, **options: Any) -> Job:
        """Submit a job and return immediately; ``options`` as for `generate`. An interruption cancels the job."""
        return self._do(self._submit(prompt, **options))

    def wait(self, id: str, on_event: OnEvent | None = None) -> Job:
        """Wait until a job has succeeded. Raises the error of a failed job."""
        return self._do(self._wait(id, on_event))

    def images(self, job: Job) -> list[Image]:
        """The images of a succeeded job, each with its ``.receipt``."""
        return self._do(self._images(job))

    def file(self, id: str, index: int = 0) -> bytes:
        """The file of a result, as the server stores it."""
        return self._do(self._file(id, index))

    def job(self, id: str) -> Job:
        """The current state of a job."""
        return self._do(self._job(id))

    def jobs(self, limit: int = 50, status: Status | None = None) -> list[Job]:
        """The jobs of this key, the newest first."""
        return self._do(self._jobs(limit, status))

    def cancel(self, id: str) -> Job:
        """Cancel a job: it stops at the next step."""
        return self._do(self._cancel(id))

    def events(self, id: str, after: int = 0) -> Iterator[Event]:
        """The events of a job after number ``after``, to its end; lost connections are renewed."""
        reader = EventReader(self.url, after, self._patience)
        while True:
            error = None
            try:
                with self._stream(id, reader) as response:
                    if not response.is_success:
                        response.read()
                        reader.refused(response)
                    else:
                        for line in response.iter_lines():
                            if (event := reader.feed(line)) is not None:
                                yield event
                                if reader.over:
                                    return
            except httpx.TransportError as lost:
                error = lost
            time.sleep(reader.pause(error))

    def models(self) -> list[ModelCard]:
        """The models of the server; the first is the default."""
        return self._do(self._models())

    def server(self) -> ServerState:
        """The server's state."""
        return self._do(self._server())

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _do(self, flow: Flow[Result]) -> Result:
        resume: Any = flow.send
        value: Any = None
        while True:
            try:
                step = resume(value)
            except StopIteration as done:
                return done.value
            try:
                resume, value = flow.send, self._step(step)
            except BaseException as error:
                resume, value = flow.throw, error

    def _step(self, step: Any) -> Any:
        if isinstance(step, ApiRequest):
            return self._http.request(step.method, step.url, **step.more)
        return time.sleep(step) if isinstance(step, float) else next(step, None)


def _awaited(
    flow: Callable[Concatenate[Any, P], Flow[Result]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, Result]]:
    """The method of `AsyncClient` for a flow, with the name and docstring of `Client`'s method."""

    @functools.wraps(getattr(Client, flow.__name__.removeprefix("_")))
    async def method(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await self._do(flow(self, *args, **kwargs))

    return method


class AsyncClient(_Flows):
    """`Client` for programs with an event loop: the same methods as coroutines. Cancelling a task cancels its job."""

    _http: httpx.AsyncClient
    _library = httpx.AsyncClient

    generate = _awaited(_Flows._generate)
    submit = _awaited(_Flows._submit)
    wait = _awaited(_Flows._wait)
    images = _awaited(_Flows._images)
    file = _awaited(_Flows._file)
    job = _awaited(_Flows._job)
    jobs = _awaited(_Flows._jobs)
    cancel = _awaited(_Flows._cancel)
    models = _awaited(_Flows._models)
    server = _awaited(_Flows._server)

    async def events(self, id: str, after: int = 0) -> AsyncIterator[Event]:
        """See `Client.events`."""
        reader = EventReader(self.url, after, self._patience)
        while True:
            error = None
            try:
                async with self._stream(id, reader) as response:
                    if not response.is_success:
                        await response.aread()
                        reader.refused(response)
                    else:
                        async for line in response.aiter_lines():
                            if (event := reader.feed(line)) is not None:
                                yield event
                                if reader.over:
                                    return
            except httpx.TransportError as lost:
                error = lost
            await asyncio.sleep(reader.pause(error))

    async def close(self) -> None:
        """See `Client.close`."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _do(self, flow: Flow[Result]) -> Result:
        resume: Any = flow.send
        value: Any = None
        broken = False
        while True:
            try:
                step = resume(value)
            except StopIteration as done:
                return done.value
            try:
                # A second cancellation does not interrupt the clean-up after the first.
                doing = self._step(step)
                resume, value = flow.send, await (asyncio.shield(doing) if broken else doing)
            except BaseException as error:
                resume, value, broken = flow.throw, error, broken or not isinstance(error, Exception)

    async def _step(self, step: Any) -> Any:
        if isinstance(step, ApiRequest):
            return await self._http.request(step.method, step.url, **step.more)
        return await asyncio.sleep(step) if isinstance(step, float) else await anext(step, None)
