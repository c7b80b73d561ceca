"""The HTTP API as a FastAPI application; ``docs/serving.md`` describes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from fastapi import APIRouter, FastAPI, Header, Path, Query
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from ..._version import __version__
from ...errors import DitmeshError
from ..settings import ApiSettings
from ..types import EventName, Job, JobRequest, ModelCard, ServerState, Status
from . import openai, videos
from .bodies import Bodies, add_schemas, body_schema, read_body
from .errors import OF_JOBS, Refused, described, error_response, wait_header
from .guard import RequestGuard
from .intake import JobId, Server, file_response, logged_job_id, result_file
from .keys import Keys
from .logs import JobWatch
from .metrics import Metrics
from .streams import EventStream, event_schema, sse
from .uploads import Uploads

if TYPE_CHECKING:
    from ..service import Service

# Characters of a failure's text in /readyz.
LONGEST_REASON = 500


class JobList(BaseModel):
    """A list of jobs, the newest first."""

    object: Literal["list"] = "list"
    data: list[Job]


class ModelList(BaseModel):
    """The models that the server offers."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Alive(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


def stream_of(*names: str) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of a stream of events of these names."""
    content = {"text/event-stream": {"schema": event_schema(names)}}
    return {200: {"description": "Server-sent events; comments say that the stream is alive.", "content": content}}


# --- jobs

jobs = APIRouter(prefix="/v1", tags=["jobs"], responses=OF_JOBS)


@jobs.post("/jobs", status_code=202, openapi_extra=body_schema(JobRequest))
async def post_job(request: Request) -> Job:
    """Submit a job and return immediately. An accepted job is on disk and survives a restart."""
    return await request.app.state.server.accept(await read_body(request, JobRequest), request)


@jobs.get("/jobs")
async def get_jobs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    status: Annotated[Status | None, Query(description="Only jobs of this status")] = None,
) -> JobList:
    """List the jobs of this key, the newest first."""
    server: Server = request.app.state.server
    return JobList(data=await server.backend.jobs(request.state.owner, limit, status))


@jobs.get("/jobs/{id}")
async def get_job(request: Request, id: JobId) -> Job:
    """The current state of a job."""
    return await request.app.state.server.backend.job(logged_job_id(id, request), request.state.owner)


@jobs.delete("/jobs/{id}")
async def delete_job(request: Request, id: JobId) -> Job:
    """Cancel a job: it stops at the next step. A job that has ended does not change."""
    return await request.app.state.server.backend.cancel(logged_job_id(id, request), request.state.owner)


@jobs.get("/jobs/{id}/events", response_class=Response, responses=stream_of(*get_args(EventName), "error"))
async def get_events(
    request: Request,
    id: JobId,
    last: Annotated[
        int,
        Header(alias="Last-Event-ID", ge=0, lt=2**53, description="Go on after this event, after a lost connection"),
    ] = 0,
) -> Response:
    """Stream the events of a job, from the first (or the one after `Last-Event-ID`) to the last."""
    server: Server = request.app.state.server
    owner = request.state.owner
    # An unknown job has a different status, which must be sent before the stream begins.
    await server.backend.job(logged_job_id(id, request), owner)

    async def events() -> AsyncGenerator[str]:
        async with contextlib.aclosing(server.backend.events(id, owner, last)) as found:
            async for event in found:
                yield sse(event.data, event.event, event.id)

    return EventStream(events(), server.settings.keep_alive, server.closing)


@jobs.get(
    "/jobs/{id}/images/{index}",
    response_class=Response,
    responses=file_response("image/png", "image/jpeg", "image/webp", "video/mp4"),
)
async def get_image(
    request: Request,
    id: JobId,
    index: Annotated[int, Path(ge=0, lt=2**31)],
    download: Annotated[bool, Query(description="To be saved under a name instead of shown")] = False,
    part: Annotated[int | None, Query(ge=0, lt=2**31, description="Of a video: frames that an event told of")] = None,
) -> Response:
    """The file of a result, with its receipt if the format can hold one."""
    return await result_file(request, id, index, download, part)


# --- the server

about = APIRouter(tags=["server"], responses=described(401, 404, 503))


@about.get("/v1/models")
async def get_models(request: Request) -> ModelList:
    """List the models that the server offers; the first is used if a request names none."""
    return ModelList(data=request.app.state.server.backend.models())


@about.get("/v1/models/{id:path}")
async def get_model(request: Request, id: Annotated[str, Path(max_length=256)]) -> ModelCard:
    """One model."""
    return request.app.state.server.model(id)


@about.get("/v1/server")
async def get_server(request: Request) -> ServerState:
    """The queue, the replicas, and the latest step of each rank."""
    return request.app.state.server.backend.state(request.state.owner)


@about.get("/v1/server/events", response_class=Response, responses=stream_of("state", "error"))
async def get_server_events(request: Request) -> Response:
    """Stream the server's state whenever it changes."""
    server: Server = request.app.state.server
    owner: str = request.state.owner

    async def states() -> AsyncGenerator[str]:
        before = ""
        while True:
            text = sse(server.backend.state(owner).model_dump(mode="json"), "state")
            if text != before:
                yield text
            before = text
            await asyncio.sleep(server.settings.state_interval)

    return EventStream(states(), server.settings.keep_alive, server.closing)


