"""From an HTTP request to a job: checks, and the objects of the server."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Header, Path
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ...errors import DitmeshError, InputError
from ...request import FieldError, parse_size
from ..errors import IdempotencyKey, UnknownJob
from ..queue.storage import storage_error
from ..settings import ApiSettings
from ..types import Input, InputRole, Job, JobRequest, ModelCard
from .bodies import LIMITED, check_limits
from .errors import Refused, refusal_response, wait_header
from .keys import Limiter
from .logs import JobWatch
from .metrics import Metrics
from .streams import ended
from .uploads import Uploads, from_data_url

if TYPE_CHECKING:
    from ..service import Service

Model = TypeVar("Model", bound=BaseModel)

# A file in OpenAPI.
FILE = {"type": "string", "format": "binary"}
JOB_ID = re.compile(r"job_[0-9a-f]{32}")
JobId = Annotated[str, Path(description="`job_` and 32 hexadecimal digits", max_length=64)]
# "auto": the size of the input image, else the pipeline's default.
Size = Annotated[
    str,
    # Only described: `sized` parses it, as the command line does.
    Field(examples=["1024x1024"], json_schema_extra={"pattern": "^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"}),
]


IdempotencyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern="^[!-~]{1,255}$",
        description="Of the client's choice, such as a UUID: a request that is sent again with it is the same job, "
        "for as long as that is remembered",
    ),
]


class InputData(BaseModel):
    """An input image in the request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: InputRole
    data: str = Field(description="A data URL: `data:image/png;base64,…` (or jpeg, webp)")
    scale: FiniteFloat = 1.0


class JobBody(JobRequest):
    """A `JobRequest` that also accepts the size as ``"1024x768"`` and images as data URLs."""

    size: Size | None = Field(default=None, description="WIDTHxHEIGHT, in the place of `width` and `height`")
    inputs: tuple[Input | InputData, ...] = Field(default=(), max_length=8)  # type: ignore[assignment]


