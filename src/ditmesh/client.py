"""A server's clients: `Client`, and `AsyncClient` for programs with an event loop."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
# A picture to send: as PIL has it, a file's name, or its bytes.
Picture = Any
OnEvent = Callable[[Event], None]

URL, KEY = "http://127.0.0.1:8000", "DITMESH_API_KEY"
# Arguments of `generate` that are pictures, and their roles.
ROLES = {"image": "image", "mask": "mask", "control": "control", "ip_image": "ip-image"}
# Seconds: to connect and to be answered; of silence in a stream, in which the server says every 15 that it is alive;
# between two attempts when the server does not say.
TIMEOUT, SILENCE, PAUSE = 30.0, 45.0, 1.0
# For an answer while a caller that breaks off waits for the end.
LAST = 3.0


# --- what both clients share: requests as data, and generators that make them and read their answers


@dataclass(frozen=True)
class ApiRequest:
    """A request that may be sent again, as `httpx.Client.request` takes it."""

    method: str
    url: str
    json: Any = None
    params: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None


# Yields requests, is sent their answers, and returns the result.
Flow = Generator[ApiRequest, httpx.Response, Result]


def _submission(prompt: str, options: Mapping[str, Any]) -> ApiRequest:
    """A job; sent again, after a lost connection for one, it is the same job."""
    once = {"Idempotency-Key": secrets.token_hex(16)}
    return ApiRequest("POST", "/v1/jobs", json=job_body(prompt, options), headers=once)


def _submit(ask: ApiRequest) -> Flow[Job]:
    response = yield ask
    return Job.model_validate(response.json())


def _job(id: str) -> Flow[Job]:
    response = yield ApiRequest("GET", f"/v1/jobs/{id}")
    return Job.model_validate(response.json())


def _jobs(limit: int, status: Status | None) -> Flow[list[Job]]:
    params = {"limit": limit} | ({} if status is None else {"status": status})
    response = yield ApiRequest("GET", "/v1/jobs", params=params)
    return [Job.model_validate(one) for one in response.json()["data"]]


def _cancel(id: str) -> Flow[Job]:
    response = yield ApiRequest("DELETE", f"/v1/jobs/{id}")
    return Job.model_validate(response.json())


def _file(id: str, index: int) -> Flow[bytes]:
    response = yield ApiRequest("GET", f"/v1/jobs/{id}/images/{index}")
    return response.content


def _images(job: Job) -> Flow[list[Image]]:
    """The pictures of a job that has succeeded."""
    from PIL import Image

    images = []
    for one in job.images:
        data = yield from _file(job.id, one.index)
        try:
            image = Image.open(BytesIO(data))
            image.load()
        except OSError:
            raise InputError(f"result {one.index} of {job.id} is no picture; read it with file()") from None
        image.receipt = None if one.receipt is None else Receipt.model_validate(one.receipt)  # type: ignore[attr-defined]
        images.append(image)
    return images


def _models() -> Flow[list[ModelCard]]:
    response = yield ApiRequest("GET", "/v1/models")
    return [ModelCard.model_validate(one) for one in response.json()["data"]]


def _server() -> Flow[ServerState]:
    response = yield ApiRequest("GET", "/v1/server")
    return ServerState.model_validate(response.json())


def job_body(prompt: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a job from the arguments of `Client.generate`.

    Raises:
        InputError: a picture cannot be read.
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
    """A picture as servers take it.

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
    """Seconds to wait before asking again; None: this is the answer."""
    if response.status_code not in (429, 503) or response.headers.get("x-should-retry") == "false":
        return None
    try:
        wait = float(response.headers.get("retry-after", PAUSE))
    except ValueError:
        wait = PAUSE
    return wait if waited + wait <= patience else None


def _check(response: httpx.Response) -> None:
    """Raise what an answer says."""
    if response.is_success:
        return
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), str(error["code"])
    except (ValueError, KeyError, TypeError):
        # Something between us and the server has answered.
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


def _check_success(job: Job) -> None:
    if job.error is not None and job.error.code == "invalid_request":
        raise InputError(job.error.message)
    if job.status != "succeeded":
        message = job.error.message if job.error is not None else f"{job.id} was {job.status}"
        raise ServerError(message, code=job.error.code if job.error is not None else job.status)


def _unreachable(url: str, error: Exception) -> ServerError | InputError:
    if isinstance(error, (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL)):
        return InputError(f"no server answers at {url} ({error}); start one with ditmesh serve, or check the address")
    return ServerError(f"the server at {url} does not answer ({str(error) or type(error).__name__}); ask again")


