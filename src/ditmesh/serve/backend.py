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


class NoRanks(QueueFull):
    """The ranks have failed so often that nobody waits for them any more; they are started again all the same."""


class StorageError(ServerError):
    """The server's folder cannot be read or written: what was to be done was not.

    Attributes:
        passes: it may work in a moment, without anybody's help.
        broken: the database is damaged: it will not work however often it is tried.
    """

    def __init__(self, message: str, passes: bool = False, broken: bool = False) -> None:
        super().__init__(message)
        self.passes, self.broken = passes, broken


class NoSpace(StorageError):
    """The disk is full."""


class KeyReused(ServerError):
    """An idempotency key has come with another request before."""


class UnknownJob(ServerError, KeyError):
    """There is no such job, or it belongs to somebody else, or has expired."""

    __str__ = Exception.__str__


@dataclass(frozen=True)
class IdempotencyKey:
    """What makes a request that is sent again the same job.

    Attributes:
        key: the client's, of the header ``Idempotency-Key``.
        digest: of the request, which is to be the same one.
    """

    key: str
    digest: str


@dataclass(frozen=True)
class ResultFile:
    """A result on disk."""

    path: Path
    media_type: str


class JobBackend(Protocol):
    """Jobs, as the HTTP side asks for them. ``owner``: hash of the API key, or empty. Calls may overlap."""

    async def start(self) -> None:
        """Start the replicas, and take up the jobs of an earlier run. Returns before models are loaded."""
        ...

    async def stop(self, grace: float) -> None:
        """Take no more jobs, end those under way within ``grace`` seconds; what is left is queued for the next run."""
        ...

    async def given_up(self) -> str:
        """Returns when nothing will ever run here, with the reason: the process is to end. Jobs stay queued."""
        ...

    async def submit(self, request: JobRequest, owner: str, once: IdempotencyKey | None = None) -> Job:
        """Accept a job: once this returns it is on disk and not lost any more.

        A request that was accepted before with the same ``once`` is answered with its job, unless that was cancelled.

        Raises:
            InputError: the model cannot do it, in one sentence.
            QueueFull: too many jobs wait, or (`NoRanks`) nothing could run it.
            StorageError: it cannot be written down; `NoSpace`: as the disk is full.
            KeyReused: the key belongs to another request.
        """
        ...

    async def repeated(self, owner: str, once: IdempotencyKey) -> Job | None:
        """The job that was accepted with this key, unless it was cancelled. Raises `KeyReused`."""
        ...

    async def put_input(self, data: bytes) -> str:
        """Keep an input picture for a job that is submitted next; its digest. To be followed by `release_input`."""
        ...

    async def release_input(self, digest: str) -> None:
        """The job of an input picture was submitted, or refused: a picture that no job needs is removed."""
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

    def state(self, owner: str | None = None) -> ServerState:
        """The server as it is; ``owner``: with the ids of their jobs only, else of all."""
        ...
