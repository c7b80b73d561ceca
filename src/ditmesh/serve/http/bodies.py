"""Request bodies, read within limits on the memory of all bodies and on the cost of parsing JSON."""

from __future__ import annotations

import asyncio
import json
import typing
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from ...errors import did_you_mean
from ...report.formatting import enumerated
from ..settings import ApiSettings
from .errors import Refused, wait_header

# Maximum bytes of JSON without images.
MOST_OF_WORDS = 1024 * 1024
# Characters that make a parser allocate: 3 million small fields take gigabytes and a minute. Of a request's own fields
# there are hundreds; texts may have any number of them, quoted.
STRUCTURE, OWN = b'",[{\\', 4096
# Maximum members of an object or a list.
MOST_MEMBERS = 64
# Maximum number of unknown fields that an error names.
MAX_NAMED_FIELDS = 3


# Fields with a limit set by the operator: the setting, and the counted value.
LIMITED = {
    "n": ("max_images", "results"),
    "steps": ("max_steps", "steps"),
    "frames": ("max_frames", "frames"),
    "prompt": ("max_prompt", "characters"),
    "negative_prompt": ("max_prompt", "characters"),
}


class Bodies:
    """Bytes of request bodies in memory, in total and for each client.

    Args:
        most: of one body. All of them may have twice as many, and a client's as many as one.
    """

    def __init__(self, most: int) -> None:
        self.each = most
        self.most = 2 * most
        self.bytes = 0
        self._of: Counter[str] = Counter()

    def take(self, who: str, more: int) -> None:
        """Count received bytes of a client's body.

        Raises:
            HTTPException: there is no room for them now.
        """
        if self._of[who] + more > self.each or self.bytes + more > self.most:
            message = f"{self.bytes} bytes of requests are being read already; ask again"
            raise HTTPException(503, message, wait_header(2))
        self._of[who] += more
        self.bytes += more

    def give_back(self, who: str, number: int) -> None:
        """Count the bytes as freed."""
        self.bytes -= number
        self._of[who] -= number
        if self._of[who] <= 0:
            del self._of[who]


def max_structure(settings: ApiSettings) -> int:
    """Maximum `STRUCTURE` characters of a request: its own, and those of two prompts with any escapes."""
    return OWN + 2 * 4 * settings.max_prompt


async def read_json(request: Request, known: Collection[str], most: int, settings: ApiSettings) -> dict[str, Any]:
    """The object in a request's body.

    Args:
        request: with a body that has not been read yet.
        known: names of its fields.
        most: bytes of it.

    Raises:
        Refused: it is too large, no JSON object, or has fields that are not known.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = f"the body is {kind[:80]!r}; send one JSON object with Content-Type: application/json"
        raise Refused(400, message, "invalid_json")
    data, structure = bytearray(), 0
    try:
        async for piece in request.stream():
            data += piece
            structure += sum(piece.count(one) for one in STRUCTURE)
            if len(data) > most:
                raise Refused(413, f"the request's body has more than {most} bytes; send a smaller one")
            if structure > max_structure(settings):
                raise Refused(400, "the body has more fields and marks than any request; send fewer", "invalid_json")
    except ClientDisconnect:
        raise Refused(400, "the body did not come whole; send it again") from None
    # In a thread, so that parsing megabytes of images does not delay other clients' events.
    fields = _parsed(data) if len(data) < MOST_OF_WORDS else await asyncio.to_thread(_parsed, data)
    if not isinstance(fields, dict):
        raise Refused(400, "the body is no JSON object; send one", "invalid_json")
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise unknown_fields(unknown, known)
    _check_members(fields)
    # Before the fields' own limits, which are wider and do not mention this server.
    check_limits(fields, settings)
    return fields


def check_limits(fields: Mapping[str, Any], settings: ApiSettings) -> None:
    """Reject values beyond the operator's limits, in a request's fields or in its JSON.

    Raises:
        Refused: naming the field.
    """
    for name, (setting, what) in LIMITED.items():
        asked, most = fields.get(name), getattr(settings, setting)
        asked = len(asked) if isinstance(asked, str) else asked
        if isinstance(asked, int) and asked > most:
            raise Refused(400, f"{name}: {asked} {what} are more than this server's {most}; use fewer", param=name)


def unknown_fields(unknown: Collection[str], known: Collection[str]) -> Refused:
    """The error message for fields that do not exist."""
    names = enumerated((repr(name[:80]) for name in unknown), MAX_NAMED_FIELDS, "more")
    first = next(iter(unknown))[:80]
    means = did_you_mean(first, known) if len(unknown) == 1 else ""
    words = f"there is no field {names}; leave {'it' if len(unknown) == 1 else 'them'} out{means}"
    return Refused(400, f"{first}: {words}", param=first)


def _parsed(data: bytes | bytearray) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON; send one JSON object", "invalid_json") from None


def _check_members(fields: Mapping[str, Any]) -> None:
    """Reject a value that would produce an error for each of its members."""
    left: list[tuple[str, Any]] = [*fields.items()]
    while left:
        name, value = left.pop()
        if isinstance(value, (dict, list)):
            if len(value) > MOST_MEMBERS:
                raise Refused(400, f"{name}: it has {len(value)} members; use {MOST_MEMBERS} at most", param=name)
            left += [(name, one) for one in (value.values() if isinstance(value, dict) else value)]


class JsonRoute(APIRoute):
    """A route with an optional body that `read_json` reads."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's."""
        handler, body = super().get_route_handler(), _body_of(self.endpoint)
        if body is None:
            return handler
        known = body.model_fields

        async def read(request: Request) -> Response:
            settings: ApiSettings = request.app.state.server.settings
            most = settings.max_body if "inputs" in known else min(MOST_OF_WORDS, settings.max_body)
            fields = await read_json(request, known, most, settings)
            return await handler(ReadRequest(request.scope, request.receive, fields))

        return read


def _body_of(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """The model of an endpoint's body."""
    hints = typing.get_type_hints(endpoint)
    found = (hint for name, hint in hints.items() if name != "return" and isinstance(hint, type))
    return next((hint for hint in found if issubclass(hint, BaseModel)), None)


class ReadRequest(Request):
    """A request with its JSON read."""

    def __init__(self, scope: Scope, receive: Receive, fields: dict[str, Any]) -> None:
        headers = [one for one in scope["headers"] if one[0] != b"content-type"]
        super().__init__({**scope, "headers": [*headers, (b"content-type", b"application/json")]}, receive)
        self._fields = fields

    async def body(self) -> bytes:
        """A nonempty placeholder: `json` returns the parsed body."""
        return b"{}"

    async def json(self) -> Any:
        """The object."""
        return self._fields
