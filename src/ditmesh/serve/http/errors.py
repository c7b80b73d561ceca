"""Errors of the HTTP API in OpenAI's form: ``{"error": {"message", "type", "code", "param"}}``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from ...errors import DitmeshError, InputError
from ...request import FieldError
from ..errors import NoSpace, QueueFull, Stopping, StorageError, UnknownJob


class ErrorDetail(BaseModel):
    """An error: a message, a class of errors, a code for programs, and the wrong field."""

    message: str
    type: str
    code: str | None = None
    param: str | None = None


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


class Refused(DitmeshError):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: one sentence.
        code, param: for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        unknown = ("", "server_error" if status >= 500 else "invalid_request_error", "error")
        _, self.type, usual = MEANINGS.get(status, unknown)
        self.status, self.code, self.headers = status, code or usual, dict(headers or {})
        self.param = param and _text(param)

    @property
    def detail(self) -> dict[str, Any]:
        """The error as clients read it, an `ErrorDetail`."""
        return {"message": _text(str(self)), "type": self.type, "code": self.code, "param": self.param}


# For each status: its meaning, its class of errors, and its default code.
MEANINGS: dict[int, tuple[str, str, str]] = {
    400: ("The request cannot be done; the message names the way out", "invalid_request_error", "invalid_value"),
    401: ("The key is missing or wrong", "authentication_error", "invalid_api_key"),
    403: ("A page of another site asks", "permission_error", "foreign_origin"),
    404: ("There is no such thing, or no longer", "not_found_error", "not_found"),
    405: ("Not with this method", "invalid_request_error", "method_not_allowed"),
    408: ("The request did not come in time", "invalid_request_error", "timeout"),
    409: ("The job was cancelled", "conflict_error", "cancelled"),
    413: ("The request's body is too large", "invalid_request_error", "body_too_large"),
    429: ("Too many jobs; Retry-After says when to ask again", "rate_limit_error", "rate_limit_exceeded"),
    500: ("The server or the job has failed; the code names the cause", "server_error", "internal"),
    503: ("Not ready, or about to stop; Retry-After says when to ask again", "server_error", "unavailable"),
    507: ("The disk is full", "server_error", "no_space"),
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait", "schema": {"type": "integer", "minimum": 1}}}


def described(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The responses of these statuses for FastAPI's documentation, and those of every endpoint."""
    return {
        status: {
            "model": ErrorBody,
            "description": MEANINGS[status][0] + ".",
            **({"headers": RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in sorted({400, 500, *statuses})
    }


# Of all endpoints of jobs.
OF_JOBS = described(401, 403, 404, 409, 413, 429, 503, 507)


def refusal_response(error: Exception) -> Refused:
    """The error response for a public exception."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, (RequestValidationError, ValidationError)):
        return _invalid(error.errors())
    if isinstance(error, HTTPException):
        what = "the body cannot be read; send what /openapi.json describes" if error.status_code == 400 else None
        return Refused(error.status_code, what or f"{error.detail}".lower(), headers=error.headers)
    if isinstance(error, UnknownJob):
        return Refused(404, str(error), "job_not_found")
    if isinstance(error, Stopping):
        return Refused(503, str(error), headers=wait_header(error.retry_after))
    if isinstance(error, QueueFull):
        return Refused(429, str(error), "queue_full", headers=wait_header(error.retry_after))
    if isinstance(error, (NoSpace, InputError)):
        return Refused(507 if isinstance(error, NoSpace) else 400, str(error))
    if isinstance(error, StorageError) and not error.passes:
        return Refused(500, str(error), "storage")
    # Other errors of the server are temporary states.
    return Refused(503, str(error), headers=wait_header(5))


def error_response(error: Exception) -> JSONResponse:
    """The response for a public exception."""
    refused = refusal_response(error)
    return JSONResponse({"error": refused.detail}, refused.status, refused.headers)


def _text(words: str) -> str:
    """A quoted value may contain unpaired surrogates, which a response cannot encode."""
    return words.encode("utf-8", "replace").decode()


def wait_header(seconds: float) -> dict[str, str]:
    """``Retry-After``, in whole seconds."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def _invalid(problems: Sequence[Any]) -> Refused:
    first = problems[0]
    if isinstance(error := (first.get("ctx") or {}).get("error"), FieldError):
        return Refused(400, error.spelled(lambda name: name), param=error.field)
    # The location in the body, and the alternative of a union, do not help a client.
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    param = ".".join(place)[:200]
    message, value = first["msg"].removeprefix("Value error, "), repr(first.get("input"))
    message = f"{message[:1].lower()}{message[1:]}"[:1000]
    if first["type"] not in ("missing", "value_error", "too_long"):
        message = f"{message}, not {value if len(value) <= 80 else f'{value[:77]}...'}"
    return Refused(400, f"{param}: {message}" if param else message, param=param or None)
