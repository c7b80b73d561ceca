"""From an HTTP request to a job: checks, and the objects of the server."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Path
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ...errors import DitmeshError
from ..errors import UnknownJob
from ..queue.storage import storage_error
from ..settings import ApiSettings
from ..types import Input, Job, JobRequest, ModelCard
from .errors import Refused, refusal_response, wait_header
from .logs import JobWatch
from .metrics import Metrics
from .uploads import Uploads, from_data_url

if TYPE_CHECKING:
    from ..service import Service

# A file in OpenAPI.
FILE = {"type": "string", "format": "binary"}
# Fields with a limit set by the operator: the setting, and the counted value.
LIMITED = {
    "n": ("max_images", "results"),
    "steps": ("max_steps", "steps"),
    "frames": ("max_frames", "frames"),
    "prompt": ("max_prompt", "characters"),
    "negative_prompt": ("max_prompt", "characters"),
}
JOB_ID = re.compile(r"job_[0-9a-f]{32}")
JobId = Annotated[str, Path(description="`job_` and 32 hexadecimal digits", max_length=64)]


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
    uploads: Uploads
    grace: float = 0.0
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False
    _stopped: asyncio.Future[None] | None = None

    async def stop(self, grace: float | None = None) -> None:
        """Accept no more jobs, finish running ones within ``grace`` seconds, and end all streams. Runs once.

        Every caller returns when that is done.
        """
        if self._stopped is None:
            self.stopping = True
            self._stopped = asyncio.ensure_future(self.backend.stop(self.grace if grace is None else grace))
            self._stopped.add_done_callback(lambda _: self.closing.set())
        await asyncio.shield(self._stopped)

    def model(self, name: str) -> ModelCard:
        """A model by its name or alias; the first model for an empty name.

        Raises `Refused`: there is none of that name.
        """
        cards, name = self.backend.models(), self.settings.aliases.get(name, name)
        card = next((card for card in cards if name in (card.id, "")), None)
        if card is None:
            names = ", ".join(repr(card.id) for card in cards) or "none"
            raise Refused(
                404, f"model {name!r} is none of this server's; use one of: {names}", "model_not_found", "model"
            )
        return card

    async def accept(self, request: JobRequest, caller: Request, videos: bool | None = None) -> Job:
        """Submit a job.

        Args:
            caller: the HTTP request.
            videos: the endpoint is for videos alone, for images alone, or (None) for both.

        Raises:
            Refused: it is not allowed.
            DitmeshError: as `Service.submit`.
        """
        owner: str = caller.state.owner
        files: dict[str, bytes] = {}
        try:
            card = self._check(request, videos)
            # The receipt, the metrics and the log use the model's real name.
            more: dict[str, Any] = {"model": card.id, "inputs": await self._read_inputs(request.inputs, files)}
            if "format" not in request.model_fields_set and (videos or card.video):
                more["format"] = "mp4"
            request = request.model_copy(update=more)
            job = await self.backend.submit(request, owner, files)
            self.watch.accepted(job, owner)
        except DitmeshError as error:
            self.metrics.refused.labels(refusal_response(error).code).inc()
            raise
        caller.state.job = job.id
        # The answer may take minutes.
        caller.state.received()
        return job

    def _check(self, request: JobRequest, videos: bool | None) -> ModelCard:
        """The card of the model of a request that the operator's limits allow."""
        if self.stopping:
            raise Refused(503, "the server is about to stop; ask again", headers=wait_header(self.settings.retry_after))
        card = self.model(request.model)
        # The output of a model is known after loading; before that, the ranks check it.
        if videos is not None and videos != card.video and (card.video or card.loaded):
            made, other = ("videos", "/v1/videos") if card.video else ("images", "/v1/images/generations")
            message = f"model {card.id!r} makes {made}; use POST {other} or /v1/jobs"
            raise Refused(400, message, "wrong_model", "model")
        for name, (setting, what) in LIMITED.items():
            asked, most = getattr(request, name), getattr(self.settings, setting)
            asked = len(asked) if isinstance(asked, str) else asked
            if asked is not None and asked > most:
                raise Refused(400, f"{name}: {asked} {what} are more than this server's {most}; use fewer", param=name)
        size = request.width or card.width or 0, request.height or card.height or 0
        # The pipeline's own size is the operator's choice.
        if (request.width or request.height) and prod(size) > self.settings.max_pixels:
            most = self.settings.max_pixels
            message = f"size {size[0]}x{size[1]} has more than this server's {most} pixels; use a smaller one"
            raise Refused(400, message, param="size")
        return card

    async def _read_inputs(self, given: Sequence[Input], files: dict[str, bytes]) -> tuple[Input, ...]:
        """The inputs of a job; ``files`` gets the images that came with the request, PNGs by digest.

        Raises `Refused`: one of them is no image, or a mask has another size than its image.
        """
        stored: list[Input] = []
        sizes: dict[str, tuple[int, int]] = {}
        for sent in given:
            if sent.data:
                data = from_data_url(sent.data, sent.role)
                png, sizes[sent.role] = await self.uploads.png(data, sent.role, sent.role == "mask")
                sent = Input(role=sent.role, digest=hashlib.sha256(png).hexdigest(), scale=sent.scale)
                files[sent.digest] = png
            stored.append(sent)
        if len({sizes[role] for role in ("image", "mask") if role in sizes}) > 1:
            (width, height), (across, down) = sizes["image"], sizes["mask"]
            message = f"mask: it has {across}x{down} pixels and the image {width}x{height}; use one size"
            raise Refused(400, message, param="mask")
        return tuple(stored)

    async def client_gone(self, job: Job, owner: str) -> None:
        """Cancel the job of a client that has disconnected."""
        if not self.stopping:
            await self.backend.cancel(job.id, owner)


def logged_job_id(id: str, request: Request) -> str:
    """The job's id, which is also added to the log. Raises `UnknownJob`: it is none."""
    if JOB_ID.fullmatch(id) is None:
        raise UnknownJob(f"there is no job {id!r}; ids are job_ and 32 hexadecimal digits")
    request.state.job = id
    return id


def file_response(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of a file of one of these media types."""
    return {200: {"description": "The file.", "content": {kind: {"schema": FILE} for kind in kinds}}}


async def result_file(
    request: Request, id: str, index: int, download: bool = False, part: int | None = None
) -> Response:
    """The file of a job's result, or of a part of a video.

    Raises:
        UnknownJob: there is none.
        StorageError: it cannot be read.
    """
    server: Server = request.app.state.server
    result = await server.backend.result(logged_job_id(id, request), index, request.state.owner, part)

    def opened() -> os.stat_result:
        with result.path.open("rb") as file:
            return os.fstat(file.fileno())

    try:
        # When the answer has begun it is too late to say that the file cannot be read.
        status = await asyncio.to_thread(opened)
    except FileNotFoundError:
        raise UnknownJob(f"the results of {id} have expired") from None
    except OSError as error:
        raise storage_error(f"cannot read {result.path}", error) from None
    headers = {"Cache-Control": "private, max-age=86400, immutable", "Accept-Ranges": "none"}
    if download:
        headers["Content-Disposition"] = f'attachment; filename="{id}-{index}{result.path.suffix}"'
    return FileResponse(result.path, media_type=result.media_type, headers=headers, stat_result=status)
