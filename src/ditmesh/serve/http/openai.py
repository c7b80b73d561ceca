"""The images API for OpenAI's clients: single responses, and streams with partial images."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from math import ceil
from typing import Any, Literal, cast

from fastapi import APIRouter
from pydantic import BaseModel, Field, FiniteFloat, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from ..types import ENDED, Format, Input, InputRole, Job, JobImage, JobRequest, ModelCard
from .bodies import body_schema, read_body, read_form
from .errors import OF_JOBS, Refused, wait_header
from .intake import FILE, Server
from .streams import EventStream, ended, event_schema, sse, wait_disconnect
from .uploads import data_url

router = APIRouter(prefix="/v1/images", tags=["images"], responses=OF_JOBS)

PictureFormat = Literal["png", "jpeg", "webp"]

# Steps of a pipeline without a default in its card.
USUAL_STEPS = 50
# The HTTP status of a job's error; other errors are 500.
ERROR_STATUSES = {"invalid_request": 400, "no_space": 507}

# Fields of OpenAI's clients without an equivalent in diffusers: only the value without effect is accepted.
NOT_HERE = {
    "quality": (("auto", "standard", "medium"), "say steps"),
    "background": (("auto", "opaque"), "images have no transparency"),
    "moderation": (("auto", "low"), "nothing is moderated here"),
    "input_fidelity": ((), "say strength"),
    "style": ((), "say it in the prompt"),
    "output_compression": ((), "files are written in one quality"),
}

# Fields of a `JobRequest` under OpenAI's names.
OPENAI_NAMES = {"guidance_scale": "guidance", "output_format": "format"}


class ImageRequest(JobRequest):
    """A request for images from a prompt: a `JobRequest` with OpenAI's fields.

    Attributes:
        quality, background, moderation, style: only values that change nothing are taken; others are refused.
        user, safety_identifier: taken, and not used.
        output_compression: refused: files are written in one quality.
        partial_images: of a stream: how many previews there are before each image, at most.
    """

    guidance_scale: FiniteFloat | None = Field(default=None, exclude=True)
    output_format: PictureFormat | None = Field(default=None, exclude=True)
    response_format: Literal["b64_json", "url"] | None = Field(default=None, exclude=True)
    stream: bool = Field(default=False, exclude=True)
    partial_images: int = Field(default=0, ge=0, le=3, exclude=True)
    quality: str | None = Field(default=None, max_length=32, exclude=True)
    background: str | None = Field(default=None, max_length=32, exclude=True)
    moderation: str | None = Field(default=None, max_length=32, exclude=True)
    style: str | None = Field(default=None, max_length=32, exclude=True)
    output_compression: int | None = Field(default=None, exclude=True)
    user: str | None = Field(default=None, max_length=512, exclude=True)
    safety_identifier: str | None = Field(default=None, max_length=512, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {OPENAI_NAMES.get(name, name): value for name, value in fields.items()}

    def check(self, aliases: Collection[str] = ()) -> None:
        """Reject values that would be ignored.

        Args:
            aliases: names that only front ends for OpenAI use: they send ``quality`` and ``style`` by themselves.

        Raises:
            Refused: naming the field.
        """
        sent = ("quality", "style") if self.model in aliases else ()
        for name, (taken, instead) in NOT_HERE.items():
            value = getattr(self, name, None)
            if value is not None and value not in taken and name not in sent:
                usual = f"; use {taken[0]!r} or leave it out" if taken else "; leave it out"
                raise Refused(400, f"{name}={value!r} means nothing to this server{usual} ({instead})", param=name)
        if self.partial_images and not self.stream:
            raise Refused(400, "partial_images needs stream=true", param="partial_images")

    def with_previews(self, card: ModelCard) -> ImageRequest:
        """The request with as many previews as partial images."""
        if not self.partial_images:
            return self
        steps = self.steps or card.steps or USUAL_STEPS
        return self.model_copy(update={"previews": ceil(steps / (self.partial_images + 1))})


class EditRequest(ImageRequest):
    """A request for images from a prompt and an image."""

    input_fidelity: str | None = Field(default=None, max_length=32, exclude=True)

    @field_validator("loras", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError('no JSON; write it as [{"name": "oil", "scale": 0.8}]') from None


class ImageData(BaseModel):
    """One image: its file in base64 or its URL, and its seed."""

    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None
    seed: int


class ImagesResponse(BaseModel):
    """The images and their job."""

    created: int
    data: list[ImageData]
    background: Literal["opaque"] = "opaque"
    output_format: Format = "png"
    size: str | None = None
    job: str


class StreamedImage(BaseModel):
    """An event of a stream: a preview or a finished image. ``index`` is the image's number among ``n``."""

    type: str
    b64_json: str
    background: Literal["opaque"] = "opaque"
    created_at: int
    output_format: Format
    quality: Literal["auto"] = "auto"
    size: str
    index: int
    partial_image_index: int | None = None
    seed: int | None = None


