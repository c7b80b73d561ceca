"""The interface between the HTTP side and the queue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import ServerError
from .types import Event, Job, JobRequest, ModelCard, ServerState, Status


class QueueFull(ServerError):
    """No more jobs are taken for now.

    Attributes:
        retry_after: seconds after which it is worth asking again.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Stopping(QueueFull):
    """The server is on its way out."""


class NoSpace(ServerError):
    """The disk is full: the job was not taken."""


class UnknownJob(ServerError, KeyError):
    """There is no such job, or it belongs to somebody else, or has expired."""

    __str__ = Exception.__str__


@dataclass(frozen=True)
class ResultFile:
    """A result on disk."""

    path: Path
    media_type: str


class Backend(Protocol):
    """Jobs, as the HTTP side asks for them. ``owner``: hash of the API key, or empty. Calls may overlap."""

    async def start(self) -> None:
        """Start the replicas, and take up the jobs of an earlier run. Returns before models are loaded."""
        ...

    async def stop(self, grace: float) -> None:
        """Take no more jobs, end those under way within ``grace`` seconds; what is left is queued for the next run."""
        ...

    async def submit(self, request: JobRequest, owner: str) -> Job:
        """Accept a job: once this returns it is on disk and not lost any more.

        Raises:
            InputError: the model cannot do it, in one sentence.
            QueueFull: too many jobs wait.
            NoSpace: it cannot be written down.
        """
        ...

    async def put_input(self, data: bytes) -> str:
        """Keep an input picture; its digest. It expires as results do."""
        ...

    async def job(self, id: str, owner: str) -> Job:
        """Raises `UnknownJob`."""
        ...

    async def jobs(self, owner: str, limit: int = 50, status: Status | None = None) -> list[Job]:
        """The newest first."""
        ...

    async def cancel(self, id: str, owner: str) -> Job:
        """Cancel a job; one that has ended stays as it is. Raises `UnknownJob`."""
        ...

    def events(self, id: str, owner: str, after: int = 0) -> AsyncIterator[Event]:
        """Events behind number ``after``, those to come too, up to the last one. Raises `UnknownJob`.

        Of a job of an earlier run only what its state says is repeated; previews are never repeated.
        """
        ...

    async def result(self, id: str, index: int, owner: str) -> ResultFile:
        """A result's file. Raises `UnknownJob`."""
        ...

    def models(self) -> list[ModelCard]: ...

    def state(self) -> ServerState: ...