@dataclass
class Server:
    """The object that all endpoints share.

    Attributes:
        grace: seconds that jobs under way have when it stops, unless `stop` is told otherwise.
        closing: set when the server stops and its running jobs have ended.
    """

    backend: Service
    settings: ApiSettings
    metrics: Metrics
    watch: JobWatch
    limiter: Limiter
    uploads: Uploads
    grace: float = 0.0
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False
    # Requests that wait for a job's end, by its id; and tasks that cancel jobs without a waiting client.
    _waiting: Counter[str] = field(default_factory=Counter)
    _leaving: set[asyncio.Future[None]] = field(default_factory=set)
    _stopped: asyncio.Future[None] | None = None

    async def stop(self, grace: float | None = None) -> None:
        """Accept no more jobs, finish running ones within ``grace`` seconds, and end all streams. Runs once.

        Every caller returns when that is done.
        """
        if self._stopped is None:
            self.stopping = True
            self._stopped = asyncio.ensure_future(self._stop(self.grace if grace is None else grace))
        await asyncio.shield(self._stopped)

    async def _stop(self, grace: float) -> None:
        try:
            await self.backend.stop(grace)
        finally:
            self.closing.set()
            for task in list(self._leaving):
                await ended(task)
            await self.watch.close()

    def model(self, name: str) -> ModelCard:
        """A model by its name or alias; the first model for an empty name.

        Raises:
            Refused: there is none of that name.
        """
        cards, name = self.backend.models(), self.settings.aliases.get(name, name)
        found = next((card for card in cards if name in (card.id, "")), None)
        if found is None:
            names = ", ".join(repr(card.id) for card in cards) or "none"
            raise Refused(
                404, f"model {name!r} is none of this server's; use one of: {names}", "model_not_found", "model"
            )
        return found

    async def accept(
        self,
        request: JobRequest,
        caller: Request,
        videos: bool | None = None,
        inputs: Callable[[list[str]], Awaitable[tuple[Input, ...]]] | None = None,
        key: str | None = None,
        usual_format: bool = False,
    ) -> Job:
        """Submit a job, or find the job of a repeated request.

        Args:
            caller: the HTTP request.
            videos: the endpoint is for videos alone, for images alone, or (None) for both.
            inputs: decodes and keeps the input images, when all else is allowed; called with a list that takes the
                digests of those it keeps.
            key: the request's ``Idempotency-Key``.
            usual_format: the format is the usual one, of videos MP4.

        Raises:
            Refused: it is not allowed.
            DitmeshError: as `Service.submit`.
        """
        owner: str = caller.state.owner
        kept: list[str] = []
        try:
            card = self._allowed(request, caller, videos)
            # The receipt, the metrics and the log use the model's real name.
            more: dict[str, Any] = {"model": card.id}
            if usual_format and (videos or card.video):
                more["format"] = "mp4"
            if inputs is not None:
                more["inputs"] = await inputs(kept)
            request = request.model_copy(update=more)
            repeatable = None
            if key is not None:
                # The digest distinguishes a repeated request from another one.
                text = f"{caller.url.path} {request.model_dump_json()}".encode("utf-8", "surrogatepass")
                repeatable = IdempotencyKey(key, hashlib.sha256(text).hexdigest())
            job = None if repeatable is None else await self.backend.repeated(owner, repeatable)
            if job is None:
                job = await self.backend.submit(request, owner, repeatable)
                self.watch.follow(job, owner)
        except DitmeshError as error:
            self.metrics.refused.labels(refusal_response(error).code).inc()
            raise
        finally:
            for digest in kept:
                await self.backend.release_input(digest)
        caller.state.job = job.id
        # The answer may take minutes.
        caller.state.received()
        return job

    def _allowed(self, request: JobRequest, caller: Request, videos: bool | None) -> ModelCard:
        """The card of the model of a request that the server's limits allow."""
        if self.stopping:
            raise Refused(503, "the server is about to stop; ask again", headers=wait_header(self.settings.retry_after))
        card = self.model(request.model)
        # The output of a model is known after loading; before that, the ranks check it.
        if videos is not None and videos != card.video and (card.video or card.loaded):
            made, other = ("videos", "/v1/videos") if card.video else ("images", "/v1/images/generations")
            message = f"model {card.id!r} makes {made}; use POST {other} or /v1/jobs"
            raise Refused(400, message, "wrong_model", "model")
        self._check(request, card)
        if wait := self.limiter.wait(caller.state.owner or (caller.client.host if caller.client else "")):
            message = f"more than {self.settings.rate:g} jobs a minute; ask again in {wait:.0f} seconds"
            raise Refused(429, message, headers=wait_header(wait))
        return card

    @asynccontextmanager
    async def waiting(self, job: Job) -> AsyncIterator[None]:
        """Register a request that waits for a job's end."""
        self._waiting[job.id] += 1
        try:
            yield
        finally:
            self._waiting[job.id] -= 1
            if not self._waiting[job.id]:
                del self._waiting[job.id]

    async def client_gone(self, job: Job, owner: str, key: str | None) -> None:
        """Cancel a job after its client has disconnected.

        With an ``Idempotency-Key`` it may come back to it: the job is cancelled when no client has after a while.
        """
        if not self.settings.cancel_on_disconnect or self.stopping:
            return
        if key is None:
            await self.backend.cancel(job.id, owner)
            return
        task = asyncio.ensure_future(self._cancel_unless_back(job, owner))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _cancel_unless_back(self, job: Job, owner: str) -> None:
        await asyncio.sleep(self.settings.come_back)
        if job.id not in self._waiting:
            # It may have expired; a full disk lets it run.
            with suppress(DitmeshError):
                await self.backend.cancel(job.id, owner)

    async def submitted(
        self, body: JobBody, caller: Request, videos: bool | None = None, key: str | None = None
    ) -> Job:
        """Submit a job from its JSON form; see `accept`."""
        fields = sized(body.size, body.model_dump(exclude={"size", "inputs"}, exclude_none=True))
        request = validated(JobRequest, {name: fields[name] for name in fields if name in JobRequest.model_fields})
        usual = "format" not in body.model_fields_set
        return await self.accept(request, caller, videos, partial(self.inputs, body.inputs), key, usual)

    def _check(self, request: JobRequest, card: ModelCard) -> None:
        limits = self.settings
        size = request.width or card.width or 0, request.height or card.height or 0
        check_limits(request.model_dump(include=set(LIMITED)), limits)
        # The pipeline's own size is the operator's choice.
        if (request.width or request.height) and prod(size) > limits.max_pixels:
            raise Refused(
                400,
                f"size {size[0]}x{size[1]} has more than this server's {limits.max_pixels} pixels; use a smaller one",
                param="size",
            )

    async def inputs(self, given: Sequence[Input | InputData], kept: list[str]) -> tuple[Input, ...]:
        """A job's input images; images in the request are stored, with their digests in ``kept``.

        Raises:
            Refused: one of them is no image.
        """
        found = []
        for number, one in enumerate(given):
            if isinstance(one, InputData):
                name = f"inputs.{number}.data"
                png, _ = await self.uploads.png(from_data_url(one.data, name), name, one.role == "mask")
                one = Input(role=one.role, digest=await self.backend.put_input(png), scale=one.scale)
                kept.append(one.digest)
            found.append(one)
        return tuple(found)