STREAM_EVENTS = [f"image_{kind}.{what}" for kind in ("generation", "edit") for what in ("partial_image", "completed")]
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ImagesResponse,
        "description": "The images; with `stream` events.",
        "content": {"text/event-stream": {"schema": event_schema([*STREAM_EVENTS, "error"])}},
    },
}


@router.post("/generations", response_model=ImagesResponse, responses=ANSWERS, openapi_extra=body_schema(ImageRequest))
async def generations(request: Request) -> Response:
    """Generate images and wait for them. If the client disconnects, its job is cancelled."""
    server: Server = request.app.state.server
    body = await read_body(request, ImageRequest)
    body.check(server.settings.aliases)
    job = await server.accept(body.with_previews(server.model(body.model)), request, videos=False)
    return await _answered(server, request, body, job, "image_generation")


ADAPTERS = {"type": "string", "description": 'JSON: `[{"name": "oil", "scale": 0.8}]`'}
EDIT_BODY = body_schema(EditRequest, as_json=False, image=FILE, mask=FILE, loras=ADAPTERS)
EDIT_BODY["requestBody"]["content"]["multipart/form-data"]["schema"]["required"] = ["image", "prompt"]


@router.post("/edits", response_model=ImagesResponse, responses=ANSWERS, openapi_extra=EDIT_BODY)
async def edits(request: Request) -> Response:
    """Generate an image again, wholly or where a mask says: white, or (as OpenAI has it) transparent throughout."""
    server: Server = request.app.state.server
    body, files = await read_form(request, EditRequest, "image", "mask")
    body.check(server.settings.aliases)
    if "image" not in files:
        raise Refused(400, "image: an edit needs an image; send it as the file `image`", param="image")
    inputs = tuple(Input(role=cast(InputRole, name), data=data_url(data)) for name, data in files.items())
    asked = body.model_copy(update={"inputs": inputs}).with_previews(server.model(body.model))
    job = await server.accept(asked, request, videos=False)
    return await _answered(server, request, body, job, "image_edit")


# --- answers


async def _answered(server: Server, request: Request, body: ImageRequest, job: Job, kind: str) -> Response:
    """The answer to a request with an accepted job; names of its events begin with ``kind``."""
    owner: str = request.state.owner
    if body.stream:
        source = _events(server, job, owner, kind, body.partial_images)
        return EventStream(source, server.settings.keep_alive, server.closing)
    done = await _ended(server, request, job, owner)
    if done is None:
        await server.client_gone(job, owner)
        # The client has gone.
        return Response(status_code=499)
    if (refused := _failure(done)) is not None:
        raise refused
    base = str(request.base_url).rstrip("/")
    data = []
    for image in done.images:
        if body.response_format == "url":
            data.append(ImageData(url=f"{base}{image.url}", seed=image.seed))
        else:
            data.append(ImageData(b64_json=await _base64(server, done, image.index, owner), seed=image.seed))
    first = done.images[0]
    answer = ImagesResponse(
        created=int(done.finished or done.created),
        data=data,
        output_format=done.request.format,
        size=_size(first),
        job=done.id,
    )
    # Megabytes; in a thread, so that other clients' events are not delayed.
    return Response(await asyncio.to_thread(answer.model_dump_json, exclude_none=True), media_type="application/json")


