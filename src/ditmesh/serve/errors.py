"""Errors of the server, idempotency keys and result files, as the queue passes them to the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ServerError

# Seconds after which a client should retry if the server is stopping.
AWAY = 10.0


class QueueFull(ServerError):
    """No more jobs are taken for now.

    Attributes:
        retry_after: seconds after which it is worth asking again.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineImpossible(ServerError):
    """A request cannot be done by its deadline.

    Attributes:
        possible_ms: the smallest ``deadline_ms`` that could be met now.
    """

    def __init__(self, message: str, possible_ms: int) -> None:
        super().__init__(message)
        self.possible_ms = possible_ms


class Stopping(QueueFull):
    """The server is stopping."""


class NoRanks(QueueFull):
    """The ranks have failed so often that jobs do not wait for them, although they are started again."""


class StorageError(ServerError):
    """The server's folder cannot be read or written, and the operation was not done.

    Attributes:
        passes: it may work in a moment, without a person's help.
        broken: the database is damaged: it will not work however often it is tried.
    """

    def __init__(self, message: str, passes: bool = False, broken: bool = False) -> None:
        super().__init__(message)
        self.passes, self.broken = passes, broken


class NoSpace(StorageError):
    """The disk is full."""


class KeyReused(ServerError):
    """An idempotency key was used with another request before."""


class UnknownJob(ServerError, KeyError):
    """There is no such job, or it belongs to another client, or has expired."""

    __str__ = Exception.__str__


@dataclass(frozen=True)
class IdempotencyKey:
    """Identifies a request that is sent again as the same job.

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
