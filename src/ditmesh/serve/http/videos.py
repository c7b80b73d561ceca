"""The videos API for OpenAI's clients: a job that clients poll until it is done, and its file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from ...generate.video import FPS
from ..types import ENDED, Input, Job, JobError, JobRequest, ModelCard
from .bodies import body_schema, read_body, read_form
from .errors import OF_JOBS, Refused
from .intake import FILE, JobId, Server, file_response, logged_job_id, result_file
from .uploads import data_url

router = APIRouter(prefix="/v1/videos", tags=["videos"], responses=OF_JOBS)

# Maximum seconds of a video.
LONGEST = 600.0
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


@router.post("", status_code=202, openapi_extra=body_schema(VideoRequest, input_reference=FILE))
async def post_video(request: Request) -> Video:
    """Submit a job of a video model, and return immediately."""
    server: Server = request.app.state.server
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data":
        body, files = await read_form(request, VideoRequest, "input_reference")
        inputs = tuple(Input(role="image", data=data_url(data)) for data in files.values())
        body = body.model_copy(update={"inputs": inputs})
    else:
        body = await read_body(request, VideoRequest)
    card = server.model(body.model)
    if body.seconds is not None:
        if body.frames is not None:
            raise Refused(400, "seconds and frames both set the length; leave one of them out", param="seconds")
        fps, multiple = body.fps or card.fps or FPS, card.frame_multiple
        frames = 1 + max(1, round(body.seconds * fps / multiple)) * multiple
        body = body.model_copy(update={"frames": frames, "fps": fps})
    return _video(await server.accept(body, request, True), card)


@router.get("/{id}")
async def get_video(request: Request, id: JobId) -> Video:
    """The current state of a video job."""
    server: Server = request.app.state.server
    job = await server.backend.job(logged_job_id(id, request), request.state.owner)
    return _video(job, server.model(job.request.model))


@router.delete("/{id}")
async def delete_video(request: Request, id: JobId) -> dict[str, Any]:
    """Cancel a video job at the next step. The file of a finished job is deleted only when it expires."""
    server: Server = request.app.state.server
    owner, id = request.state.owner, logged_job_id(id, request)
    if (job := await server.backend.job(id, owner)).status in ENDED:
        raise Refused(400, f"{id} has {job.status}; its file is deleted when it expires", "already_ended")
    await server.backend.cancel(id, owner)
    return {"id": id, "object": "video.deleted", "deleted": True}


@router.get("/{id}/content", response_class=Response, responses=file_response("video/mp4"))
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
