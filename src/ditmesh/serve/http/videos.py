"""The videos API for OpenAI's clients: a job that clients poll until it is done, and its file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from ...generate.video import FPS
from ..types import ENDED, Input, Job, JobError, JobRequest, ModelCard
from .bodies import body_schema, read_body, validated
from .errors import Refused, described
from .intake import FILE, IdempotencyHeader, JobId, Server, file_response, logged_job_id, result_file
from .uploads import data_url

router = APIRouter(prefix="/v1/videos", tags=["videos"])

# Maximum seconds of a video, and number of jobs searched for a list.
LONGEST, MOST = 600.0, 1000
VIDEO_STATUSES: dict[str, Literal["queued", "in_progress", "completed", "failed"]] = {
    "queued": "queued",
    "running": "in_progress",
    "succeeded": "completed",
    "failed": "failed",
    "cancelled": "failed",
}


class VideoRequest(JobRequest):
    """A `JobRequest` of a video: ``seconds`` may replace ``frames``, and the default format is MP4.

    OpenAI's API has prompt, model, seconds, size and input_reference; all else is more.
    """

    seconds: Annotated[float, Field(gt=0, le=LONGEST)] | None = Field(default=None, exclude=True)


class Video(BaseModel):
    """A job of one or several videos in OpenAI's form; ``/v1/jobs/{id}`` has more details.

    Attributes:
        progress: per cent of the steps.
        seconds, size: of the video that is there, else of the one asked for; size "auto": the pipeline's own.
    """

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None
    prompt: str
    seconds: str
    size: str
    seed: int | None = None
    frames: int | None = None
    fps: int | None = None
    error: dict[str, str] | None = None


class VideoList(BaseModel):
    """A list of video jobs."""

    object: Literal["list"] = "list"
    data: list[Video]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


def _video_form() -> dict[str, Any]:
    """The form of OpenAI's clients."""
    schema = VideoRequest.model_json_schema()
    schema.pop("$defs", None)
    fields = {name: one for name, one in schema["properties"].items() if name not in ("inputs", "loras")}
    return {**schema, "properties": fields | {"input_reference": FILE}}


@router.post(
    "",
    status_code=202,
    responses=described(401, 403, 404, 409, 413, 429, 503, 507),
    summary="Submit a job of videos",
    openapi_extra=body_schema(VideoRequest, _video_form()),
)
async def post_video(request: Request, key: IdempotencyHeader = None) -> Video:
    """Submit a job of a video model, and return immediately."""
    server: Server = request.app.state.server
    body = await _body(request)
    card = server.model(body.model)
    if body.seconds is not None:
        if body.frames is not None:
            raise Refused(400, "seconds and frames both set the length; leave one of them out", param="seconds")
        fps, multiple = body.fps or card.fps or FPS, card.frame_multiple
        frames = 1 + max(1, round(body.seconds * fps / multiple)) * multiple
        body = body.model_copy(update={"frames": frames, "fps": fps})
    return _video(await server.accept(body, request, True, key), card)


async def _body(request: Request) -> VideoRequest:
    """The request's fields, from JSON or a form."""
    server: Server = request.app.state.server
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        fields: dict[str, Any] = {}
        async with request.form(max_files=1, max_fields=64, max_part_size=server.settings.max_body) as form:
            for name, value in form.multi_items():
                if name in fields or (name == "input_reference") != isinstance(value, UploadFile):
                    raise Refused(400, f"{name}: it is there twice, or no field of that kind", param=name)
                fields[name] = await value.read() if isinstance(value, UploadFile) else value
        if (data := fields.pop("input_reference", None)) is not None:
            fields["inputs"] = [Input(role="image", data=data_url(data))]
        return validated(VideoRequest, fields)
    return await read_body(request, VideoRequest)


@router.get("", responses=described(401), summary="Videos")
async def get_videos(
    request: Request,
    after: Annotated[str | None, Query(max_length=64, description="Id of the last one of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> VideoList:
    """List the video jobs among the latest 1000 jobs of this key, the newest first or last."""
    server: Server = request.app.state.server
    cards = {card.id: card for card in server.backend.models() if card.video}
    jobs = [job for job in await server.backend.jobs(request.state.owner, MOST) if job.request.model in cards]
    if order == "asc":
        jobs.reverse()
    if after is not None:
        place = next((place for place, job in enumerate(jobs) if job.id == after), len(jobs))
        jobs = jobs[place + 1 :]
    found = [_video(job, cards[job.request.model]) for job in jobs[:limit]]
    ids = [one.id for one in found] or [None]
    return VideoList(data=found, has_more=len(jobs) > limit, first_id=ids[0], last_id=ids[-1])


@router.get("/{id}", responses=described(401, 404), summary="A video")
async def get_video(request: Request, id: JobId) -> Video:
    """The current state of a video job."""
    server: Server = request.app.state.server
    job = await server.backend.job(logged_job_id(id, request), request.state.owner)
    return _video(job, server.model(job.request.model))


@router.delete("/{id}", responses=described(401, 403, 404), summary="Cancel a video")
async def delete_video(request: Request, id: JobId) -> dict[str, Any]:
    """Cancel a video job at the next step. The file of a finished job is deleted only when it expires."""
    server: Server = request.app.state.server
    owner, id = request.state.owner, logged_job_id(id, request)
    if (job := await server.backend.job(id, owner)).status in ENDED:
        raise Refused(400, f"{id} has {job.status}; its file is deleted when it expires", "already_ended")
    await server.backend.cancel(id, owner)
    return {"id": id, "object": "video.deleted", "deleted": True}


@router.get(
    "/{id}/content",
    response_class=Response,
    responses={**described(401, 404), **file_response("video/mp4")},
    summary="A video's file",
)
async def get_content(
    request: Request,
    id: JobId,
    variant: Annotated[Literal["video"], Query(description="Others of OpenAI's are not made here")] = "video",
) -> Response:
    """The video's file, after the job has succeeded."""
    return await result_file(request, id, 0)


def _video(job: Job, card: ModelCard) -> Video:
    asked, done = job.request, job.images[0] if job.images else None
    frames, fps = asked.frames or card.frames, asked.fps or card.fps
    width, height = (done and done.width) or asked.width, (done and done.height) or asked.height
    error = job.error
    if job.status == "cancelled":
        error = JobError.model_construct(code="cancelled", message="it was cancelled")
    share = job.step / job.steps if job.steps else 0.0
    return Video(
        id=job.id,
        model=asked.model,
        status=VIDEO_STATUSES[job.status],
        progress=100 if job.status == "succeeded" else min(99, int(100 * share)),
        created_at=int(job.created),
        completed_at=int(job.finished) if job.finished and job.status == "succeeded" else None,
        expires_at=int(job.expires) if job.expires else None,
        prompt=asked.prompt,
        seconds=f"{frames / fps:g}" if frames and fps else "0",
        size=f"{width}x{height}" if width and height else "auto",
        seed=asked.seed,
        frames=frames,
        fps=fps,
        error=None if error is None else {"code": str(error.code), "message": error.message},
    )