@about.get("/healthz")
async def healthz() -> Alive:
    """The process answers."""
    return Alive()


@about.get("/readyz")
async def readyz(request: Request) -> Alive:
    """Readiness: a replica accepts jobs; otherwise 503, with the reason if ranks failed."""
    server: Server = request.app.state.server
    state = server.backend.state()
    if server.stopping or not state.ready:
        failed = next((one.message for one in state.replicas if one.message), "")
        waits = f"no replica is ready{f' ({failed[:LONGEST_REASON]})' if failed else ' yet'}"
        why = "the server is about to stop" if server.stopping else waits
        raise Refused(503, f"{why}; ask again", headers=wait_header(server.settings.retry_after))
    return Alive()


@about.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def get_metrics(request: Request) -> Response:
    """The metrics that Prometheus reads."""
    # Its parameter `version` is of Prometheus; it takes plain text, too.
    return Response(request.app.state.server.metrics.page(), media_type="text/plain; version=1.0.0; charset=utf-8")


# --- the application


def create_app(backend: Service, settings: ApiSettings | None = None, grace: float = 0.0) -> FastAPI:
    """The application; ``app.state.server`` is its `Server`.

    It starts the backend when it is started itself, and stops it unless that was done before.

    Args:
        settings: limits and behaviour.
        grace: seconds that jobs under way have when it is stopped.

    Raises:
        InputError: the file of keys cannot be read.
    """
    settings = settings or ApiSettings()
    metrics = Metrics(backend.state)
    watch = JobWatch(metrics, settings.log_prompts)
    backend.on_event = watch.tell
    server = Server(backend, settings, metrics, watch, Uploads(settings.max_input_pixels), grace)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await backend.start()
        try:
            yield
        finally:
            await server.stop()

    app = FastAPI(
        title="ditmesh",
        version=__version__,
        summary="Images from diffusers' Diffusion Transformers on several devices.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # A redirect would lose the body, so each path has one spelling.
        redirect_slashes=False,
    )
    app.state.server = server
    for router in (openai.router, videos.router, jobs, about):
        app.include_router(router)

    async def answer(_: Request, error: Exception) -> Response:
        return error_response(error)

    for kind in (DitmeshError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)
    if settings.page is not None and (settings.page / "index.html").is_file():
        app.add_api_route("/", _index, include_in_schema=False)
        app.mount("/static", RevalidatedFiles(directory=settings.page), name="static")
    keys = None if settings.keys is None else Keys(settings.keys)
    app.add_middleware(RequestGuard, settings=settings, keys=keys, metrics=metrics, bodies=Bodies(settings.max_body))
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Last-Event-ID"],
            expose_headers=["Retry-After"],
        )
    app.openapi = lambda: _openapi(app, keys is not None)  # type: ignore[method-assign]
    return app


class RevalidatedFiles(StaticFiles):
    """Static files that browsers revalidate, so that modules of two versions are not mixed after an upgrade."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


async def _index(request: Request) -> FileResponse:
    page = request.app.state.server.settings.page
    return FileResponse(page / "index.html", headers={"Cache-Control": "no-cache"})


def _openapi(app: FastAPI, keys: bool) -> dict[str, Any]:
    """The OpenAPI description, with the server's response to wrong fields: 400 in OpenAI's form instead of 422."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if not keys:
                    operation["responses"].pop("401", None)
                elif path.startswith(("/v1/", "/metrics")):
                    operation["security"] = [{"key": []}]
        for unused in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(unused, None)
        add_schemas(schema["components"]["schemas"], JobRequest, openai.ImageRequest, videos.VideoRequest)
        if keys:
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
    return app.openapi_schema