async def _ended(server: Server, request: Request, job: Job, owner: str) -> Job | None:
    """The job after it has ended; None: the client has disconnected."""
    tasks = {
        "end": asyncio.ensure_future(_last(server, job, owner)),
        "gone": asyncio.ensure_future(wait_disconnect(request.receive)),
        "closing": asyncio.ensure_future(server.closing.wait()),
    }
    try:
        await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        if tasks["end"].done():
            return tasks["end"].result()
    except asyncio.CancelledError:
        # The server may report a disconnected client in this way.
        await asyncio.shield(asyncio.ensure_future(server.client_gone(job, owner)))
        raise
    finally:
        for task in tasks.values():
            await ended(task)
    if tasks["gone"].cancelled():
        raise _stops(server, job)
    return None


async def _last(server: Server, job: Job, owner: str) -> Job:
    """The job according to its last event."""
    async with aclosing(server.backend.events(job.id, owner)) as events:
        async for event in events:
            if event.event in ENDED:
                return Job.model_validate(event.data)
    raise _stops(server, job)


def _stops(server: Server, job: Job) -> Refused:
    # A client that retries would generate the same image twice.
    headers = {**wait_header(server.settings.retry_after), "x-should-retry": "false"}
    return Refused(503, f"the server is stopping; it continues {job.id} after its next start", headers=headers)


async def _events(server: Server, job: Job, owner: str, kind: str, partial: int) -> AsyncGenerator[str]:
    """The events of a stream: for each image at most ``partial`` previews, then the image."""
    over, seen = False, dict.fromkeys(range(job.request.n), 0)
    try:
        async with aclosing(server.backend.events(job.id, owner)) as events:
            async for event in events:
                told = event.data
                if event.event == "preview" and seen[told["image"]] < partial:
                    preview = StreamedImage(
                        type=f"{kind}.partial_image", b64_json=told["b64_json"], created_at=int(job.created),
                        output_format="jpeg", size=f"{told['width']}x{told['height']}", index=told["image"],
                        partial_image_index=seen[told["image"]],
                    )  # fmt: skip
                    yield sse(preview.model_dump(exclude_none=True), preview.type)
                    seen[told["image"]] += 1
                elif event.event == "image":
                    image = JobImage.model_validate(told)
                    data = await _base64(server, job, image.index, owner)
                    done = StreamedImage(
                        type=f"{kind}.completed", b64_json=data, created_at=int(job.created), seed=image.seed,
                        output_format=job.request.format, size=_size(image) or "auto", index=image.index,
                    )  # fmt: skip
                    yield sse(done.model_dump(exclude_none=True), done.type)
                elif event.event in ENDED:
                    over = True
                    if (refused := _failure(Job.model_validate(event.data))) is not None:
                        yield _error(refused)
        if not over:
            yield _error(_stops(server, job))
    finally:
        # The client has disconnected, or the server stops; the job has been cancelled or kept accordingly.
        if not over:
            await server.client_gone(job, owner)


def _error(refused: Refused) -> str:
    return sse({"error": refused.detail}, "error")


def _failure(job: Job) -> Refused | None:
    """The error that a client receives for a job that did not succeed."""
    # It was begun twice already.
    never = {"x-should-retry": "false"}
    if job.status == "cancelled":
        return Refused(409, f"{job.id} was cancelled", headers=never)
    if job.error is not None:
        return Refused(ERROR_STATUSES.get(job.error.code, 500), job.error.message, job.error.code, headers=never)
    return None


async def _base64(server: Server, job: Job, index: int, owner: str) -> str:
    file = await server.backend.result(job.id, index, owner)
    return await asyncio.to_thread(lambda: base64.b64encode(file.path.read_bytes()).decode())


def _size(image: JobImage) -> str | None:
    return f"{image.width}x{image.height}" if image.width and image.height else None