def sized(size: str | None, request: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a request with the width and height of ``"1024x768"``.

    Raises:
        Refused: it is no size.
        InputError: it says something else than these fields.
    """
    found = dict(request)
    try:
        given = None if size == "auto" else parse_size(size)
    except FieldError as error:
        raise Refused(400, error.spelled(lambda _: "size"), param="size") from None
    if given is None:
        return found
    width, height = given
    if found.get("width", width) != width or found.get("height", height) != height:
        raise InputError(f"size {size!r} contradicts width and height; leave one of them out")
    return found | {"width": width, "height": height}


def validated(kind: type[Model], fields: Mapping[str, Any]) -> Model:
    """A model from those fields that are not None.

    Raises:
        Refused: a field is wrong.
    """
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise refusal_response(error) from None


def logged_job_id(id: str, request: Request) -> str:
    """The job's id, which is also added to the log.

    Raises:
        UnknownJob: it is none.
    """
    if JOB_ID.fullmatch(id) is None:
        raise UnknownJob(f"there is no job {id!r}; ids are job_ and 32 hexadecimal digits")
    request.state.job = id
    return id


def readable(path: os.PathLike[str]) -> os.stat_result:
    """The status of a file that can be opened: when the answer has begun it is too late to say that it cannot.

    Raises:
        OSError: it cannot.
    """
    with open(path, "rb") as file:
        return os.fstat(file.fileno())


def file_response(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of a file of one of these media types."""
    return {200: {"description": "The file.", "content": {kind: {"schema": FILE} for kind in kinds}}}


async def result_file(request: Request, id: str, index: int, download: bool = False) -> Response:
    """The file of a job's result.

    Raises:
        UnknownJob: there is none.
        StorageError: it cannot be read.
    """
    server: Server = request.app.state.server
    found = await server.backend.result(logged_job_id(id, request), index, request.state.owner)
    try:
        status = await asyncio.to_thread(readable, found.path)
    except FileNotFoundError:
        raise UnknownJob(f"the results of {id} have expired") from None
    except OSError as error:
        raise storage_error(f"cannot read {found.path}", error) or error from None
    headers = {"Cache-Control": "private, max-age=86400, immutable", "Accept-Ranges": "none"}
    if download:
        headers["Content-Disposition"] = f'attachment; filename="{id}-{index}{found.path.suffix}"'
    return FileResponse(found.path, media_type=found.media_type, headers=headers, stat_result=status)