@dataclass
class EventReader:
    """Reads a stream of events, and knows where to go on after a lost connection."""

    url: str
    after: int
    patience: float
    over: bool = False
    lost_since: float | None = None
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        self.fields = {}
        return {"Last-Event-ID": str(self.after)} if self.after else {}

    def feed(self, line: str) -> Event | None:
        """The event that ends with a line."""
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
            # Of a newer server.
            return None
        self.after, self.over = max(self.after, event.id), event.event in ENDED
        return event

    def pause(self, error: Exception | None) -> float:
        """The connection is lost: seconds to wait.

        Raises:
            DitmeshError: it has been lost for longer than one is willing to wait.
        """
        now = time.monotonic()
        self.lost_since = self.lost_since or now
        if now - self.lost_since >= self.patience:
            raise _unreachable(self.url, error or httpx.RemoteProtocolError("the stream ended early"))
        return min(PAUSE, self.patience)


class _ClientBase:
    """What both clients are made with; subclasses say which client of httpx asks."""

    _http: Any
    _library: Callable[..., Any]

    def __init__(
        self, url: str = URL, key: str | None = None, *, timeout: float = TIMEOUT, patience: float = 60.0
    ) -> None:
        """See `Client`."""
        self.url = url.rstrip("/")
        key = os.environ.get(KEY) if key is None else key
        self._patience = patience
        # Whether the server has answered before: then it may be back in a moment.
        self._reached = False
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = self._library(base_url=self.url, headers=headers, timeout=timeout)
        self._silence = httpx.Timeout(timeout, read=SILENCE)

    def _lost(self, ask: ApiRequest, error: Exception, waited: float) -> float | None:
        """Seconds to wait before a request is sent again that found no connection, or lost it; None: it is not."""
        if ask.method == "DELETE":
            # A caller that breaks off does not wait.
            return None
        passing = isinstance(error, (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException))
        absent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)) and not self._reached
        return PAUSE if passing and not absent and waited + PAUSE <= self._patience else None

    def _stream(self, id: str, reader: EventReader) -> dict[str, Any]:
        path = f"/v1/jobs/{id}/events"
        return {"method": "GET", "url": path, "headers": reader.headers, "timeout": self._silence}


# --- the clients


class Client(_ClientBase):
    """A server's client.

    Args:
        url: of the server.
        key: of the API; default: the environment's ``DITMESH_API_KEY``.
        timeout: seconds in which the server has to answer; not for a job to be done, which has no limit.
        patience: seconds in all for which a server that is full, starting or out of reach is asked again.

    Every method raises

    * `InputError` for what the server refuses, in the server's words, and when no server is there,
    * `serve.backend.QueueFull`, `NoSpace` and `UnknownJob` as the server does,
    * `ServerError` for all else.
    """

    _http: httpx.Client
    _library = httpx.Client

    def generate(self, prompt: str, *, on_event: OnEvent | None = None, **options: Any) -> list[Image]:
        """Generate pictures, and wait for them. Breaking off, by Ctrl-C for one, cancels the job.

        Args:
            prompt: what to generate.
            on_event: told what happens meanwhile.
            options: fields of `serve.types.JobRequest`, such as ``n``, ``steps`` and ``seed``; ``size`` as
                ``(width, height)`` or ``"1024x768"``; ``loras`` as names, or scales by name; and input pictures
                ``image``, ``mask``, ``control``, ``ip_image``: as PIL has them, as files' names, or as bytes.

        Returns:
            The pictures; ``.receipt`` of each says how it was generated (`generate.receipt.Receipt`).
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
        """Submit a job and return at once; ``options`` as for `generate`. Breaking off cancels what has arrived."""
        ask = _submission(prompt, options)
        try:
            return self._do(_submit(ask))
        except Exception:
            raise
        except BaseException:
            self._withdraw(ask)
            raise

    def _withdraw(self, ask: ApiRequest) -> None:
        """Cancel a job that may have arrived: the same request again says which one it is."""
        with contextlib.suppress(Exception):
            job = Job.model_validate(self._http.request(**vars(ask), timeout=LAST).json())
            self._http.request("DELETE", f"/v1/jobs/{job.id}", timeout=LAST)

    def wait(self, id: str, on_event: OnEvent | None = None) -> Job:
        """Wait until a job has succeeded. Raises what it failed of."""
        done: Job | None = None
        for event in self.events(id):
            if on_event is not None:
                on_event(event)
            if event.event in ENDED:
                done = Job.model_validate(event.data)
        assert done is not None
        _check_success(done)
        return done

    def images(self, job: Job) -> list[Image]:
        """The pictures of a job that has succeeded, each with its ``.receipt``."""
        return self._do(_images(job))

    def file(self, id: str, index: int = 0) -> bytes:
        """The file of a result, as the server has it."""
        return self._do(_file(id, index))

    def job(self, id: str) -> Job:
        """A job as it is now."""
        return self._do(_job(id))

    def jobs(self, limit: int = 50, status: Status | None = None) -> list[Job]:
        """One's own jobs, the newest first."""
        return self._do(_jobs(limit, status))

    def cancel(self, id: str) -> Job:
        """Cancel a job: it stops at the next step."""
        return self._do(_cancel(id))

    def events(self, id: str, after: int = 0) -> Iterator[Event]:
        """What happens to a job, behind event number ``after``, to its end; lost connections are made again."""
        reader = EventReader(self.url, after, self._patience)
        while True:
            error = None
            try:
                with self._http.stream(**self._stream(id, reader)) as response:
                    if not response.is_success:
                        response.read()
                        if _wait(response, 0.0, self._patience) is None:
                            _check(response)
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
        """The models that the server offers; the first is its default."""
        return self._do(_models())

    def server(self) -> ServerState:
        """The server's state."""
        return self._do(_server())

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _do(self, flow: Flow[Result]) -> Result:
        try:
            ask = next(flow)
            while True:
                ask = flow.send(self._answer(ask))
        except StopIteration as done:
            return done.value

    def _answer(self, ask: ApiRequest) -> httpx.Response:
        waited = 0.0
        while True:
            try:
                response = self._http.request(**vars(ask))
            except (httpx.TransportError, httpx.InvalidURL) as error:
                wait = self._lost(ask, error, waited)
                if wait is None:
                    raise _unreachable(self.url, error) from None
            else:
                self._reached = True
                wait = _wait(response, waited, self._patience)
                if wait is None:
                    _check(response)
                    return response
            waited += wait
            time.sleep(wait)


class AsyncClient(_ClientBase):
    """`Client` for programs with an event loop: the same methods, to be awaited."""

    _http: httpx.AsyncClient
    _library = httpx.AsyncClient

    async def generate(self, prompt: str, *, on_event: OnEvent | None = None, **options: Any) -> list[Image]:
        """See `Client.generate`; cancelling the task cancels the job."""
        job = await self.submit(prompt, **options)
        try:
            job = await self.wait(job.id, on_event)
        except BaseException:
            with contextlib.suppress(DitmeshError):
                await asyncio.shield(self.cancel(job.id))
            raise
        return await self.images(job)

    async def submit(self, prompt: str, **options: Any) -> Job:
        """See `Client.submit`."""
        ask = _submission(prompt, options)
        try:
            return await self._do(_submit(ask))
        except Exception:
            raise
        except BaseException:
            await asyncio.shield(self._withdraw(ask))
            raise

    async def _withdraw(self, ask: ApiRequest) -> None:
        with contextlib.suppress(Exception):
            job = Job.model_validate((await self._http.request(**vars(ask), timeout=LAST)).json())
            await self._http.request("DELETE", f"/v1/jobs/{job.id}", timeout=LAST)

    async def wait(self, id: str, on_event: OnEvent | None = None) -> Job:
        """See `Client.wait`."""
        done: Job | None = None
        async for event in self.events(id):
            if on_event is not None:
                on_event(event)
            if event.event in ENDED:
                done = Job.model_validate(event.data)
        assert done is not None
        _check_success(done)
        return done

    async def images(self, job: Job) -> list[Image]:
        """See `Client.images`."""
        return await self._do(_images(job))

    async def file(self, id: str, index: int = 0) -> bytes:
        """See `Client.file`."""
        return await self._do(_file(id, index))

    async def job(self, id: str) -> Job:
        """See `Client.job`."""
        return await self._do(_job(id))

    async def jobs(self, limit: int = 50, status: Status | None = None) -> list[Job]:
        """See `Client.jobs`."""
        return await self._do(_jobs(limit, status))

    async def cancel(self, id: str) -> Job:
        """See `Client.cancel`."""
        return await self._do(_cancel(id))

    async def events(self, id: str, after: int = 0) -> AsyncIterator[Event]:
        """See `Client.events`."""
        reader = EventReader(self.url, after, self._patience)
        while True:
            error = None
            try:
                async with self._http.stream(**self._stream(id, reader)) as response:
                    if not response.is_success:
                        await response.aread()
                        if _wait(response, 0.0, self._patience) is None:
                            _check(response)
                    else:
                        async for line in response.aiter_lines():
                            if (event := reader.feed(line)) is not None:
                                yield event
                                if reader.over:
                                    return
            except httpx.TransportError as lost:
                error = lost
            await asyncio.sleep(reader.pause(error))

    async def models(self) -> list[ModelCard]:
        """See `Client.models`."""
        return await self._do(_models())

    async def server(self) -> ServerState:
        """See `Client.server`."""
        return await self._do(_server())

    async def close(self) -> None:
        """See `Client.close`."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _do(self, flow: Flow[Result]) -> Result:
        try:
            ask = next(flow)
            while True:
                ask = flow.send(await self._answer(ask))
        except StopIteration as done:
            return done.value

    async def _answer(self, ask: ApiRequest) -> httpx.Response:
        waited = 0.0
        while True:
            try:
                response = await self._http.request(**vars(ask))
            except (httpx.TransportError, httpx.InvalidURL) as error:
                wait = self._lost(ask, error, waited)
                if wait is None:
                    raise _unreachable(self.url, error) from None
            else:
                self._reached = True
                wait = _wait(response, waited, self._patience)
                if wait is None:
                    _check(response)
                    return response
            waited += wait
            await asyncio.sleep(wait)
